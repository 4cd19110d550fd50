"""Splits of layers that cannot work are refused before a run begins, with the reason and what works."""

from __future__ import annotations

import re

import pytest
import torch
from support.runs import resolved, virtual
from support.shared_layers import pairs
from support.stage_jobs import job_text
from support.wording import raising
from torch import nn

import dure
from dure.errors import StrategyError, UsageError
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Event, Machines

PLAIN = job_text("plain")  # four blocks: their layers are split by outputs, inputs, outputs, inputs


def bounds(partition, job=PLAIN, workers=4):
    setup, _ = resolved(job, f"bsp collective {partition}", workers=workers, on="virtual", steps=1)
    assert setup.stages is not None
    return setup.stages.layout.bounds


# ---- cuts


@pytest.mark.parametrize("cuts", ["parameters", "even", "profile"])
@pytest.mark.parametrize("shared", [pairs(2), "tensor:ways=2"])
def test_rules_of_cuts_choose_borders_where_tensors_are_whole(cuts, shared):
    """The first layer has most parameters, so that a pipeline alone is cut behind it."""
    assert bounds(f"gpipe:stages=2,micro=2,cuts={cuts}+{shared}") == (0, 2, 4)
    if cuts == "parameters":
        assert bounds("gpipe:stages=2,micro=2", workers=2) == (0, 1, 4)


def test_layers_that_are_split_alone_may_be_cut_everywhere():
    for layers in ("rows", "columns"):
        assert bounds(f"gpipe:stages=4,micro=2+tensor:ways=2,layers={layers}", workers=8) == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_cut_within_a_pair_is_refused(cuts):
    expected = (
        f"cuts={cuts} is between block {cuts - 1} (Sequential) and block {cuts} (Sequential), where each of the "
        "workers that share layers has a part of the tensors. Cut before block 2, as in cuts=2."
    )
    with pytest.raises(StrategyError) as caught:
        bounds(f"gpipe:stages=2,micro=2,cuts={cuts}+{pairs(2)}")
    assert str(caught.value) == expected


def test_more_stages_than_whole_borders_are_refused():
    with raising(StrategyError, "block 2."):
        bounds(f"gpipe:stages=3,micro=2+{pairs(2)}", workers=6)
    with raising(StrategyError, "block 1."):
        bounds("gpipe:stages=2,micro=2+tensor:ways=2", "digits-mlp:hidden=16")


# ---- texts


@pytest.mark.parametrize(
    ("partition", "expected"),
    [
        ("tensor:ways=2+gpipe:stages=2", '"gpipe" comes first: write "gpipe:stages=2+tensor:ways=2".'),
        ("gpipe:stages=2+ddg:stages=2", '"ddg" does not join gpipe: layers that are shared do, as in "gpipe+'),
        ("tensor:ways=2+tensor:ways=2", 'nothing joins tensor, so not "tensor": write "tensor" alone.'),
        ("gpipe:stages=2+neurons:ways=2", "neurons does not join gpipe"),
        ("dni:stages=2+tensor:ways=2", "nothing joins dni, which is no order of forwards and backwards"),
        ("tensor:ways=0", "tensor: ways=0 splits nothing: write a whole number from 1, such as ways=2"),
        ("none+tensor:ways=2", 'nothing joins none, so not "tensor": write "none" alone.'),
    ],
)
def test_texts_that_do_not_join(partition, expected):
    with pytest.raises(StrategyError, match=re.escape(expected)):
        Strategy.parse(f"bsp collective {partition}")


def test_a_partition_does_not_join_a_method():
    with raising(StrategyError, "tensor"):
        Strategy.parse("bsp+tensor:ways=2 collective")


# ---- numbers


@pytest.mark.parametrize(
    ("job", "partition", "workers", "expected"),
    [
        (PLAIN, "tensor:ways=2", 3, "ways=2"),
        (PLAIN, "gpipe:stages=2+tensor:ways=2", 6, "needs 4"),
        (PLAIN, "tensor:ways=15", 15, "of 15"),
        (
            "char-gpt:layers=1,width=8,heads=2,context=8",
            "tensor:ways=3",
            3,
            "the 2",
        ),
    ],
)
def test_numbers_that_do_not_fit(job, partition, workers, expected):
    with raising(UsageError, expected):
        bounds(partition, job, workers)


# ---- parameters that several workers have


@pytest.mark.parametrize("method", ["downpour ps", "ad-psgd gossip", "easgd ps"])
def test_methods_that_would_update_copies_at_different_times_are_refused(method):
    with raising(StrategyError, "1.0.bias"):
        virtual(PLAIN, f"{method} tensor:ways=2", workers=4, steps=1)


@pytest.mark.parametrize("strategy", ["bsp ps int8", "averaging:period=2 collective int8"])
def test_codecs_that_would_make_copies_differ_are_refused(strategy):
    with raising(StrategyError, "1.0.bias"):
        virtual(PLAIN, f"{strategy} tensor:ways=2", workers=4, steps=1)


# ---- runs


@pytest.mark.parametrize("partition", ["tensor:ways=2", "gpipe:stages=2,micro=2+tensor:ways=2"])
@pytest.mark.parametrize("kind", ["crash", "join"])
def test_events_of_workers_are_refused(kind, partition):
    cluster = Cluster(machines=(Machines(count=4),), events=(Event(at=0.5, kind=kind, worker=1),))
    with pytest.raises(UsageError, match=rf"worker 1 {kind} at 0\.5 s, .* Leave the event out, or the partition,"):
        virtual(PLAIN, f"bsp collective {partition}", cluster, steps=1)


def test_a_loop_of_the_users_own_has_whole_models():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for partition in ("tensor:ways=2", "gpipe:stages=2+tensor:ways=2"):
        with pytest.raises(UsageError, match=f"{re.escape(partition)} gives a rank a part of it"):
            dure.attach(model, optimizer, partition=partition)


@pytest.mark.parametrize("partition", ["zero-bubble:stages=2,micro=3", "interleaved:stages=1,chunks=2,micro=3"])
def test_orders_of_other_pipelines_give_the_gradients_of_the_whole_model(partition):
    """Zero-bubble computes the gradient of inputs, with its collectives, apart from that of the weights."""
    options = {"steps": 4, "dtype": "float64", "seed": 3}
    whole = virtual(PLAIN, "bsp collective", workers=1, **options)
    count = 2 if "zero" in partition else 1
    shared = virtual(PLAIN, f"bsp collective {partition}+{pairs(2)}", workers=2 * count, **options)
    torch.testing.assert_close(shared.params, whole.params, rtol=0, atol=1e-13)
