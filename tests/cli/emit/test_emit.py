"""Texts of `--emit`: read by the programs that they are for, and run where those are here."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.structural_schema import faults

from dure.cli.main import main, parse
from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.emit import Launch, arguments_of, launch_of, ranks_of
from dure.run.emit_targets import TARGETS, emitted
from dure.runtime.virtual.cluster import Cluster, Machines, SharedHost
from dure_studies import namespaces

SOURCE = Path(__file__).parents[3] / "src"
BIN = Path(sys.executable).parent
SCHEMAS = {"kubernetes": "trainjob", "pytorchjob": "pytorchjob", "ray": "rayjob"}
TORCHRUN_SCHEMAS = ("kubernetes", "pytorchjob")
PUBLISHED = "DURE_TEST_CRDS"
"""Environment variable: a folder with trainjob.yaml, pytorchjob.yaml and rayjob.yaml, published definitions of
resources."""

NASTY = """it's a "run" of $HOME, `date` \\ $(date) #1"""


@pytest.fixture(autouse=True)
def _no_options_from_outside(monkeypatch):
    """An option that the environment gives is part of a text."""
    for name in os.environ:
        if name.startswith("DURE_") and name != PUBLISHED:
            monkeypatch.delenv(name)


def launch(ranks=(1, 1), image="registry/dure:1", target="torchrun", **options):
    return launch_of(target, TrainConfig(**{"job": "digits-mlp", **options}), list(ranks), image)


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
    path.chmod(0o755)


def started(text, cwd, *, where=(), **environ):
    """Run a text in bash, with the programs in `cwd`/bin and those of this Python first; `where` leads to a host."""
    paths = os.pathsep.join([str(cwd / "bin"), str(BIN), os.environ["PATH"]])
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DURE_", "SLURM_"))}
    environment = {**kept, "PATH": paths, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        [*where, "bash", "-c", text], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def summary(done, out):
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "summary.json").read_text(encoding="utf-8"))


@pytest.fixture
def place(tmp_path):
    """A folder with bin/torchrun, which prints the words that it is given instead of starting ranks."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "torchrun", 'printf "%s\\0" "$@"\n')
    return tmp_path


# ---- the arguments


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ssp:bound=3 ps:shards=2", "steps": 5},
        {"sync": "averaging", "topology": "collective", "codec": "fp16", "partition": "gpipe:stages=2", "workers": 4},
        {"batch_sizes": (8, 16), "lr": 1e-5, "seed": 7, "scale_lr": True, "epochs": 0.5, "data": Path("d ata")},
        {"out": Path("runs/a"), "trace": True, "checkpoint_every": 3, "device": "cuda:1", "integrity": "checksum"},
        {"key_file": Path("k"), "on": "torchrun", "frozen_after": 5.5, "warn_after": 2.0, "grace": 0.0, "exact": True},
    ],
)
def test_the_arguments_are_read_as_the_options_that_they_were_made_of(options):
    config = TrainConfig(job="digits-mlp", **options)
    read = parse(arguments_of(config), {})
    assert TrainConfig(**{name: getattr(read, name) for name in TrainConfig.__dataclass_fields__}) == config


def test_machines_have_the_workers_of_the_cluster():
    assert ranks_of(Cluster(machines=(Machines(count=2, workers=3), Machines(count=1)))) == [3, 3, 1]
    assert ranks_of(Cluster(machines=(Machines(count=4),), host=SharedHost())) == [4]


# ---- a line for torchrun, and a script for Slurm


def words_of(done):
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def test_the_shell_gives_torchrun_each_argument_whole(place):
    text = emitted("torchrun", launch([2], job="my jobs.py:job", out=NASTY, sync="bsp"))
    words = words_of(started(text, place))
    given = ["-m", "dure", "train", "my jobs.py:job", "--sync", "bsp", "--out", NASTY, "--on", "torchrun"]
    assert words == ["--nproc-per-node", "2", *given]


def test_the_line_of_several_machines_names_their_meeting(place):
    text = emitted("torchrun", launch([2, 2, 2], sync="bsp", out="r", checkpoint_every=4))
    words = words_of(started(text, place))
    assert words[:6] == ["--nnodes", "3", "--node-rank", "NODE", "--nproc-per-node", "2"]
    assert words[6:10] == ["--master-addr", "HOST", "--master-port", "29500"]
    assert words[10:13] == ["--max-restarts", "3", "-m"]


SRUN = """\
while [[ $1 == --* ]]; do shift; done
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
  SLURM_PROCID=$node SLURM_NODEID=$node "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "${status:-0}"
"""
"""Starts the command once for each node, on this machine, as `srun` does on the nodes."""

SCONTROL = '[[ "$*" == "show hostnames machine[1-2]" ]] && printf "%s\\n" machine1 localhost\n'


@pytest.fixture
def slurm(tmp_path):
    """A folder whose bin/ has `srun` and `scontrol`; torchrun is the real one."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "srun", SRUN)
    program(tmp_path / "bin", "scontrol", SCONTROL)
    return tmp_path


def submitted(script, place, *, where=(), **environ):
    """Run a batch script with the environment that `sbatch` makes of its directives."""
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    head = script.split("set -euo pipefail")[0]
    asked = dict(line.removeprefix("#SBATCH --").split("=") for line in head.splitlines() if line.startswith("#SBATCH"))
    given = {"SLURM_JOB_NODELIST": "machine[1-2]", "SLURM_JOB_ID": "4711", "MASTER_PORT": str(free_port())}
    sizes = {"SLURM_JOB_NUM_NODES": asked["nodes"], "SLURM_CPUS_PER_TASK": asked["cpus-per-task"]}
    return started(script, place, where=where, **{**given, **sizes, **environ})


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_each_task_of_slurm_gives_torchrun_each_argument_whole(slurm):
    program(slurm / "bin", "torchrun", 'printf "%s\\0" "$@" end\n')
    script = emitted("slurm", launch([2, 2], job="my jobs.py:job", out=NASTY, device="cuda", checkpoint_every=2))
    assert "\n#SBATCH --gpus-per-node=2\n" in script
    words = words_of(submitted(script, slurm, MASTER_PORT="29999"))
    options = ["--checkpoint-every", "2", "--device", "cuda", "--out", NASTY, "--on", "torchrun"]
    both = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "3", "--rdzv-id", "4711"]
    both += ["--master-addr", "127.0.0.1", "--master-port", "29999", "-m", "dure", "train", "my jobs.py:job", *options]
    tasks = [["--node-rank", str(node), *both, "end"] for node in (0, 1)]
    assert words in ([*tasks[0], *tasks[1]], [*tasks[1], *tasks[0]])


def test_a_comment_stays_one_whatever_the_name_of_the_job(slurm):
    program(slurm / "bin", "torchrun", "exit 0\n")
    job = "a\ntouch broken\n.py:job"
    assert started(emitted("torchrun", launch(job=job)), slurm).returncode == 0
    assert submitted(emitted("slurm", launch(job=job)), slurm).returncode == 0
    assert not (slurm / "broken").exists()


def test_a_job_that_slurm_requeues_resumes_once_there_is_a_checkpoint(slurm):
    program(slurm / "bin", "torchrun", 'printf "%s\\0" "$@"\n')
    script = emitted("slurm", launch(out=NASTY, checkpoint_every=2))
    assert "--resume" not in words_of(submitted(script, slurm, SLURM_RESTART_COUNT="1"))
    latest = slurm / NASTY / "checkpoints" / "LATEST"
    latest.parent.mkdir(parents=True)
    latest.touch()
    words = words_of(submitted(script, slurm, SLURM_RESTART_COUNT="1"))
    assert words[-6:] == ["dure", "train", "--resume", NASTY, "--on", "torchrun"]
    assert "--resume" not in words_of(submitted(script, slurm))


def test_a_script_ends_where_slurm_names_no_machine(slurm):
    program(slurm / "bin", "scontrol", "exit 1\n")
    program(slurm / "bin", "torchrun", "exit 0\n")
    assert submitted(emitted("slurm", launch()), slurm).returncode != 0


@pytest.mark.long
def test_the_line_trains_here(tmp_path):
    (tmp_path / "bin").mkdir()
    text = emitted("torchrun", launch([2], sync="bsp", steps=3, out="my runs/it's one"))
    found = summary(started(text, tmp_path), tmp_path / "my runs" / "it's one")
    assert (found["workers"], found["on"], found["time"], found["steps"]) == (2, "torchrun", "real", 3)


@pytest.mark.long
def test_the_script_trains_on_two_machines_with_servers_beside_the_workers(slurm):
    script = emitted("slurm", launch([1, 1], strategy="ssp:bound=3 ps:shards=2", steps=3, out="my runs/a"))
    found = summary(submitted(script, slurm), slurm / "my runs" / "a")
    assert (found["workers"], found["on"], found["time"], found["steps"]) == (2, "torchrun", "real", 3)
    assert found["updates_applied"] == 6


@pytest.mark.soak
def test_a_requeued_script_trains_on(slurm):
    script = emitted("slurm", launch([1, 1], sync="bsp", steps=4, out="run", checkpoint_every=2))
    assert summary(submitted(script, slurm), slurm / "run")["steps"] == 4
    done = submitted(script.replace("--resume run", "--resume run --steps 6"), slurm, SLURM_RESTART_COUNT="1")
    assert summary(done, slurm / "run")["steps"] == 6


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
@pytest.mark.parametrize("strategy", ["ssp:bound=3 ps:shards=2", "bsp"])
def test_the_script_trains_across_hosts_whose_own_names_lead_to_their_loopbacks(strategy, slurm):
    script = emitted("slurm", launch([1, 1], strategy=strategy, steps=3, out="run"))
    with namespaces.hosts(2, bandwidth=12.5e6) as hosts:
        program(slurm / "bin", "scontrol", f"printf '%s\\n' {' '.join(hosts.addresses)}\n")
        host = f"hosts=({' '.join(hosts.names)})\n"
        program(slurm / "bin", "srun", host + SRUN.replace('"$@" &', 'ip netns exec "${hosts[node]}" "$@" &'))
        done = submitted(script, slurm, where=["ip", "netns", "exec", hosts.names[0]])
    assert (summary(done, slurm / "run")["workers"], summary(done, slurm / "run")["steps"]) == (2, 3)


# ---- manifests


def schema_of(target):
    return json.loads((Path(__file__).parent / "schemas" / f"{SCHEMAS[target]}.json").read_text(encoding="utf-8"))


def manifest(target, *given, **options):
    return yaml.safe_load(emitted(target, launch(*given, target=target, **options)))


def command_in(target, found):
    spec = found["spec"]
    if target == "kubernetes":
        return spec["trainer"]["command"]
    return spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("target", SCHEMAS)
@pytest.mark.parametrize("options", [{}, {"device": "cuda", "strategy": "ssp:bound=3 ps:shards=2", "out": NASTY}])
def test_a_manifest_is_one_of_its_schema(target, options):
    known, found = schema_of(target), manifest(target, [2, 2, 2], **options)
    assert found["apiVersion"] == f"{known['group']}/{known['version']}"
    assert found["kind"] == known["kind"]
    assert faults(found, known["schema"]) == []


@pytest.mark.parametrize(
    ("target", "change", "fault"),
    [
        ("kubernetes", lambda spec: spec["trainer"].update(numNodes="2"), "spec.trainer.numNodes is of type str"),
        ("kubernetes", lambda spec: spec["trainer"].update(nodes=2), "spec.trainer.nodes is unknown"),
        ("kubernetes", lambda spec: spec.pop("runtimeRef"), "spec.runtimeRef is missing"),
        ("kubernetes", lambda spec: spec["runtimeRef"].update(name=""), "name is shorter than 1"),
        ("kubernetes", lambda spec: spec["trainer"].update(command=["a"] * 129), "command is longer than 128"),
        ("pytorchjob", lambda spec: spec.update(nprocPerNode=2), "spec.nprocPerNode is of type int"),
        ("pytorchjob", lambda spec: spec["pytorchReplicaSpecs"]["Master"].update(replicas=True), "type bool"),
        ("pytorchjob", lambda spec: spec.update(pytorchReplicaSpecs=[]), "type list, not object"),
        ("ray", lambda spec: spec["rayClusterSpec"].pop("headGroupSpec"), "headGroupSpec is missing"),
        ("ray", lambda spec: spec["rayClusterSpec"]["authOptions"].update(mode="none"), "authOptions.mode"),
    ],
)
def test_a_broken_manifest_is_none(target, change, fault):
    found = manifest(target)
    change(found["spec"])
    assert fault in "\n".join(faults(found, schema_of(target)["schema"]))


@pytest.mark.skipif(PUBLISHED not in os.environ, reason=f"{PUBLISHED} names no folder with published schemas")
@pytest.mark.parametrize("target", SCHEMAS)
def test_a_manifest_is_one_of_the_published_schema(target):
    path = Path(os.environ[PUBLISHED]) / f"{SCHEMAS[target]}.yaml"
    published = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
    known = schema_of(target)
    assert (published["group"], published["names"]["kind"]) == (known["group"], known["kind"])
    (version,) = [each for each in published["versions"] if each["name"] == known["version"]]
    schema = version["schema"]["openAPIV3Schema"]
    assert_part(known["schema"], schema)
    for options in ({}, {"device": "cuda", "out": NASTY}):
        assert faults(manifest(target, [2, 2, 2], **options), schema) == []


def assert_part(some, whole):
    """Fail where a schema says other things of its fields than another one, which has more of them."""
    for keyword, value in some.items():
        if keyword == "properties":
            for name, inner in value.items():
                assert_part(inner, whole["properties"][name])
        elif keyword in ("items", "additionalProperties"):
            assert_part(value, whole[keyword])
        else:
            assert whole[keyword] == value, keyword


def test_a_train_job_asks_for_the_machines_and_gpus():
    trainer = manifest("kubernetes", [4, 4], device="cuda")["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 4}}
    assert "resourcesPerNode" not in manifest("kubernetes", device="auto")["spec"]["trainer"]


def test_a_pytorch_job_has_a_master_and_the_other_machines():
    def counts(ranks):
        return {
            name: each["replicas"]
            for name, each in manifest("pytorchjob", ranks)["spec"]["pytorchReplicaSpecs"].items()
        }

    assert counts([2, 2, 2]) == {"Master": 1, "Worker": 2}
    assert counts([2]) == {"Master": 1}


def test_a_ray_job_has_a_pod_for_each_machine_and_one_for_the_driver():
    spec = manifest("ray", [2, 2, 2], sync="bsp")["spec"]["rayClusterSpec"]
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    assert [group["replicas"] for group in spec["workerGroupSpecs"]] == [3]
    assert spec["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize(("reserve", "gpus"), [(None, 2), ("worker:gpus=3", 6), ("worker:gpus=0.25", 1)])
def test_the_pods_of_a_ray_job_have_the_gpus_that_its_workers_reserve(reserve, gpus):
    spec = manifest("ray", [2, 2], sync="bsp", device="cuda", reserve=reserve)["spec"]
    (machines,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = machines["template"]["spec"]["containers"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": gpus}}
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "resources" not in head


def test_the_shell_of_ray_gives_dure_each_argument_whole(tmp_path):
    """Ray's job supervisor gives the entry point to a shell."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin", "python", 'printf "%s\\0" "$@"\n')
    words = words_of(started(manifest("ray", [2, 2], out=NASTY)["spec"]["entrypoint"], tmp_path))
    assert words == ["-m", "dure", "train", "digits-mlp", "--out", NASTY, "--workers", "4", "--on", "ray:auto"]


@pytest.mark.parametrize("target", TORCHRUN_SCHEMAS)
def test_kubernetes_gives_each_argument_whole(target):
    """Kubernetes reads $$ as $, and $(NAME) as a variable."""
    words = command_in(target, manifest(target, out=NASTY))
    assert not any("$(" in word.replace("$$", "") for word in words)
    read = [word.replace("$$", "$") for word in words]
    assert read == ["torchrun", "-m", "dure", "train", "digits-mlp", "--out", NASTY, "--on", "torchrun"]


@pytest.mark.parametrize("job", ["digits-mlp", "/a/My Jobs_2.py:make", "x" * 80, "jobs.py:job-", "9:=,"])
@pytest.mark.parametrize("target", SCHEMAS)
def test_the_name_of_a_manifest_is_one_of_dns(target, job):
    """Label of RFC 1035, which both operators ask for; pods have longer names."""
    name = manifest(target, job=job)["metadata"]["name"]
    assert name[0].isalpha()
    assert name[-1].isalnum()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert len(name) <= 40


@pytest.mark.soak
@pytest.mark.parametrize("target", TORCHRUN_SCHEMAS)
def test_the_command_of_a_manifest_trains_in_two_pods(target, tmp_path):
    """With the environment that the operator gives each pod."""
    (tmp_path / "bin").mkdir()
    words = command_in(target, manifest(target, [1, 1], sync="bsp", steps=3, out="run"))
    port = str(free_port())
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    pod = "PET_NODE_RANK={0} "
    if target == "pytorchjob":
        given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        pod += "RANK={0} "
    first, second = (pod.format(number) + shlex.join(words) for number in (0, 1))
    done = started(f"{first} & {second}; status=$?; wait $! && exit $status", tmp_path, **given)
    found = summary(done, tmp_path / "run")
    assert (found["workers"], found["on"], found["steps"]) == (2, "torchrun", 3)


# ---- the commands


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_train_prints_the_text_alone_and_trains_nothing(tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["train", "digits-mlp", "--sync", "bsp", "--workers", "4", "--nodes", "2", "--out", str(out)]
    text = printed(capsys, *arguments, "--emit", "slurm")
    assert text == emitted("slurm", launch([2, 2], sync="bsp", out=out))
    assert json.loads(printed(capsys, *arguments, "--emit", "slurm", "--json")) == {"emit": "slurm", "text": text}
    assert not out.exists()


def test_the_machines_are_those_of_a_cluster_file(tmp_path, capsys):
    file = tmp_path / "ours.yaml"
    file.write_text("machines: [{count: 3, workers: 2}]\n")
    arguments = ["train", "digits-mlp", "--sync", "bsp", "--on", str(file), "--emit"]
    assert printed(capsys, *arguments, "torchrun") == emitted("torchrun", launch([2, 2, 2], sync="bsp"))
    text = printed(capsys, *arguments, "kubernetes", "--image", "registry/dure:1", "--key-file", "k")
    assert text == emitted("kubernetes", launch([2, 2, 2], sync="bsp", key_file="k", on="torchrun"))


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    ["plan digits-mlp", pytest.param("train digits-mlp --strategy auto --key-file k", marks=pytest.mark.soak)],
)
def test_the_best_strategy_of_a_plan_is_that_of_the_text(command, tmp_path, capsys):
    file = tmp_path / "fast.yaml"
    file.write_text("machines: [{count: 2, compute: {flops_per_second: 1e8}}]\nlink: {bandwidth: 100 Gbit/s}\n")
    assert main([*command.split(), "--on", str(file), "--within", "1", "--emit", "slurm"]) == 0
    out, errors = capsys.readouterr()
    options = {"key_file": "k", "on": "torchrun"} if "--key-file" in command else {}
    assert out == emitted("slurm", launch([1, 1], strategy="bsp", batch_size=32, **options))
    assert ("auto: bsp" if options else "Plain data parallelism (DDP) is the best") in errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--emit kubernetes", "--emit kubernetes needs the container image of the pods.*Write --image"),
        ("--emit slurm --image x", "image=x is for the pods of --emit kubernetes, pytorchjob or ray. Leave it out"),
        ("--nodes 3", "nodes=3 is for a text that --emit writes. Leave it out, or add --emit slurm"),
        ("--emit slurm --nodes 3 --workers 4", "4 workers cannot be on 3 machines.*Write --workers 3"),
        ("--emit slurm --on CLUSTER --nodes 5", "nodes=5 was asked for, and --on .* has 3 machines"),
        ("--emit slurm --on CLUSTER --workers 5", "--workers 5 was asked for, and the cluster has 7"),
        ("--emit slurm --on CLUSTER", "the machines have 2, 2, 3 workers.*equal numbers of workers"),
        ("--emit slurm --on nowhere.yaml", '"nowhere.yaml" is no place and no file'),
        ("--emit slurm --resume run", "resume=run names one that has begun.*write --resume run --on torchrun"),
        ("--emit ray --image x --resume run", "resume=run names one.*write --resume run --on ray:auto"),
        ("--emit ray --image x --device auto", "has the GPU that Ray reserves for it.*--device cuda"),
        ("--emit slurm --workers 2..4", "starts a fixed number of workers, and --workers is 2..4"),
        ("--emit slurm --timing-only", "timing_only is for virtual time"),
        ("--emit slurm --nodes 2 --strategy hogwild", "needs one machine.*one with 4 workers.*downpour ps"),
        ("--emit slurm --workers 3 --partition gpipe:stages=2", "gpipe:stages=2.* needs 2 workers.*Use 2 workers"),
        ("--emit slurm --strategy nosuch", "nosuch"),
        ("--emit slurm --on torchrun --sync auto", "auto plans before workers start"),
    ],
)
def test_what_cannot_be_started_is_refused(arguments, sentence, tmp_path, capsys):
    file = tmp_path / "uneven.yaml"
    file.write_text("machines: [{count: 2, workers: 2}, {workers: 3}]\n")
    words = [str(file) if word == "CLUSTER" else word for word in arguments.split()]
    assert main(["train", "digits-mlp", *words]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    with pytest.raises(UsageError, match=sentence):
        raise UsageError(errors)


PAGES = [SOURCE.parent / "docs" / "how-to" / f"{name}.md" for name in ("torchrun", "slurm", "kubernetes", "wifi")]
SHOWN = re.compile(
    r"```shell\ndure ([^\n]* --emit [^\n]*)\n```\n\n```\{code-block\} text\n:caption: Output\n(.*?)```", flags=re.DOTALL
)


def test_the_pages_show_what_their_commands_print(capsys):
    shown = [found for page in PAGES for found in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert len(shown) == 8
    assert {parse(shlex.split(command), {}).emit for command, _ in shown} == set(TARGETS)
    for command, text in shown:
        assert printed(capsys, *shlex.split(command)) == text


def test_one_machine_may_share_its_memory():
    assert "hogwild" in emitted("torchrun", launch([2], strategy="hogwild"))


def test_each_target_is_one_of_the_command_line():
    for target in TARGETS:
        assert parse(["train", "digits-mlp", "--emit", target], {}).emit == target
    assert Launch(TrainConfig(job="x"), 1, 1).image == ""
