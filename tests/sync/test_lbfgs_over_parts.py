"""Sandblaster L-BFGS over copies of the model that several workers hold, against whole ones."""

from __future__ import annotations

import shutil

import pytest
import torch
from support.purposes import soaked
from support.real_runs import Trial
from support.runs import local, resolved, resume_local, virtual
from support.wording import raising

import dure
from dure.core.node import Call
from dure.errors import StrategyError
from dure.job.job import load_job
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.topology.parameter_server.coordinator import joint_fields

JOB = "digits-local:channels=2"
LBFGS = "lbfgs:batch=210,iterations=4,m=3"
UNITS = "neurons:ways=2,assignment=random"
OPTIONS = {"steps": 200, "seed": 3, "dtype": "float64", "batch_size": 40}  # a batch ends in a portion of 10


@pytest.fixture(scope="module")
def whole():
    """A run of whole models."""
    return virtual(JOB, f"{LBFGS} ps", workers=2, **OPTIONS)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("partition", "ways", "copies", "shards", "record"),
    [
        (UNITS, 2, 3, 1, {"batch_sizes": (15, 40, 20)}),
        ("neurons:ways=3,assignment=cut", 3, 2, 2, {"checkpoint_every": 8}),
        *soaked((UNITS, 2, 1, 1, {"checkpoint_every": 20}), ("neurons:ways=5", 5, 2, 3, {})),
    ],
)
def test_it_takes_the_path_of_whole_models(partition, ways, copies, shards, record, whole, tmp_path):
    """Checkpoints between iterations are on the way: vectors of all servers and numbers of the coordinator."""
    record = {**record, "out": tmp_path}
    split = virtual(JOB, f"{LBFGS} ps:shards={shards} {partition}", workers=ways * copies, **record, **OPTIONS)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)
    assert not torch.allclose(whole.params, whole.setup.model.params, atol=0.1)
    assert split.rows[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-12)


def test_a_portion_that_comes_again_is_evaluated_at_the_new_point():
    """A batch is one portion, so each evaluation of a line search is of the samples before."""
    options = OPTIONS | {"steps": 30}
    lbfgs = "lbfgs:batch=40,iterations=5,search=backtracking"
    whole = virtual(JOB, f"{lbfgs} ps", workers=1, **options)
    split = virtual(JOB, f"{lbfgs} ps {UNITS}", workers=2, **options)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)


def test_a_checkpoint_is_taken_between_iterations(tmp_path):
    setup, cluster = resolved(
        JOB, f"{LBFGS} ps {UNITS}", on="virtual", workers=4, checkpoint_every=8, out=tmp_path, **OPTIONS
    )
    steps: list[int] = []
    VirtualRun(setup, cluster, Callbacks(checkpoint=lambda step, parts: steps.append(step))).run()
    assert len(steps) >= 2


def test_a_worker_that_fetches_a_point_too_late_computes_with_its_copy_all_the_same():
    """Others have finished the evaluation, and the servers have dropped the point before one of two has its part."""
    compute = Constant(seconds=0.005)
    far = Machines(count=1, compute=compute, link=Link(latency=0.02))
    cluster = Cluster(machines=(Machines(count=3, compute=compute), far))
    run = virtual(JOB, f"{LBFGS} ps:shards=2 {UNITS}", cluster, **OPTIONS)
    assert run.rows[-1]["loss"] < 0.7


@pytest.mark.long
def test_a_copy_of_one_worker_takes_the_time_of_a_worker(whole):
    """Portions of fewer samples take less."""
    options = OPTIONS | {"workers": 1}
    alone = virtual(JOB, f"{LBFGS} ps", **options)
    split = virtual(JOB, f"{LBFGS} ps neurons:ways=1", **options)
    seconds = [run.outcome.totals.time["compute"] for run in (alone, split)]
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-9)
    torch.testing.assert_close(split.params, whole.params, rtol=0, atol=1e-12)


def test_a_sum_counts_if_all_of_its_parts_are_numbers():
    reports = [{"evaluation": 1, "run": [0, 2], "seq": 3, "losses": losses} for losses in ([1.0, 2.0], [])]
    calls = [
        Call(f"worker {n}", "ask", {"worker": n, "incarnation": 0, "due": n == 3, "report": report}, ())
        for n, report in zip((2, 3), reports, strict=True)
    ]
    right = {"worker": 1, "incarnation": 0, "due": True, "report": {**reports[0], "losses": []}}
    assert joint_fields(1, calls) == right
    assert joint_fields(1, calls[:1])["report"] == reports[0]


@pytest.mark.long
@pytest.mark.parametrize(("copies", "shards"), [(1, 1), *soaked((2, 2))])
def test_processes_take_the_path_of_whole_models(copies, shards, whole, fork_server):
    strategy = f"{LBFGS} ps:shards={shards} {UNITS}"
    really = local(JOB, strategy, workers=2 * copies, fork_server=fork_server, **OPTIONS)
    torch.testing.assert_close(really.params, whole.params, rtol=0, atol=1e-12)


@pytest.mark.parametrize("copies", [*soaked(1, 2)])
def test_a_real_run_is_resumed(copies, whole, tmp_path):
    """From its first checkpoint, as if it had been killed before the next."""
    options = OPTIONS | {"workers": 2 * copies, "steps": 200 // copies}
    record = {"out": tmp_path / "run", "checkpoint_every": 14 // copies, "eval_every": 10}
    dure.train(JOB, strategy=f"{LBFGS} ps {UNITS}", on="local", **record, **options)
    steps = sorted((tmp_path / "run" / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    assert len(steps) > 1
    for later in steps[1:]:
        shutil.rmtree(later)
    (tmp_path / "run" / "summary.json").unlink()
    torch.testing.assert_close(resume_local(tmp_path / "run").params, whole.params, rtol=0, atol=1e-12)


class KillAfterCheckpoint:
    """Kills `victim` once the first checkpoint is complete."""

    def __init__(self, victim, folder):
        self.victim, self.folder, self.killed = victim, folder, False

    def __call__(self, trial):
        if not self.killed and trial.driver.checkpoints.round is None and list(self.folder.glob("step-*")):
            self.killed = True
            trial.kill(self.victim)


@pytest.mark.parametrize("victim", [*soaked("worker 1", "worker 2", "server 0", "server 1")])
def test_a_process_that_fails_takes_all_back_to_the_last_checkpoint(victim, fork_server, tmp_path):
    options = OPTIONS | {"steps": 900}
    lbfgs = "lbfgs:batch=210,iterations=14,m=3"
    whole = virtual(JOB, f"{lbfgs} ps", workers=2, **options)
    record = {"checkpoint_every": 30, "out": tmp_path}
    trial = Trial(TrainConfig(job=JOB, strategy=f"{lbfgs} ps {UNITS}", on="local", workers=4, **record, **options))
    killer = KillAfterCheckpoint(victim, tmp_path / "checkpoints")
    outcome = trial.run(killer, fork_server=fork_server)
    assert (killer.killed, len(trial.drivers)) == (True, 2)
    torch.testing.assert_close(outcome.params, whole.params, rtol=0, atol=1e-12)


@pytest.mark.long
def test_portions_of_random_layers_do_not_depend_on_the_copy_that_computes_them():
    """Inputs are drawn and dropout too: by the number of the portion, so any number of copies takes one path."""
    runs = [virtual(f"{__file__}:dropped", f"{LBFGS} ps {UNITS}", workers=2 * n, **OPTIONS) for n in (1, 3)]
    torch.testing.assert_close(runs[0].params, runs[1].params, rtol=0, atol=1e-12)


def dropped():
    """Dropout between two layers whose units are at several machines."""
    job = load_job("digits-mlp:hidden=12")
    model = job.model

    def build():
        layers = model()
        layers.insert(3, torch.nn.Dropout(0.5))
        return layers

    job.model = build
    return job


@pytest.mark.parametrize("partition", ["gpipe:stages=2", "pipedream:stages=2", "gpipe:stages=1"])
def test_it_does_not_run_over_the_stages_of_a_pipeline(partition):
    with raising(StrategyError, "portions"):
        virtual(JOB, f"{LBFGS} ps {partition}", workers=2, **OPTIONS)


def test_parameters_with_several_holders_are_refused():
    with raising(StrategyError, "workers"):
        virtual("digits-mlp", f"{LBFGS} ps tensor:ways=2", workers=2, **OPTIONS)
