"""Runs on Ray: the same results as on this machine alone, and nothing left over. All share a cluster of two nodes."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dure.runtime.launch import ray_guard

pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]

SECONDS = 400
"""Time limit of one run."""

OPTIONS = ["--workers", "3", "--steps", "40", "--seed", "1", "--json"]

RAY = Path(sys.executable).with_name("ray")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray of two nodes that asks for a token, and the environment of a driver that has it."""
    address = f"127.0.0.1:{free_port()}"
    folder = tempfile.mkdtemp(prefix="dure-ray-test-")
    token = Path(folder) / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environ |= {
        "RAY_ADDRESS": address,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    start = [RAY, "start", "--num-cpus", "1", "--object-store-memory", str(80 << 20), "--disable-usage-stats"]
    head = ["--head", "--port", address.partition(":")[2], "--temp-dir", folder, "--include-dashboard", "false"]
    head += ["--num-gpus", "2"]
    try:
        with open(Path(folder) / "ray.out", "w", encoding="utf-8") as out:
            for role in ([*head, "--node-ip-address", "127.0.0.1"], ["--address", address]):
                subprocess.run([*start, *role], env=environ, check=True, stdout=out, stderr=out, timeout=SECONDS)
        yield address, environ
    finally:
        ray_guard.clean(folder)


def dure(*words, environ=None, check=True):
    command = [sys.executable, "-m", "dure", *words]
    environ = environ or {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=SECONDS)
    assert not check or done.returncode == 0, done.stderr
    return done


def test_runs_on_two_nodes_have_the_models_of_local_runs(cluster, tmp_path):
    """The command connects to Ray for each run anew."""
    options = ["--strategy", "bsp", "--strategy", "bsp ps:shards=2", "--on", "local", "--on", "ray:auto"]
    options += ["--report", str(tmp_path / "report.html")]
    token = Path(cluster[1]["RAY_AUTH_TOKEN_PATH"])
    token.chmod(0o644)
    done = dure("compare", "digits-mlp", *options, *OPTIONS, environ=cluster[1])
    token.chmod(0o600)
    assert f"others can read the token of Ray: chmod 600 {token}" in done.stderr
    runs = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert [run["on"] for run in runs] == ["local", "local", "ray:auto", "ray:auto"]
    assert [run["params_sha256"] for run in runs[2:]] == [run["params_sha256"] for run in runs[:2]]


PROGRAM = Path(__file__).with_name("ray_failures.py")


@pytest.fixture(scope="module")
def made(cluster, tmp_path_factory):
    """Makes a run of PROGRAM, a process that has connected to Ray before its runs."""
    address, environ = cluster
    tests = str(Path(__file__).parents[2])
    environ = {**environ, "PYTHONPATH": os.pathsep.join([tests, environ["PYTHONPATH"]]), "OMP_NUM_THREADS": "1"}
    errors = tmp_path_factory.mktemp("ray") / "errors"
    with errors.open("w") as file:
        command = [sys.executable, PROGRAM, address, Path(environ["RAY_AUTH_TOKEN_PATH"]).parent]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        program = subprocess.Popen(command, env=environ, stderr=file, **pipes)

    def run(name):
        print(name, tmp_path_factory.mktemp(name), file=program.stdin, flush=True)
        for line in program.stdout:
            if line.startswith("> "):
                return json.loads(line[2:])
        raise AssertionError(errors.read_text()[-3000:])

    with program:
        try:
            yield run
        finally:
            program.kill()


def test_a_server_of_downpour_restarts_alone_and_the_key_of_the_run_is_in_no_file(made):
    found = made("the_key")
    assert found["deaths"] == {"server 1": "killed by signal 9 (SIGKILL)"}
    assert found["failures_survived"] == 1
    assert found["steps"] == {"worker 0": 300, "worker 1": 300}
    assert found["started"] == {"worker 0": 1, "worker 1": 1, "server 0": 1, "server 1": 2}
    assert found["looked_at"] > 20
    assert found["in"] == []


def test_workers_whose_actor_or_process_ends_are_started_again_alone(made):
    found = made("the_actor")
    assert found["deaths"] == {"worker 1": "killed by signal 9 (SIGKILL)", "worker 2": "killed by signal 11 (SIGSEGV)"}
    assert found["started"] == {"worker 0": 1, "worker 1": 2, "worker 2": 2, "server 0": 1}
    assert found["steps"]["worker 0"] == 400
    assert found["unfinished"] == {}


def test_a_run_goes_back_to_its_checkpoint_after_a_replay_was_killed(made):
    found = made("the_replay")
    assert found["deaths"] == {"replay 0": "killed by signal 9 (SIGKILL)"}
    assert set(found["started"].values()) == {2}
    assert found["steps"] == {"worker 0": 200}


def test_workers_come_and_go_on_two_nodes_and_each_sample_of_an_epoch_is_used_once(made):
    found = made("the_number_of_workers")
    two, four, left = found["pids"]
    assert len(four) == 4
    assert two.items() <= four.items()
    assert left == two
    assert found["machines"][1] == 2
    assert found["used"] == [960, 8]
    assert set(found["started"].values()) == {1}
    assert found["failures_survived"] == 0


def test_ray_reserves_what_processes_need_and_a_worker_without_room_holds_up_nobody(made):
    found = made("the_room")
    assert sorted(found["gpus"]) == ["0", "1"]
    assert found["free"] == [2 - 2 * 0.25 - 0.125, 0]
    assert found["started"]["worker 2"] == 1
    assert set(found["steps"]) == {"worker 0", "worker 1"}
    assert len(found["used"]) == 960
    assert set(found["used"].values()) == {8}


def test_a_worker_without_the_accelerator_that_ray_promises_says_so(made):
    """On a machine with CUDA it trains there."""
    found = made("the_device")
    if torch.cuda.is_available():
        assert found["steps"] == {"worker 0": 5, "worker 1": 5}
    else:
        assert "finds no accelerator on" in found["error"]
        assert "was given cuda:0" in found["error"]


def test_an_address_where_nothing_listens_is_an_error():
    done = dure("train", "digits-mlp", "--workers", "2", "--on", f"ray:127.0.0.1:{free_port()}", check=False)
    assert done.returncode == 1
    assert "nothing answers at ray:127.0.0.1:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("pandas") is None, reason="needs Ray Train: pip install -c constraints.txt 'ray[train]'")
def test_a_loop_in_ray_train_is_attached_unchanged(tmp_path):
    """The example starts a Ray of its own, which writes its token to the home of the user."""
    example = Path(__file__).parents[3] / "examples" / "ray_train.py"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, example], env=environ, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert found == {"bsp": "2 workers learned", "ssp:bound=3": "2 workers learned"}


def test_processes_of_a_machine_that_fails_are_started_on_another(made):
    """The last test with two nodes."""
    found = made("the_machine")
    assert found["failures_survived"] >= 1
    assert found["steps"].keys() == {"worker 0", "worker 1", "worker 2"}
    assert set(found["steps"].values()) == {400}
    assert found["unfinished"] == {}
