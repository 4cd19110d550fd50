"""Which methods are the same algorithm where, bit for bit: the edges between them, and pairs that must differ.

All numbers are dyadic with few bits (`support.dyadic`), so that every sum is exact in any order, and equal means equal.
Every worker's every step costs the same and messages cost nothing, unless a row says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.dyadic import LR, bowl_of_many, serial
from support.runs import virtual
from torch import Tensor

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, Trace

K, STEPS = 4, 4


def lockstep(workers: int) -> Cluster:
    """All alike and all at once; what is sent arrives a moment later, all of it at the same time."""
    machines = (Machines(count=workers, compute=Constant(seconds=1.0)),)
    link = Link(bandwidth=1e15, latency=1e-3)
    return Cluster(machines=machines, link=link, alpha=0.0, beta=0.0, gamma=0.0)


def in_turn(workers: int) -> Cluster:
    """Each worker k / workers of a step behind worker 0, for good: updates come one by one."""
    firsts = [1 + rank / workers for rank in range(workers)]
    kinds = [Machines(compute=Trace(durations=(first, *[1.0] * STEPS), start="first")) for first in firsts]
    return Cluster(machines=tuple(kinds))


def unequal(workers: int) -> Cluster:
    """One is five times as fast as the others."""
    machines = (Machines(compute=Constant(seconds=0.2)), Machines(count=workers - 1, compute=Constant(seconds=1.0)))
    return Cluster(machines=machines)


@dataclass(frozen=True)
class Same:
    """All of `strategies` give the same parameters; `options` are those of every run, `own` those of one alone."""

    name: str
    strategies: tuple[str, ...]
    cluster: Any = lockstep
    workers: int = K
    options: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


SUMMED: Mapping[str, Any] = {"lr": LR / K}
"""Of methods whose updates add up: K workers at this rate are one update at K times it."""

EVERYBODY_EVERY_STEP = (
    "bsp collective",
    "bsp ps",
    "bsp ps:shards=2,split=layer",
    "bsp ps:shards=3",
    "ssp:bound=0 ps:shards=2",
    f"k-sync:k={K} ps:shards=2",
    f"k-async:k={K} ps",
    f"k-async:k={K}+dc-asgd:lambda=1 ps",
    f"k-async:k={K}+staleness-lr ps",
    f"k-batch-sync:k={K} ps",
    "backup:backups=0 ps:shards=2",
    "averaging:period=1 collective",
    "averaging:period=1 ps:shards=2",
    "bmuf:momentum=0,zeta=1,period=1",
    "bmuf:momentum=0,zeta=1,period=1 ps",
    "downpour ps:shards=2",
)

ONE_AT_A_TIME = (
    "downpour ps",
    "downpour:n_push=1,n_fetch=1 ps:shards=3",
    "downpour+dc-asgd:lambda=0 ps",
    "ssp:bound=inf ps:shards=2",
    "k-async:k=1 ps",
    "k-batch-async:k=1 ps",
)

GRAPH = [
    Same(
        "everybody's mean, every step",
        EVERYBODY_EVERY_STEP,
        own={"ssp:bound=0 ps:shards=2": SUMMED, "downpour ps:shards=2": SUMMED},
    ),
    Same("one gradient after another", ONE_AT_A_TIME, in_turn),
    Same(
        "everybody but the slowest", ("backup:backups=1 ps", f"k-sync:k={K - 1} ps"), in_turn, options={"split": None}
    ),
    Same(
        "models averaged now and then",
        (
            "averaging:period=2 collective",
            "averaging:period=2 ps:shards=2",
            "bmuf:momentum=0,zeta=1,period=2 collective",
            "bmuf:momentum=0,zeta=1,period=2 ps",
        ),
    ),
    Same("models averaged once", (f"averaging:period={STEPS}", "one-shot collective", "one-shot ps:shards=2")),
    Same("elastic, without momentum", ("easgd:period=2 ps", "eamsgd:period=2,momentum=0 ps"), in_turn),
    Same("elastic, all at once", ("easgd:period=2 collective", "eamsgd:period=2,momentum=0 collective")),
    Same(
        "blocks, wherever their momentum is kept",
        tuple(f"bmuf:period=2,momentum=0.5,zeta=0.5,nesterov=false{more}" for more in ("", " ps", " ps:shards=3")),
    ),
    Same(
        "blocks that look ahead, wherever their momentum is kept",
        tuple(f"bmuf:period=2,momentum=0.5,zeta=0.5,nesterov=true{more}" for more in ("", " ps", " ps:shards=3")),
    ),
    Same(
        "DiLoCo is BMUF with Nesterov's momentum around AdamW",
        ("diloco:period=2,lr=0.5,momentum=0.5", "bmuf:period=2,zeta=0.5,momentum=0.5,nesterov=true"),
        options={"optimizer": "adamw:weight_decay=0.1"},
    ),
    Same("hogwild that writes after every batch", ("hogbatch:batch=1", "hogwild"), in_turn),
]

ALONE = (
    *EVERYBODY_EVERY_STEP[:4],
    "ssp:bound=3 ps",
    "downpour ps:shards=2",
    "downpour+dc-asgd:lambda=1 ps",
    "downpour+dc-asgd:mode=adaptive ps",
    "downpour+staleness-lr ps",
    "k-sync:k=1 ps",
    "k-batch-sync:k=1 ps",
    "k-async:k=1 ps",
    "k-batch-async:k=1 ps",
    "backup:backups=0 ps",
    "one-shot",
    "averaging:period=3",
    "bmuf:momentum=0,period=3",
    "hogwild",
    "hogbatch:batch=1",
    "ad-psgd",
)


def trained(strategy: str, cluster: Cluster, **options: Any) -> Tensor:
    given = {"split": "striped", "steps": STEPS, "lr": LR} | options
    return virtual(bowl_of_many(), strategy, cluster, **given).params


@pytest.mark.sampled(2)
@pytest.mark.parametrize("edge", GRAPH, ids=lambda edge: edge.name)
def test_the_same_algorithm_under_several_names(edge):
    found = {}
    for strategy in edge.strategies:
        options = {**edge.options, **edge.own.get(strategy, {})}
        found[strategy] = trained(strategy, edge.cluster(edge.workers), **options)
    first, *others = found.values()
    assert not torch.equal(first, bowl_of_many().build(0).place.detach()), "nothing was learnt"
    differ = [strategy for strategy, params in found.items() if not torch.equal(params, first)]
    assert not differ, f"not the same as {edge.strategies[0]}: {differ}"
    assert others


@pytest.mark.sampled(17)
@pytest.mark.parametrize("strategy", ALONE)
def test_one_worker_alone_is_plain_gradient_descent(strategy):
    assert torch.equal(trained(strategy, lockstep(1)), serial(STEPS))


# ---- what must not be the same


@dataclass(frozen=True)
class Differ:
    """Two strategies, which somebody might take for the same."""

    name: str
    one: str
    other: str
    cluster: Any = lockstep
    options: Mapping[str, Any] = field(default_factory=dict)


STRANGERS = [
    Differ("models are not gradients for Adam", "averaging:period=1", "bsp", options={"optimizer": "adam"}),
    Differ("several batches of the fast one are not one of each", f"k-batch-sync:k={K} ps", "bsp ps", unequal),
    Differ("whoever waits for nobody is not whoever waits", "downpour ps", "bsp ps", in_turn),
    Differ("a bound is not no bound", "ssp:bound=1 ps", "ssp:bound=inf ps", unequal),
    Differ("a remedy changes something", "downpour+dc-asgd:lambda=1 ps", "downpour ps", in_turn),
    Differ("a smaller rate for stale gradients", "downpour+staleness-lr ps", "downpour ps", in_turn),
    Differ("the look ahead is no classical momentum", "bmuf:period=2,nesterov=true", "bmuf:period=2,nesterov=false"),
    Differ("momentum from block to block", "bmuf:period=2", "averaging:period=2"),
    Differ("a spring is no mean", "easgd:period=2 collective", "averaging:period=2 collective"),
    Differ("all at once is not one after another", "easgd:period=2 collective", "easgd:period=2 ps", in_turn),
    Differ("waiting for distinct workers", "k-async:k=2 ps", "k-batch-async:k=2 ps", unequal),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("pair", STRANGERS, ids=lambda pair: pair.name)
def test_what_looks_alike_and_is_not(pair):
    one, other = (trained(strategy, pair.cluster(K), **pair.options) for strategy in (pair.one, pair.other))
    assert float((one - other).abs().max()) > 1e-6
