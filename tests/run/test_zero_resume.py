"""Checkpoints of sharded runs: each worker writes its own ranges, and others go on from them.

Mini-batches are those of one stream that all workers share, so that the samples of a step do not depend on the number
of workers as long as the samples of all together stay.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from support.purposes import soaked
from support.real_runs import Trial
from support.runs import virtual
from support.stage_jobs import job_text

import dure
from dure.core.regular_file import CHECKPOINTS
from dure.errors import UsageError
from dure.run import checkpoint
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.resume import resumed
from dure.run.saved_model import SavedModel
from dure.run.split_again import writer_of

TOGETHER = 24
"""The samples of a step of all workers."""
OPTIONS = {"seed": 3, "dtype": "float64", "eval_every": 1, "optimizer": "adam:lr=0.01", "split": "striped"}
ONE, THREE, HOSTS = "zero:stage=1", "zero:stage=3", "zero:stage=1,within=2"


def started(folder, partition, workers, job="plain", *, on="virtual", **options):
    given = {"steps": 3, "checkpoint_every": 3, **OPTIONS, "batch_size": TOGETHER // workers, **options}
    return dure.train(job_text(job), partition=partition, workers=workers, out=folder, on=on, **given)


def goes_on(folder, partition, steps, workers=None, **options):
    sizes = {} if workers is None else {"workers": workers, "batch_size": TOGETHER // workers}
    return dure.train("", resume=folder, partition=partition, steps=steps, **sizes, **options)


def graded(rows, *names):
    return [[row[name] for name in ("step", *names)] for row in rows]


def vectors(folder):
    """All vectors of the newest checkpoint of a run, by name."""
    setup, _ = resolve(resumed(TrainConfig(resume=folder, trust=True)), Prebuilt())
    parts = checkpoint.load(folder / CHECKPOINTS).parts
    model = SavedModel(parts, writer_of(parts, setup))
    return {name: torch.cat([piece for _, piece in model.pieces(name)]) for name in model.names}


def tensors(folder):
    parts = checkpoint.load(folder / CHECKPOINTS).parts
    return {name: {key: each.numel() for key, each in parts[name].tensors.items()} for name in parts if name != "run"}


# ---- the parts of workers


@pytest.mark.parametrize("partition", [ONE, THREE])
def test_a_part_has_the_workers_own_ranges_alone(partition, tmp_path):
    started(tmp_path, partition, 4, optimizer="adamw")
    held, numel = tensors(tmp_path), len(vectors(tmp_path)["params"])
    assert held.keys() == {f"worker-{number}" for number in range(4)}
    for each in held.values():
        assert each.keys() == {"params", "optimizer.mean", "optimizer.squares"}
        assert len({*each.values()}) == 1
        assert each["params"] < numel / 4 + 20
    assert sum(each["params"] for each in held.values()) == numel


def test_groups_that_hold_the_same_shards_write_them_once(tmp_path):
    started(tmp_path, HOSTS, 4, job="normed_last")
    held = tensors(tmp_path)
    assert "params" in held["worker-0"]
    assert "params" in held["worker-1"]
    assert held["worker-2"].keys() == held["worker-3"].keys() == {"buffers"}


@pytest.mark.parametrize("partition", [ONE, *soaked(THREE, HOSTS, "gpipe:stages=2,micro=1+zero:stage=1")])
def test_checkpoints_change_no_bit(partition, tmp_path):
    """Workers are built again from each checkpoint."""
    options = {**OPTIONS, "workers": 4, "batch_size": 6, "steps": 5}
    kept = virtual(job_text("normed_last"), f"bsp collective {partition}", **options, out=tmp_path, checkpoint_every=2)
    whole = virtual(job_text("normed_last"), f"bsp collective {partition}", **options)
    assert torch.equal(kept.params, whole.params)
    assert graded(kept.rows, "loss", "updates") == graded(whole.rows, "loss", "updates")


# ---- others go on


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("partitions", "workers"),
    [
        ((ONE, "none", ONE), 2),
        ((ONE, THREE, "none"), 2),
        (("none", THREE, ONE), 2),
        ((HOSTS, "none", HOSTS), 4),
        ((ONE, HOSTS, "zero:stage=3,within=2"), 4),
    ],
)
@pytest.mark.parametrize("job", ["plain", *soaked("tied")])
def test_another_stage_goes_on_with_the_bits_of_the_uninterrupted_run(job, partitions, workers, tmp_path):
    first, *others = partitions
    steps, run = 3, started(tmp_path, first, workers, job)
    for partition in others:
        steps += 3
        before = vectors(tmp_path)
        run = goes_on(tmp_path, partition, steps - 3)
        after = vectors(tmp_path)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        run = goes_on(tmp_path, partition, steps)
    options = {**OPTIONS, "workers": workers, "batch_size": TOGETHER // workers, "steps": steps}
    whole = virtual(job_text(job), "bsp collective", **options)
    assert graded(run.history, "loss", "updates", "accuracy") == graded(whole.rows, "loss", "updates", "accuracy")


@pytest.mark.parametrize("partition", [THREE, "none"])
def test_each_worker_goes_on_with_its_own_buffers(partition, tmp_path):
    def buffers():
        parts = checkpoint.load(tmp_path / CHECKPOINTS).parts
        return [parts[f"worker-{number}"].tensors["buffers"] for number in range(2)]

    started(tmp_path, ONE, 2, job="normed_last")
    before = buffers()
    assert not torch.equal(*before)
    goes_on(tmp_path, partition, 3)
    assert all(map(torch.equal, buffers(), before))


CHANGES = [
    [(ONE, 2), (ONE, 4), ("none", 1), (THREE, 3)],
    [(HOSTS, 4), (HOSTS, 2), (THREE, 4), ("none", 2)],
    [("none", 2), (THREE, 4), ("gpipe:stages=2,micro=1+zero:stage=1", 4), (ONE, 1)],
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("splits", CHANGES)
@pytest.mark.parametrize("on", ["virtual", *soaked("local")])
def test_another_number_of_workers_goes_on_with_the_same_samples(splits, on, tmp_path):
    (partition, workers), *others = splits
    run, steps, updates = started(tmp_path, partition, workers, on=on), 3, 3 * workers
    for number, (partition, workers) in enumerate(others, start=1):
        steps = 3 + 3 * number
        before = vectors(tmp_path)
        copies = workers // 2 if "gpipe" in partition else workers
        given = {"workers": workers, "batch_size": TOGETHER // copies}
        run = dure.train("", resume=tmp_path, partition=partition, steps=steps, **given)
        updates += 3 * copies
        assert run.history[-1]["updates"] == run.summary()["updates_applied"] == updates
        assert run.history[-1]["samples"] == run.summary()["samples"] == steps * TOGETHER
        assert any(not torch.equal(before[name], after) for name, after in vectors(tmp_path).items())
    options = {**OPTIONS, "workers": 1, "batch_size": TOGETHER, "steps": steps}
    rows = {row["step"]: row for row in virtual(job_text("plain"), "bsp collective", **options).rows}
    assert run.history[-1]["step"] == steps
    for row in run.history:
        assert row["loss"] == pytest.approx(rows[row["step"]]["loss"], abs=1e-9), row["step"]


@pytest.mark.parametrize("optimizer", ["", "adamw:lr=0.01"])
def test_more_workers_than_parameters_go_on_with_the_same_state(optimizer, tmp_path):
    """Workers without elements, or with those of a group alone that keeps no vector, write and read vectors as all."""
    own = {"optimizer": optimizer}
    started(tmp_path, "none", 2, "few", **own)
    for steps, (partition, workers) in zip((6, 9, 12), [(THREE, 6), (ONE, 4), (THREE, 2)], strict=True):
        before = vectors(tmp_path)
        goes_on(tmp_path, partition, steps - 3, workers)
        assert all(torch.equal(before[name], each) for name, each in vectors(tmp_path).items())
        run = goes_on(tmp_path, partition, steps)
    options = {**OPTIONS, **own, "workers": 1, "batch_size": TOGETHER, "steps": 12}
    whole = virtual(job_text("few"), "bsp collective", **options)
    assert run.history[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-9)


def test_workers_with_streams_of_their_own_go_on_at_the_mini_batch_of_the_same_number(tmp_path):
    started(tmp_path, ONE, 2, split="iid", job="normed_last")
    goes_on(tmp_path, ONE, 3, workers=3)
    parts = checkpoint.load(tmp_path / CHECKPOINTS).parts
    sources = [parts.plain[f"worker-{number}"]["source"] for number in range(3)]
    assert [(each["stream"], each["position"]) for each in sources] == [(number, 3 * 8) for number in (1, 2, 3)]
    assert len({tuple(parts[f"worker-{number}"].tensors["buffers"].tolist()) for number in range(3)}) == 1


def test_a_stream_that_workers_share_goes_on_behind_the_last_sample(tmp_path):
    started(tmp_path, ONE, 2)
    dure.train("", resume=tmp_path, partition=ONE, workers=3, steps=3)  # each with as many samples as before
    parts = checkpoint.load(tmp_path / CHECKPOINTS).parts
    assert [parts.plain[f"worker-{number}"]["source"]["position"] for number in range(3)] == [3 * TOGETHER] * 3


def test_a_damaged_part_of_another_worker_is_found(tmp_path):
    started(tmp_path, ONE, 2, steps=6)
    path = tmp_path / CHECKPOINTS / "step-6" / "worker-1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    found = checkpoint.load(tmp_path / CHECKPOINTS)
    assert found.step == 3
    assert found.passed_over == ["step-6: worker-1.safetensors is damaged: it does not match the manifest"]


# ---- refusals


def test_other_sizes_of_mini_batches_belong_to_another_number_of_workers(tmp_path):
    started(tmp_path, ONE, 2)
    with pytest.raises(UsageError) as caught:
        dure.train("", resume=tmp_path, batch_size=6, steps=6)
    assert "cannot change that" in str(caught.value)


def test_a_group_size_that_does_not_divide_the_workers_is_refused(tmp_path):
    started(tmp_path, HOSTS, 4)
    with pytest.raises(UsageError) as caught:
        goes_on(tmp_path, HOSTS, 6, workers=3)
    assert "shard groups of 2 workers" in str(caught.value)


# ---- on processes


class KillOnce:
    """Kills a worker, once a checkpoint is there."""

    def __init__(self, worker, folder):
        self.worker, self.folder, self.killed = worker, folder, False

    def __call__(self, trial):
        if not self.killed and (self.folder / CHECKPOINTS / "step-20").exists():
            self.killed = True
            trial.kill(self.worker)


@pytest.mark.long
@pytest.mark.parametrize(("partition", "workers"), [(ONE, 2), (THREE, 2), *soaked((HOSTS, 4))])
def test_the_loss_of_one_worker_takes_all_back_to_the_checkpoint(partition, workers, fork_server, tmp_path):
    options = {"steps": 60, "eval_every": 1000, "checkpoint_every": 20, "seed": 3, "workers": workers}
    strategy, kills = f"bsp collective {partition}", KillOnce("worker 1", tmp_path)
    config = TrainConfig(job=job_text("slow"), strategy=strategy, on="local", out=tmp_path, **options)
    found = Trial(config).run(kills, fork_server=fork_server)
    assert kills.killed
    assert found.totals.failures_survived == 1
    there = virtual(job_text("slow"), "bsp collective", **options | {"checkpoint_every": None})
    assert torch.equal(found.params, there.params) if workers == 2 else torch.allclose(found.params, there.params)
    assert checkpoint.load(tmp_path / CHECKPOINTS).step == 60


COMMAND = [
    sys.executable,
    "-m",
    "dure",
    "train",
    job_text("slow"),
    "--on",
    "local",
    "--seed",
    "3",
    "--dtype",
    "float64",
]


@pytest.mark.long
@pytest.mark.parametrize("splits", [[(ONE, 2), ("none", 2), (THREE, 4)], *soaked([("none", 2), (THREE, 2), (ONE, 3)])])
def test_a_run_that_was_killed_goes_on_with_other_workers(splits, tmp_path):
    (partition, workers), *others = splits
    words = ["--partition", partition, "--workers", str(workers), "--batch-size", str(TOGETHER // workers)]
    words += ["--split", "striped", "--optimizer", "adam:lr=0.01", "--steps", "100000", "--checkpoint-every", "5"]
    with subprocess.Popen([*COMMAND, *words, "--out", str(tmp_path)], start_new_session=True) as run:
        deadline = time.monotonic() + 100
        while not (tmp_path / CHECKPOINTS / "step-5").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(run.pid, signal.SIGKILL)
    step = checkpoint.load(tmp_path / CHECKPOINTS).step
    for number, (partition, workers) in enumerate(others, start=1):
        run = goes_on(tmp_path, partition, step + 5 * number, workers=None if partition == "none" else workers)
    options = {**OPTIONS, "workers": 1, "batch_size": TOGETHER, "eval_every": 10**6}
    whole = virtual(job_text("slow"), "bsp collective", **options | {"steps": step + 5 * len(others)})
    assert run.history[-1]["step"] == step + 5 * len(others)
    assert run.history[-1]["loss"] == pytest.approx(whole.rows[-1]["loss"], abs=1e-9)
