"""The smallest change with which a model fits: more memory, smaller batches, or more workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.core import units
from dure.errors import DureError
from dure.planner.candidates import shape_of, single
from dure.planner.timing import largest_memory, setup_in
from dure.planner.variants import of_workers, without_limits

if TYPE_CHECKING:
    from dure.partition.memory import MemoryUse
    from dure.planner.scene import Scene

DOUBLINGS = 6
"""Doublings of the workers, and halvings of the batch, that are tried."""


def smallest_change(scene: Scene, refused: Mapping[str, str]) -> str:
    """A sentence with the change that makes a strategy fit, where memory refuses all strategies."""
    limits = [limit for limit in map(scene.cluster.memory_of, range(scene.workers)) if limit is not None]
    if not limits:
        reasons = list(dict.fromkeys(refused.values()))
        return f"no strategy works here: {reasons[0] if reasons else 'there is none'}"
    limit = min(limits)
    free = scene.on(without_limits(scene.cluster))
    needs = _needs(free)
    if not needs:
        return f"no strategy works here: {next(iter(refused.values()))}"
    strategy, least = min(needs.items(), key=lambda pair: pair[1].total)
    changes = [f"memory of {units.as_size(least.total)} for each worker"]
    changes += _smaller_batch(free, needs, limit) + _more_workers(free, limit)
    return (
        f"no strategy fits into {units.as_size(limit)} of memory for each worker. The least is needed by "
        f"{strategy}: {units.as_size(least.total)} ({least}). Any of these would make it fit: {'; '.join(changes)}."
    )


def _needs(scene: Scene) -> dict[str, MemoryUse]:
    """The memory of a worker under each candidate that works."""
    found = {}
    for strategy in single(shape_of(scene)):
        if " " not in strategy or ":" not in strategy:
            continue  # methods and topologies hold whole models, as plain data parallelism does
        try:
            found[strategy] = largest_memory(setup_in(scene, strategy))
        except DureError:
            continue
    return found


def _smaller_batch(scene: Scene, needs: Mapping[str, MemoryUse], limit: int) -> list[str]:
    for halving in range(1, DOUBLINGS):
        smaller = scene.of(scene.batch >> halving)
        for strategy in sorted(needs, key=lambda name: needs[name].total):
            try:
                if largest_memory(setup_in(smaller, strategy)).total <= limit:
                    return [f"--batch-size {smaller.batch // scene.workers} with {strategy}"]
            except DureError:
                continue
    return []


def _more_workers(scene: Scene, limit: int) -> list[str]:
    for doubling in range(1, DOUBLINGS):
        cluster = of_workers(scene.cluster, scene.workers << doubling)
        if cluster is None:
            return []
        larger = scene.on(cluster)
        fitting = [name for name, use in _needs(larger).items() if use.total <= limit]
        if fitting:
            return [f"{larger.workers} workers with {fitting[0]}"]
    return []
