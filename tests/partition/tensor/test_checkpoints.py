"""Checkpoints of runs with shared layers, and the loss of a worker, against runs without an interruption."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from support.purposes import soaked
from support.real_runs import Terminate, Trial
from support.runs import virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text

from dure.run import checkpoint
from dure.run.config import TrainConfig
from dure.runtime.launch.interruption import Interrupted, Interruption

OPTIONS = {"steps": 8, "eval_every": 3, "checkpoint_every": 3, "seed": 3, "dtype": "float64"}
MESH = f"gpipe:stages=2,micro=2+{pairs(2)}"
GPT = "char-gpt:layers=1,width=8,heads=2,context=8,tied=true"
GRADED = ("step", "updates", "loss", "accuracy")


def config(job, partition, out, **options):
    return TrainConfig(job=job_text(job), strategy=f"bsp collective {partition}", on="local", out=out, **options)


def text(job):
    return job if "-" in job else job_text(job)


def graded(rows):
    return [[row[name] for name in GRADED] for row in rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "partition", "workers"),
    [("normed_between", pairs(2), 4), ("plain", MESH, 4), *soaked((GPT, "tensor:ways=2", 2))],
)
@pytest.mark.parametrize("optimizer", ["adam:lr=0.01", *soaked("momentum:lr=0.05")])
def test_checkpoints_change_no_bit(job, partition, workers, optimizer, tmp_path):
    """The workers are built again from each checkpoint: batch norm, dropout, and moments included."""
    options = {**OPTIONS, "workers": workers, "optimizer": optimizer, "batch_size": 10}
    kept = virtual(text(job), f"bsp collective {partition}", out=tmp_path, **options)
    whole = virtual(text(job), f"bsp collective {partition}", **options | {"checkpoint_every": None})
    assert torch.equal(kept.params, whole.params)
    assert graded(kept.rows) == graded(whole.rows)


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "partition", "workers"), [("normed_between", pairs(2), 2), *soaked(("plain", MESH, 4), ("plain", MESH, 8))]
)
def test_a_run_on_processes_is_resumed_from_a_checkpoint(job, partition, workers, fork_server, tmp_path):
    """As if it had been killed before its last checkpoint."""
    options = {**OPTIONS, "workers": workers, "optimizer": "momentum:lr=0.05"}
    given = config(job, partition, tmp_path, **options)
    there = virtual(job_text(job), f"bsp collective {partition}", **options | {"checkpoint_every": None})
    whole = Trial(given).run(fork_server=fork_server)
    assert torch.equal(whole.params, there.params)
    shutil.rmtree(tmp_path / "checkpoints" / "step-6")
    resumed = Trial(replace(given, resume=tmp_path)).run(fork_server=fork_server)
    assert torch.equal(resumed.params, there.params)
    assert graded(resumed.history) == graded(there.rows)
    assert resumed.notes["pipeline"] == there.summary["pipeline"]


class KillOnce:
    """Kills a worker, once a checkpoint is there."""

    def __init__(self, worker, folder):
        self.worker, self.folder, self.killed = worker, folder, False

    def __call__(self, trial):
        if not self.killed and (self.folder / "checkpoints" / "step-20").exists():
            self.killed = True
            trial.kill(self.worker)


@pytest.mark.long
@pytest.mark.parametrize(("partition", "workers"), [(pairs(2), 2), *soaked((MESH, 4), (pairs(2), 4))])
def test_the_loss_of_one_worker_takes_all_back_to_the_checkpoint(partition, workers, fork_server, tmp_path):
    """Its peers wait for it within a forward or a backward."""
    options = {"steps": 60, "eval_every": 1000, "checkpoint_every": 20, "seed": 3, "workers": workers}
    given, kills = config("slow", partition, tmp_path, **options), KillOnce("worker 1", tmp_path)
    found = Trial(given).run(kills, fork_server=fork_server)
    assert kills.killed
    assert found.totals.failures_survived == 1
    there = virtual(job_text("slow"), f"bsp collective {partition}", **options | {"checkpoint_every": None})
    assert torch.equal(found.params, there.params)
    assert checkpoint.load(tmp_path / "checkpoints").step == 60


@pytest.mark.soak
@pytest.mark.parametrize(("partition", "workers"), [(pairs(2), 2), (MESH, 4)])
def test_sigterm_drains_workers_that_share_layers_at_one_step(partition, workers, fork_server, tmp_path):
    options = {"workers": workers, "steps": 100_000, "seed": 3, "optimizer": "momentum", "eval_every": 10**6}
    given = config("slow", partition, tmp_path, checkpoint_every=10**6, **options)
    interruption = Interruption()
    with pytest.raises(Interrupted), interruption.heard():
        Trial(given).run(Terminate(), fork_server=fork_server, interruption=interruption)
    step = checkpoint.load(tmp_path / "checkpoints").step
    assert 10 <= step < 10_000
    resumed = Trial(replace(given, resume=tmp_path, steps=step + 5)).run(fork_server=fork_server)
    whole = virtual(job_text("slow"), f"bsp collective {partition}", **options | {"steps": step + 5})
    assert torch.equal(resumed.params, whole.params)
