"""The memory of a worker, by kind, against closed forms; machines that are too small are refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.runs import resolved, virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.core.shards import Shards
from dure.errors import StrategyError, UsageError
from dure.job.shapes.images import vgg16
from dure.partition import PIPELINES
from dure.partition.memory import MemoryUse, of_model, of_part
from dure.partition.methods.zero import Zero
from dure.run.memory import memory_use
from dure.run.strategy import make
from dure.runtime.virtual.cluster import Cluster, Machines

WIDTH, BATCH = 20, 12
P = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of a layer
ROW = 4 * WIDTH  # bytes of one sample's inputs of a layer


def dense():
    """Six equal layers. Each keeps its inputs for the backward, and nothing else."""
    data = dure.Data(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, dtype=torch.int64))

    def model():
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    return dure.Job(model, cross_entropy, data, data, batch_size=BATCH, name="dense")


def machines(memory, count):
    return Cluster(machines=(Machines(count=count, memory=memory),))


def uses(partition, stages, vectors=0):
    setup, _ = resolved(dense(), f"bsp collective {partition}", workers=stages, on="virtual")
    return [of_part(setup.stages.layout, rank, BATCH, vectors) for rank in range(stages)]


def test_a_whole_model():
    setup, _ = resolved(dense(), "bsp collective", workers=1, on="virtual")
    found = of_model(setup.job, setup.replica, BATCH, 2)
    assert found == MemoryUse(6 * P, 6 * P, 12 * P, 0, 6 * BATCH * ROW)
    assert found.total == 24 * P + 6 * BATCH * ROW
    assert str(found) == f"weights {6 * P:,}, gradient {6 * P:,}, optimizer {12 * P:,}, activations {72 * ROW:,}"


@pytest.mark.parametrize(("partition", "held"), [("", [6]), ("gpipe:stages=3", [2, 2, 2]), ("tensor:ways=2", [3, 3])])
def test_frozen_parameters_need_memory_without_gradient_and_optimizer(partition, held):
    def half_frozen():
        model = dense().model()
        for number, layer in enumerate(model):
            layer.requires_grad_(number % 2 == 1)
        return model

    job = dataclasses.replace(dense(), model=half_frozen)
    setup, _ = resolved(job, f"bsp collective {partition}", workers=len(held), on="virtual")
    for part, layers in enumerate(held):
        use = memory_use(setup, part)
        assert use.frozen == pytest.approx(layers * P / 2)
        assert use.weights == use.gradient == pytest.approx(layers * P / 2, rel=0.05)


@pytest.mark.parametrize(
    ("partition", "versions", "samples"),
    [
        ("gpipe:stages=3,micro=4", [0, 0, 0], [12, 12, 12]),
        ("1f1b:stages=3,micro=4", [0, 0, 0], [9, 6, 3]),
        ("1f1b:stages=3,micro=2", [0, 0, 0], [12, 12, 6]),
        ("pipedream:stages=3", [2, 1, 0], [36, 24, 12]),
        ("pipedream:stages=3,sync=vertical", [2, 2, 2], [36, 24, 12]),
        ("petrowski:stages=3", [0, 0, 0], [60, 36, 12]),
        ("dni:stages=3", [0, 0, 0], [12, 12, 12]),
    ],
)
def test_stages_of_two_layers(partition, versions, samples):
    """`versions` beside the newest; the samples that are in flight at once."""
    both = zip(versions, samples, strict=True)
    expected = [MemoryUse(2 * P, 2 * P, 2 * P, 2 * P * kept, 2 * ROW * rows) for kept, rows in both]
    assert uses(partition, 3, vectors=1) == expected


def test_each_version_of_a_model_has_a_state_of_the_optimizer():
    """2 K - 1 versions of two layers, and two vectors of each."""
    found = uses("multi-version:stages=3", 3, vectors=2)
    assert [(use.versions, use.optimizer) for use in found] == [(4 * 2 * P, 5 * 2 * 2 * P)] * 3


def test_rematerialisation_keeps_inputs_and_one_computation():
    """Three samples in each micro-batch; the first stage's inputs are those of the mini-batch."""
    plain, remat = (uses(f"gpipe:stages=3,micro=4,remat={each}", 3) for each in ("false", "true"))
    assert [use.activations for use in plain] == [24 * ROW] * 3
    assert [use.activations for use in remat] == [6 * ROW, 15 * ROW, 15 * ROW]


def test_a_job_that_recomputes_keeps_the_borders_of_blocks_and_one_block():
    """Blocks of a layer and one that squares twice: each keeps its inputs, and the latter its outputs beside."""

    class Powers(nn.Module):
        def forward(self, inputs):
            return inputs.square().square()

    def model():
        return nn.Sequential(*(each for _ in range(3) for each in (nn.Linear(WIDTH, WIDTH), Powers())))

    job = dataclasses.replace(dense(), model=model)
    again = dataclasses.replace(job, recompute=True)
    found = []
    for each in (job, again):
        setup, _ = resolved(each, "bsp collective", workers=1, on="virtual", timing_only=True)
        found.append(of_model(setup.job, setup.replica, BATCH, 0).activations)
    assert found == [
        9 * BATCH * ROW,
        (5 + 1) * BATCH * ROW,
    ]  # the inputs of the first block are those of the mini-batch
    found = []
    for each in (job, again):
        partition = "gpipe:stages=3,micro=4"
        setup, _ = resolved(each, f"bsp collective {partition}", workers=3, on="virtual", timing_only=True)
        found.append([of_part(setup.stages.layout, rank, BATCH, 0).activations for rank in range(3)])
        run = virtual(each, f"bsp collective {partition}", workers=3, steps=1, timing_only=True)
        figures = [run.summary["pipeline"][f"worker {rank}"]["activation_bytes"] for rank in range(3)]
        assert figures == found[-1]
    assert found == [[3 * BATCH * ROW] * 3, [(BATCH + 3) * ROW, (2 * BATCH + 3) * ROW, (2 * BATCH + 3) * ROW]]


def test_a_stage_and_its_blocks_are_not_computed_again_both():
    with raising(UsageError, "remat=true"):
        job = dataclasses.replace(dense(), recompute=True)
        virtual(job, "bsp gpipe:stages=2,micro=2,remat=true", workers=2, steps=1, timing_only=True)


def test_two_stages_fit_where_the_whole_model_does_not():
    """Momentum: 18 P of the whole model, 9 P of a half."""
    memory, options = 17 * P, {"optimizer": "momentum", "steps": 1}
    with pytest.raises(UsageError) as caught:
        virtual(dense(), "bsp collective", machines(memory, 2), **options)
    needed, activations = 18 * P + 6 * BATCH * ROW, 6 * BATCH * ROW
    assert str(caught.value) == (
        f"worker 0 needs {needed:,} bytes of memory or more (weights {6 * P:,}, gradient {6 * P:,}, optimizer "
        f"{6 * P:,}, activations {activations:,}), and machine 0 has {memory:,} for it. Shard it, as in "
        "--partition zero:stage=3, split the model, as in --partition gpipe:stages=2 or tensor:ways=2, or make the "
        "mini-batch smaller."
    )
    run = virtual(dense(), "bsp collective gpipe:stages=2,micro=2", machines(memory, 2), **options)
    assert run.summary["steps"] == 1


# ---- shards

S = 6 * P
"""Bytes of a slice of the gradient, which is all of so small a model."""


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("zero:stage=1", MemoryUse(6 * P, 9 * P, 3 * P, 0, 72 * ROW, messages=S)),
        ("zero:stage=2", MemoryUse(6 * P, 3 * P + S, 3 * P, 0, 72 * ROW, messages=S)),
        ("zero:stage=3", MemoryUse((3 + 2) * P, (3 + 3) * P, 3 * P, 0, 72 * ROW, messages=P)),
    ],
)
def test_a_worker_keeps_a_shard_and_what_is_gathered_or_scattered(partition, expected):
    """Of six layers, two workers, and an optimizer with a vector."""
    setup, _ = resolved(dense(), f"bsp {partition}", workers=2, on="virtual", optimizer="momentum")
    assert memory_use(setup, 0) == expected


@pytest.mark.parametrize(
    ("partition", "ranks", "weights"),
    [
        ("zero:stage=3", 4, (6 / 4 + 2) * P),
        ("zero:stage=3,within=2", 2, (6 / 2 + 2) * P),
        ("gpipe:stages=2,micro=2+zero:stage=1", 2, 3 * P),
    ],
)
def test_shards_are_parts_of_what_a_group_of_ranks_has(partition, ranks, weights):
    setup, _ = resolved(dense(), f"bsp {partition}", workers=4, on="virtual", optimizer="adam")
    use, held = memory_use(setup, 0), 6 // setup.parts * P
    assert (use.weights, use.optimizer) == (weights, 2 * held / ranks)


def test_one_worker_has_all():
    setup, _ = resolved(dense(), "bsp zero:stage=2", workers=1, on="virtual", optimizer="momentum")
    assert memory_use(setup, 0) == MemoryUse(6 * P, 6 * P, 6 * P, 0, 72 * ROW)


def test_of_many_slices_some_are_scattered_at_once_and_one_is_computed():
    """Slices of 1, 3, 2 and 4 elements: two are scattered; in stage 3 the first is whole and one is scattered."""
    shards = Shards([[(0, 1)], [(1, 4)], [(4, 6)], [(6, 10)]], ranks=2)
    own = 1 + 2 + 1 + 2
    assert Zero(stage=1).keeps(shards) == (10, 10 + own, own, 4 + 3)
    assert Zero(stage=2).keeps(shards) == (10, own + 4 + 3 + 2, own, 4 + 3)
    assert Zero(stage=3).keeps(shards) == (own + 1 + 4 + 3, own + 1 + 4 + 3 + 2, own, 4)


def test_shards_fit_where_the_whole_model_does_not():
    """Adam: 24 P of the whole model."""
    memory, options = 16 * P, {"optimizer": "adam", "steps": 1, "batch_size": 1}
    for partition in ("none", "zero:stage=1"):
        with pytest.raises(UsageError, match="Shard it, as in --partition zero:stage=3, split the model"):
            virtual(dense(), f"bsp collective {partition}", machines(memory, 4), **options)
    assert virtual(dense(), "bsp zero:stage=3", machines(memory, 4), **options).summary["steps"] == 1
    with pytest.raises(UsageError, match=r"Use more workers than 4, split the model, as in"):
        virtual(dense(), "bsp zero:stage=3", machines(memory // 4, 4), **options)


@pytest.mark.parametrize(
    ("strategy", "advice"),
    [
        ("bsp gpipe:stages=2,micro=2", "Shard it, as in --partition gpipe:stages=2,micro=2+zero:stage=1, use more"),
        ("bsp gpipe:stages=2,micro=2+zero:stage=1", "Use more workers than 4, use more stages than 2"),
        ("bsp zero:stage=1,within=2", "Shard it, as in --partition zero:stage=3,within=2, split the model"),
        ("bsp pipedream:stages=2", "Use more stages than 2"),
        ("averaging:period=4", "Split the model"),
        ("bsp int8", "Split the model"),
        ("bsp ps", "Split the model"),
    ],
)
def test_advice_names_shards_where_the_strategy_can_have_them(strategy, advice):
    with pytest.raises(UsageError) as caught:
        virtual(dense(), strategy, machines(100, 4), steps=1, optimizer="momentum")
    assert f"has 100 for it. {advice}" in str(caught.value)


def test_advice_for_a_model_of_one_block_shards_the_gradient():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, inputs):
            return self.layer(inputs)

    with pytest.raises(UsageError) as caught:
        virtual(dataclasses.replace(dense(), model=One), "bsp", machines(100, 2), steps=1)
    assert "Shard it, as in --partition zero:stage=2, split" in str(caught.value)


def test_advice_for_steps_of_several_mini_batches_leaves_their_gradient_whole():
    job = dataclasses.replace(dense(), accumulate=2)
    with pytest.raises(UsageError) as caught:
        virtual(job, "bsp", machines(100, 2), steps=1, timing_only=True)
    assert "Shard it, as in --partition zero:stage=1, split" in str(caught.value)


def test_what_a_method_keeps_counts_beside_two_copies_of_the_model():
    """BMUF keeps W, the start of the block and Delta at each worker."""
    memory, options = 13 * P, {"timing_only": True, "steps": 2, "batch_size": 1}
    virtual(dense(), "bsp collective", machines(memory, 2), **options)
    with pytest.raises(UsageError) as caught:
        virtual(dense(), "bmuf:period=2 collective", machines(memory, 2), **options)
    assert f"gradient {6 * P:,}, activations {6 * ROW:,}, method {18 * P:,}), and machine 0" in str(caught.value)
    assert "bmuf:period=2 keeps model, start, delta at each worker." in str(caught.value)
    virtual(dense(), "bmuf:period=2 collective", machines(31 * P, 2), **options)
    ranked = dure.plan(dense(), on=machines(memory, 2), batch_size=1, within=20)
    assert "bmuf:period=16" in ranked.found.refused
    assert "bsp" in [row.strategy for row in ranked.found.rows]


def test_each_machine_is_held_against_its_own_worker():
    """Stage 0 of PipeDream keeps a version more, so the smaller machine must be that of stage 1."""
    small, large = Machines(memory=11 * P), Machines(memory=13 * P)
    partition = "bsp collective pipedream:stages=2"
    options = {"optimizer": "momentum", "steps": 1, "batch_size": 1, "workers": 4}
    virtual(dense(), partition, Cluster(machines=(large, small, Machines(count=2))), **options)
    with raising(UsageError, "worker 2"):
        virtual(dense(), partition, Cluster(machines=(large, small, small, large)), **options)


@pytest.mark.parametrize("name", PIPELINES)
def test_more_memory_is_answered_with_remat_where_the_method_takes_it(name):
    partition = f"{name}:stages=2"
    with pytest.raises(UsageError, match="bytes of memory or more") as caught:
        virtual(dense(), f"bsp collective {partition}", machines(1, 2), steps=1, optimizer="momentum:lr=0.1")
    try:
        taken = make(f"{partition},remat=true", "partition") != make(partition, "partition")
    except StrategyError:
        taken = False
    assert ("add remat=true" in str(caught.value)) == taken


def test_a_timing_only_run_of_stages_needs_shapes_alone():
    """Its model may be on the meta device."""
    cluster = machines(10**10, 2)
    for partition in ("gpipe:stages=2,micro=4", "pipedream:stages=2"):
        run = virtual(vgg16(), f"bsp collective {partition}", cluster, steps=2, timing_only=True)
        assert run.summary["steps"] == 2
    with raising(UsageError, "remat=true"):
        virtual(vgg16(), f"bsp collective {partition}", machines(10**9, 2), steps=2, timing_only=True)
