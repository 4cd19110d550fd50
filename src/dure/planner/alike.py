"""Replicas that do the same at the same times: one of them stands for all in a timing-only run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.codec.fp32 import Float32
from dure.runtime.virtual.compute import Constant
from dure.sync.base import traits_of
from dure.topology.collective.choice import Collective

if TYPE_CHECKING:
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster


def simulated_workers(setup: Setup, cluster: Cluster) -> int:
    """The workers of one replica where all replicas are alike; otherwise all.

    Replicas are alike if they have equal batches and equal machines of constant speed, meet in each step in collectives
    alone, and share no card and no cores of a machine with another replica.
    """
    alike = _in_step(setup) and _equal(cluster) and setup.parts % cluster.machines[0].workers == 0
    return setup.parts if alike and len(set(setup.batch_sizes)) == 1 else setup.workers


def _in_step(setup: Setup) -> bool:
    """Whether replicas meet in the engine's collectives alone: encoded gradients and other algorithms are messages."""
    strategy, topology = setup.strategy, setup.strategy.topology
    engine = isinstance(topology, Collective) and topology.algorithm == "engine"
    return engine and isinstance(strategy.codec, Float32) and traits_of(strategy.sync).lockstep


def _equal(cluster: Cluster) -> bool:
    one, *others = cluster.machines
    constant = isinstance(one.compute, Constant) and isinstance(one.speed, float)
    return constant and not (others or cluster.events or cluster.host or cluster.unfairness)
