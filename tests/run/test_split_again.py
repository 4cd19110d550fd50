"""A run goes on with another split of its model, from the same parameters and state of the optimizer."""

from __future__ import annotations

import pytest
import torch
from support.purposes import soaked
from support.runs import virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text

import dure
from dure.core.regular_file import CHECKPOINTS
from dure.errors import UsageError
from dure.run import checkpoint
from dure.runtime.virtual.cluster import Cluster, Machines

OPTIONS = {"seed": 3, "dtype": "float64", "eval_every": 2, "optimizer": "adam:lr=0.01"}
MESH = f"gpipe:stages=2,micro=1+{pairs(2)}"
TWICE = [(pairs(2), 4), (pairs(3), 6), ("none", 2), (MESH, 8)]  # partition and workers of two copies


def started(folder, partition, workers, job="plain", *, on="virtual", **options):
    given = {"sync": "bsp", "topology": "collective", "checkpoint_every": 3, **OPTIONS, **options}
    return dure.train(job_text(job), partition=partition, workers=workers, steps=4, out=folder, on=on, **given)


def goes_on(folder, splits, **options):
    """A run that begins with the first split, and goes on for three steps with each of the others."""
    (partition, workers), *others = splits
    started(folder, partition, workers, **options)
    run = None
    for number, (partition, workers) in enumerate(others, start=1):
        run = dure.train("", resume=folder, partition=partition, steps=4 + 3 * number)
        assert run.config["workers"] == workers
    assert run is not None
    return run


@pytest.mark.parametrize(
    ("job", "splits", "on"),
    [
        ("normed_last", [(pairs(2), 2), ("none", 1), (pairs(4), 4)], "virtual"),  # batch norm, and no dropout
        *soaked(
            ("plain", TWICE, "virtual"),
            ("plain", TWICE, "local"),
            ("normed_last", [("none", 1), ("gpipe:stages=2,micro=1", 2), (MESH, 4), (pairs(1), 1)], "virtual"),
            ("normed_last", [("none", 1), ("gpipe:stages=2,micro=1", 2), (MESH, 4), (pairs(1), 1)], "local"),
            ("tied", [("gpipe:stages=2,micro=1", 2), ("none", 1), ("gpipe:stages=3,micro=1", 3)], "virtual"),
        ),
    ],
)
def test_a_run_goes_on_with_other_splits_as_one_of_whole_models(job, splits, on, tmp_path):
    run, copies = goes_on(tmp_path, splits, job=job, on=on), 2 if splits is TWICE else 1
    steps = 4 + 3 * (len(splits) - 1)
    whole = virtual(job_text(job), "bsp collective", workers=copies, steps=steps, **OPTIONS)
    rows = {row["step"]: row for row in whole.rows}
    assert run.history[-1]["step"] == steps
    for row in run.history:  # processes may leave one out
        for name in ("updates", "loss"):
            assert row[name] == pytest.approx(rows[row["step"]][name], abs=1e-9), name
    for name in ("steps", "samples", "updates_applied"):
        assert run.summary()[name] == whole.summary[name], name
    assert run.summary()["staleness"]["histogram"] == {"0": steps * splits[-1][1]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "splits"),
    [
        ("plain", (pairs(2), pairs(3), pairs(2))),
        ("normed", ("tensor:ways=2", "tensor:ways=3", "none", "gpipe:stages=2,micro=1", "tensor:ways=2")),
    ],
)
def test_a_checkpoint_that_is_split_again_holds_the_same_model(job, splits, tmp_path):
    """Cut and joined again, all values have the same bits; buffers of batch norm between the layers of a pair too."""
    started(tmp_path, splits[0], 2, job)
    there = checkpoint.load(tmp_path / CHECKPOINTS)
    for partition in splits[1:]:
        dure.train("", resume=tmp_path, partition=partition, steps=4, checkpoint_every=100)
    here = checkpoint.load(tmp_path / CHECKPOINTS)
    assert here.step == there.step == 3
    for name in ("worker-0", "worker-1"):
        tensors, others = there.parts[name].tensors, here.parts[name].tensors
        assert tensors.keys() == others.keys()
        assert len(tensors) == 3 + (job == "normed")  # parameters, two moments, and buffers
        for key, values in tensors.items():
            assert torch.equal(values, others[key]), key
    assert here.parts.keys() == there.parts.keys()


# ---- refusals


def refusal(folder, **options):
    with pytest.raises(UsageError) as caught:
        dure.train("", resume=folder, steps=8, **options)
    return str(caught.value)


def test_another_number_of_workers_than_those_of_whole_copies_is_refused(tmp_path):
    started(tmp_path, pairs(2), 4)
    said = refusal(tmp_path, partition=pairs(2), workers=3)
    assert "needs 2 workers for each copy of the model, and there are 3" in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("strategy", "partition"),
    [
        ("averaging:period=2 collective", pairs(3)),
        ("bsp ps", pairs(3)),
        ("bsp collective int8", pairs(3)),
        ("bsp collective", "pipedream:stages=2"),
    ],
)
def test_runs_whose_state_is_not_the_model_alone_keep_their_split(strategy, partition, tmp_path):
    members = dict(zip(("sync", "topology", "codec"), strategy.split(), strict=False))
    started(tmp_path, pairs(2), 2, **members)
    assert refusal(tmp_path, partition=partition).endswith("cannot change that: leave it out.")


def test_a_described_cluster_keeps_its_number_of_workers(tmp_path):
    started(tmp_path, pairs(2), 2, on=Cluster(machines=(Machines(count=2, workers=1, memory=10**9),)))
    assert "cannot change that" in refusal(tmp_path, partition=pairs(3))
    run = dure.train("", resume=tmp_path, partition="gpipe:stages=2,micro=2", steps=8)
    assert run.summary()["steps"] == 8
