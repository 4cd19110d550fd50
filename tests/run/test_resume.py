"""Who resumes a run may say how far it goes, and nothing else that it is not."""

import json
import shutil
from pathlib import Path

import pytest
from support.wording import raising

import dure
from dure.cli.main import main
from dure.errors import UsageError
from dure.report import read_run
from dure.run.config import TrainConfig
from dure.run.resume import CLUSTER, resumed
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant

TWO = Cluster(machines=(Machines(count=2, compute=Constant(seconds=0.01)),))
SLOW = Cluster(machines=(Machines(count=2, compute=Constant(seconds=0.03)),))
OPTIONS = {"steps": 3, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of two workers in virtual time."""
    path = tmp_path_factory.mktemp("runs") / "r1"
    dure.train("digits-mlp", on="virtual", workers=2, out=path, seed=1, **OPTIONS)
    return path


@pytest.fixture(scope="module")
def over_servers(tmp_path_factory):
    """A run on a cluster that was described, under a method that is not the default."""
    path = tmp_path_factory.mktemp("runs") / "r2"
    dure.train("digits-mlp", strategy="ssp:bound=2 ps:shards=2", on=TWO, out=path, **OPTIONS)
    return path


def refusal(**options):
    with pytest.raises(UsageError) as caught:
        resumed(TrainConfig(**options))
    return str(caught.value)


def unchanged(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def test_a_run_is_not_resumed_to_end_before_its_last_checkpoint(folder):
    before = unchanged(folder)
    with raising(UsageError, "steps=1"):
        dure.train("digits-mlp", resume=folder, steps=1)
    assert unchanged(folder) == before


@pytest.mark.parametrize(
    ("given", "was", "says"),
    [
        ({"job": "mnist-mlp"}, "job=digits-mlp", "job=mnist-mlp"),
        ({"sync": "ssp"}, "sync=bsp", "sync=ssp"),
        ({"topology": "ps"}, "topology=collective", "topology=ps"),
        ({"codec": "sign"}, "codec=fp32", "codec=sign"),
        ({"strategy": "bsp ps"}, "topology=collective", "topology=ps"),
        ({"on": "local"}, "on=virtual", "on=local"),
        ({"on": "torchrun"}, "on=virtual", "on=torchrun"),
        ({"lr": 0.5}, "lr left out", "lr=0.5"),
        ({"batch_sizes": (8, 16)}, "batch_sizes=", "batch_sizes=8/16"),
        ({"seed": 2}, "seed=1", "seed=2"),
        ({"seed": 0}, "seed=1", "seed=0"),
        ({"dtype": "float64"}, "dtype=float32", "dtype=float64"),
        ({"timing_only": True}, "timing_only=false", "timing_only=true"),
        ({"eval_every": 3}, "eval_every left out", "eval_every=3"),
    ],
)
def test_what_a_run_is_not_is_refused(folder, given, was, says):
    sentence = f"{folder} is a run with {was}; {says} cannot change that: leave it out."
    assert refusal(resume=folder, **given) == sentence


def test_everything_that_differs_is_named(folder):
    message = refusal(resume=folder, job="digits-mlp", sync="ssp:bound=5", workers=3, lr=0.5, steps=10)
    assert message == (
        f"{folder} is a run with workers=2, lr left out and sync=bsp; workers=3, lr=0.5 and sync=ssp:bound=5 cannot "
        "change that: leave them out."
    )


def test_the_command_line_refuses_before_anything_is_touched(folder, capsys, monkeypatch):
    before = unchanged(folder)
    for words in (
        ["mnist-mlp"],
        ["digits-mlp", "--sync", "ssp", "--workers", "3"],
        ["--on", "local"],
        ["--codec=sign"],
        ["--seed", "0"],
    ):
        assert main(["train", *words, "--resume", str(folder), "--steps", "10", "--json"]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith(f"dure: {folder} is a run with ")
        assert said.err.endswith(" out.\n")
        assert said.err.count("\n") == 1
    monkeypatch.setenv("DURE_LR", "0.5")
    assert main(["train", "--resume", str(folder)]) == 2
    assert "lr=0.5 cannot change that" in capsys.readouterr().err
    assert unchanged(folder) == before


def test_the_same_in_other_words_is_no_difference(over_servers):
    options = [
        {"job": "digits-mlp"},
        {"sync": "ssp:bound=2"},
        {"sync": "ssp:bound=2.0"},
        {"topology": "ps:shards=2,split=memory"},
        {"strategy": "ps:shards=2 fp32"},
        {"workers": 2},
        {"on": "virtual"},
        {"on": str(over_servers / CLUSTER)},
        {"dtype": "float32"},
        {"seed": 0},
        {"out": over_servers.parent / "." / over_servers.name},
        {"checkpoint_every": 2},
    ]
    for given in options:
        config = resumed(TrainConfig(resume=over_servers, **given))
        assert config == resumed(TrainConfig(resume=over_servers)), given
        assert config.chosen().text()["sync"] == "ssp:bound=2"


def test_another_cluster_is_refused_and_the_same_is_not(over_servers, tmp_path):
    file = tmp_path / "slow.yaml"
    file.write_text(SLOW.to_yaml())
    assert f"on={file} cannot change that" in refusal(resume=over_servers, on=str(file))
    config = TrainConfig(resume=over_servers, on="virtual")
    with raising(UsageError, "on=virtual"):
        resumed(config, SLOW)
    assert resumed(config, TWO) == resumed(config)


def test_a_job_in_a_file_is_the_same_from_anywhere(tmp_path, monkeypatch):
    source = "from dure.job.job import load_job\n\n\ndef make():\n    return load_job('digits-mlp')\n"
    (tmp_path / "mine.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    dure.train("mine.py:make", on="virtual", workers=2, out="run", **OPTIONS)
    absolute = f"{tmp_path}/mine.py:make"
    assert resumed(TrainConfig(resume=Path("run"), job=absolute)).job == "mine.py:make"
    assert "job=mine.py:other cannot" in refusal(resume=Path("run"), job="mine.py:other")


def test_a_method_as_an_object_is_what_it_says(over_servers, tmp_path):
    """And what it does not say, the folder says: two shards."""
    shutil.copytree(over_servers, tmp_path / "run")
    with raising(UsageError, "sync=ssp:bound"):
        dure.train("digits-mlp", sync=dure.SSP(bound=1), on=TWO, resume=tmp_path / "run")
    run = dure.train("digits-mlp", sync=dure.SSP(bound=2), on=TWO, resume=tmp_path / "run", steps=6)
    assert run.summary()["strategy"]["topology"] == "ps:shards=2"
    assert run.summary()["samples"] == 2 * 6 * 32


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", ["virtual", "local"])
def test_what_is_of_this_start_alone_may_be_other(on, tmp_path):
    """More steps, other checkpoints, a trace, a device: the result is that of the longer run."""
    whole = dure.train("digits-mlp", on=on, workers=2, steps=9, exact=on == "virtual")
    dure.train("digits-mlp", on=on, workers=2, out=tmp_path / "run", exact=on == "virtual", **OPTIONS)
    new = {"steps": 9, "checkpoint_every": 3, "trace": True, "device": "cpu"}
    run = dure.train("digits-mlp", resume=tmp_path / "run", **new)
    assert run.summary()["params_sha256"] == whole.summary()["params_sha256"]
    assert run.config["on"] == on
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))[-1] == "step-8"
    assert json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert {name: saved[name] for name in new} == new


def test_a_run_that_is_over_is_resumed_to_the_same_record(tmp_path):
    """Its last row is no row of the checkpoint, though it has no more steps than the row before (or the budget)."""
    options = {"steps": 20, "checkpoint_every": 5, "batch_size": 64}
    whole = dure.train("digits-mlp", strategy="lbfgs:m=3 ps", on=TWO, out=tmp_path / "run", **options)
    again = dure.train("digits-mlp", resume=tmp_path / "run")
    assert whole.history == again.history == read_run(tmp_path / "run").history
    apart = {"batching": 0, "evaluation_seconds": 0}  # the rest is the same
    assert whole.summary() | apart == again.summary() | apart
    longer = dure.train("digits-mlp", resume=tmp_path / "run", steps=30)
    steps = [row["step"] for row in longer.history]
    assert steps == sorted(steps)
    assert longer.history == read_run(tmp_path / "run").history
