"""Sharded data parallelism equals bsp, on processes and in virtual time, and holds as little as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import stage_jobs, zero_jobs
from support.runs import local, resolved, virtual
from support.wording import raising
from support.zero_jobs import job_text

from dure.errors import UsageError
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun

STAGES = ("zero:stage=1", "zero:stage=2", "zero:stage=3")


def largest_difference(one: Any, other: Any) -> float:
    return float((one.params - other.params).abs().max())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("partition", STAGES)
@pytest.mark.parametrize("job", ["mlp", "cnn", "unused"])
def test_two_processes_have_the_bits_of_bsp(job, partition, fork_server):
    options: dict[str, Any] = {"workers": 2, "steps": 5, "optimizer": "adamw:lr=0.01,weight_decay=0.1"}
    plain = local(job_text(job), "bsp", fork_server=fork_server, **options)
    sharded = local(job_text(job), f"bsp {partition}", fork_server=fork_server, **options)
    assert torch.equal(sharded.params, plain.params)
    assert sharded.rows[-1]["loss"] == plain.rows[-1]["loss"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("partition", [*STAGES, "zero:stage=1,within=2", "zero:stage=3,within=2"])
@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adamw:lr=0.01,eps=0.001", "momentum:lr=0.05,clip=0.1"])
@pytest.mark.parametrize("job", [zero_jobs.mlp, zero_jobs.cnn, zero_jobs.unused, stage_jobs.tied, zero_jobs.dropped])
def test_virtual_runs_equal_bsp(workers, partition, optimizer, job):
    if "within" in partition and workers % 2:
        pytest.skip("groups of two")
    options: dict[str, Any] = {
        "workers": workers,
        "steps": 4,
        "optimizer": optimizer,
        "dtype": "float64",
        "exact": True,
    }
    plain, sharded = (virtual(job(), strategy, **options) for strategy in ("bsp", f"bsp {partition}"))
    assert largest_difference(sharded, plain) < 1e-12
    if workers == 2 and "clip" not in optimizer:
        assert torch.equal(sharded.params, plain.params)


@pytest.mark.parametrize("partition", STAGES)
def test_the_reported_losses_are_those_of_bsp(partition):
    losses: dict[str, list[float]] = {}
    for strategy in ("bsp", f"bsp {partition}"):
        said = losses.setdefault(strategy, [])
        options: dict[str, Any] = {"workers": 2, "batch_sizes": (2, 6), "steps": 3, "dtype": "float64", "exact": True}
        setup, cluster = resolved(zero_jobs.mlp(), strategy, on="virtual", eval_every=1000, **options)
        progress = Callbacks(progress=lambda step, steps, loss, samples, said=said: said.append(loss))
        VirtualRun(setup, cluster, progress).run()
    plain, sharded = losses.values()
    assert len(plain) == 3
    assert sharded == pytest.approx(plain, rel=1e-12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("partition", [*STAGES, "zero:stage=1,within=2", "zero:stage=3,within=2"])
@pytest.mark.parametrize("job", ["mlp", "cnn"])
def test_processes_have_the_bits_of_virtual_time(partition, job, fork_server):
    options: dict[str, Any] = {"workers": 4, "steps": 4, "eval_every": 2, "optimizer": "momentum:lr=0.05,clip=0.1"}
    real = local(job_text(job), f"bsp {partition}", fork_server=fork_server, **options)
    modelled = virtual(job_text(job), f"bsp {partition}", exact=True, **options)
    assert torch.equal(real.params, modelled.params)
    assert [row["loss"] for row in real.rows] == [row["loss"] for row in modelled.rows]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("partition", STAGES)
def test_all_workers_skip_a_step_whose_gradient_is_infinite_at_one(partition, fork_server):
    options: dict[str, Any] = {"workers": 2, "steps": 6}
    plain = local(job_text("one_nan"), "bsp", fork_server=fork_server, **options)
    sharded = local(job_text("one_nan"), f"bsp {partition}", fork_server=fork_server, **options)
    assert sharded.summary["updates_refused"] == plain.summary["updates_refused"] > 0
    assert bool(sharded.params.isfinite().all())
    assert torch.equal(sharded.params, plain.params)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_finite_gradient_is_clipped_though_its_squares_overflow(stage):
    options: dict[str, Any] = {"workers": 2, "steps": 3, "optimizer": "sgd:lr=0.1,clip=0.5"}
    small = virtual(zero_jobs.steep(1.0), f"bsp zero:stage={stage}", **options)
    large = virtual(zero_jobs.steep(1e25), f"bsp zero:stage={stage}", **options)
    assert large.summary["updates_refused"] == 0
    assert largest_difference(large, small) < 1e-6
    before = virtual(zero_jobs.steep(1.0), "bsp", **options | {"steps": 1, "optimizer": "sgd:lr=0"}).params
    assert 0.1 < float((large.params - before).norm()) <= 0.1501


@pytest.mark.parametrize("job", [zero_jobs.limited, zero_jobs.reading])
def test_blocks_whose_parameters_would_not_be_whole_are_refused(job):
    with raising(UsageError, "parameter"):
        virtual(job(), "bsp zero:stage=3", workers=2, steps=2)
    virtual(job(), "bsp zero:stage=2", workers=2, steps=2)


@pytest.mark.parametrize("partition", [*STAGES, "zero:stage=3,within=2"])
def test_a_worker_counts_by_the_samples_of_its_mini_batches(partition):
    options: dict[str, Any] = {"workers": 4, "batch_sizes": (2, 9, 3, 4), "steps": 3, "dtype": "float64", "exact": True}
    plain, sharded = (virtual(zero_jobs.mlp(), strategy, **options) for strategy in ("bsp", f"bsp {partition}"))
    assert largest_difference(sharded, plain) < 1e-12


@pytest.mark.parametrize("change", ["in_place", "of_data", "to_other_memory", "to_float64"])
def test_a_model_that_changes_its_parameters_is_refused(change):
    """The next gather would undo the change."""
    options: dict[str, Any] = {"workers": 2, "steps": 2}
    with raising(UsageError, "inner.weight'"):
        virtual(zero_jobs.changing(change), "bsp zero:stage=3", **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("partition", ["1f1b:stages=2,micro=2", "tensor:ways=2", "1f1b:stages=2+tensor:ways=2"])
@pytest.mark.parametrize("optimizer", ["adamw:lr=0.01", "adamw:lr=0.01,clip=0.01"])
def test_shards_of_parts_equal_replicas_of_parts(partition, optimizer):
    options: dict[str, Any] = {"workers": 8, "steps": 3, "optimizer": optimizer, "dtype": "float64"}
    plain = virtual(stage_jobs.plain(), f"bsp {partition}", **options)
    sharded = virtual(stage_jobs.plain(), f"bsp {partition}+zero:stage=1", **options)
    assert largest_difference(sharded, plain) < 1e-12
    if partition.startswith("tensor"):
        parameters = virtual(stage_jobs.plain(), f"bsp {partition}+zero:stage=3", **options)
        assert largest_difference(parameters, plain) < 1e-12


@pytest.mark.long
def test_shards_of_the_parts_of_layers_equal_one_worker_on_processes(fork_server):
    options: dict[str, Any] = {"steps": 3, "optimizer": "adamw:lr=0.01", "dtype": "float64", "split": "striped"}
    alone = virtual("char-gpt", "bsp", workers=1, batch_size=16, **options)
    for stage in (1, 3):
        strategy = f"bsp tensor:ways=2+zero:stage={stage}"
        sharded = local("char-gpt", strategy, fork_server=fork_server, workers=4, batch_size=8, **options)
        assert largest_difference(sharded, alone) < 1e-12


def test_a_worker_never_has_more_than_its_shards_and_some_blocks(tmp_path: Path):
    """Shards of parameters, gradient, two vectors and two of scratch; five blocks of parameters and gradients."""
    options: dict[str, Any] = {"workers": 2, "steps": 8, "optimizer": "adam:lr=0.01", "data": tmp_path}
    run = local(job_text("watched"), "bsp zero:stage=3", **options)  # a fork server of its own has no other tensors
    params, block = run.params.nbytes, 4 * (64 * 64 + 64)
    data = 2 * 64 * 64 * 4
    files = list(tmp_path.glob("bytes *"))
    assert len(files) == 2
    for file in files:
        held = max(int(line.split()[1]) for line in file.read_text().splitlines())
        assert 3 * params < held < 3 * params + 5 * block + data
