"""Parameter servers in one run: where they are, and which part of the model each holds.

Four ways cut flat parameters into shards (`split`):

    memory    0 ........ n/S ........ 2n/S ........ n      equal parts; a layer may span two
    layer     |layer 3|layer 0|   |layer 1|layer 2|        whole layers, the largest first to the emptiest shard
    keys      |layer 0|layer 1|   |layer 2|layer 3|        whole layers, as many to each; each has a 64-bit key
    hybrid    |a third of layer 2|layer 1|   ...           large layers cut evenly, small ones whole

A server's time grows with the elements it holds, so the fullest shard decides the time of a step. Li et al.,
"Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, and many after them place whole
layers; one layer that holds three quarters of a model then makes all other servers idle. `keys` is how ps-lite,
that paper's library, cuts its keys; `hybrid` is the rule of MXNet's distributed key-value store (Chen et al.,
"MXNet: A Flexible and Efficient Machine Learning Library for Heterogeneous Distributed Systems", 2015).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from dure.codec.base import COMBINED_SEED
from dure.core.node import Ghost
from dure.core.vectors import FlatSlice, Ranges, equal_ranges, pieces, size
from dure.errors import StrategyError
from dure.job.optimizer import vectors_of
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.correction import kept_by
from dure.topology.parameter_server.choice import BOUND, SPLITS, Split
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.staging import Corrections

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.codec.coder import SliceLayout
    from dure.core.node import Address, Group, Node
    from dure.topology.parameter_server.choice import ParameterServer


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Addresses of the shards and the clock, and how the model lies and travels: what a client must know of servers.

    `ranges` are those of each shard (`placement.split`). `ordered` updates go through the `clock`; the others are
    applied on arrival. `clocked` is the address of the only shard together with the clock (`ClockedShard`), if there
    is one shard. `may_refuse` is the policy's. Where shards `look_back`, a pull says which worker computes on it.
    `timing_only` runs move `Ghost`s of `itemsize` bytes an element. Updates are encoded by `codec`, each shard's part
    by its layout; pulled parameters are not.
    """

    shards: Sequence[Address]
    ranges: Sequence[Ranges]
    clock: Address | None = None
    ordered: bool = True
    may_refuse: bool = False
    timing_only: bool = False
    itemsize: int = 4
    look_back: bool = False
    codec: Codec | None = None
    layouts: Sequence[SliceLayout] = ()
    clocked: Address | None = None
    ghosts: Sequence[Sequence[torch.Tensor]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the tensors of each shard in a timing-only run, once for all clients."""
        ghosts = [[Ghost(stop - start, self.itemsize) for start, stop in ranges] for ranges in self.ranges]
        object.__setattr__(self, "ghosts", ghosts)

    def parts(self, flat: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Views of `flat`, by shard."""
        if self.timing_only:
            return self.ghosts
        return [pieces(flat, ranges) for ranges in self.ranges]

    @property
    def whole_nbytes(self) -> int | None:
        """Size of the model, where one shard holds it in one piece; None where it is cut."""
        if len(self.ranges) != 1 or len(self.ranges[0]) != 1:
            return None
        ((start, stop),) = self.ranges[0]
        return (stop - start) * self.itemsize


LAST_KEY = (1 << 64) - 1
"""The largest of ps-lite's keys."""


def split(
    layers: Sequence[FlatSlice], numel: int, shards: int, by: Split = "memory", *, bound: int = BOUND
) -> list[Ranges]:
    """The ranges that each of `shards` servers holds, in ascending order; none where there is too little to share.

    `bound` is where `hybrid` begins to cut.

    Raises:
        StrategyError: there are no shards, or no such way of splitting.
    """
    if shards < 1:
        raise StrategyError(f"shards counts servers and must be >= 1, got {shards}. Use 1 for a single server.")
    if by == "memory":
        return [[cut] if cut[0] < cut[1] else [] for cut in equal_ranges(numel, shards)]
    if by == "layer":
        return _largest_first(layers, shards)
    if by == "keys":
        return _by_key(layers, shards)
    if by == "hybrid":
        return _small_whole(layers, shards, bound)
    raise StrategyError(f"parameters are split by {', '.join(SPLITS)}, got {by!r}.")


def held_by(topology: ParameterServer, layers: Sequence[FlatSlice], numel: int) -> list[Ranges]:
    """The ranges that each server of `topology` holds of a model. Raises `StrategyError` if there are too many."""
    if topology.shards > numel:
        raise StrategyError(
            f"shards counts servers, and {topology.shards} are more than the model has parameters, {numel}: use at "
            "most as many, and rather one for each machine."
        )
    return split(layers, numel, topology.shards, by=topology.split, bound=topology.bound)


def key_of(layer: int, layers: int) -> int:
    """The 64-bit key of one of `layers` layers: they are spaced evenly, each in the middle of its stretch.

    In the middle, as at its beginning a rounded key may lie just below the border of the range that begins there.
    """
    return (2 * layer + 1) * LAST_KEY // (2 * layers)


def shard_of_key(key: int, shards: int) -> int:
    """The shard of a key. Shards have equal ranges, rounded down; the few keys above the last are the last shard's.

    >>> [shard_of_key(key, 3) for key in (0, LAST_KEY // 3 - 1, LAST_KEY // 3, LAST_KEY)]
    [0, 0, 1, 2]
    """
    return min(key // (LAST_KEY // shards), shards - 1)


def _by_key(layers: Sequence[FlatSlice], shards: int) -> list[Ranges]:
    """Whole layers, in their order: balanced in keys, not in elements."""
    held: list[Ranges] = [[] for _ in range(shards)]
    for number, layer in enumerate(layers):
        held[shard_of_key(key_of(number, len(layers)), shards)].append((layer.start, layer.stop))
    return [_joined(ranges) for ranges in held]


def _small_whole(layers: Sequence[FlatSlice], shards: int, bound: int) -> list[Ranges]:
    """Layers of `bound` elements or more are cut evenly over all shards; a smaller one's number gives its shard."""
    held: list[Ranges] = [[] for _ in range(shards)]
    for number, layer in enumerate(layers):
        elements = layer.stop - layer.start
        if elements < bound:
            held[number * 9973 % shards].append((layer.start, layer.stop))  # MXNet's prime and rule
            continue
        for ranges, (start, stop) in zip(held, equal_ranges(elements, shards), strict=True):
            ranges.append((layer.start + start, layer.start + stop))
    return [_joined(ranges) for ranges in held]


def _largest_first(layers: Sequence[FlatSlice], shards: int) -> list[Ranges]:
    """Greedy: the largest layer first, to the shard that holds least; the first of equals, both times."""
    held: list[Ranges] = [[] for _ in range(shards)]
    sizes = [0] * shards
    for layer in sorted(layers, key=lambda layer: layer.start - layer.stop):
        emptiest = sizes.index(min(sizes))
        held[emptiest].append((layer.start, layer.stop))
        sizes[emptiest] += layer.stop - layer.start
    return [_joined(sorted(ranges)) for ranges in held]


def _joined(ranges: Ranges) -> Ranges:
    """Neighboring ranges as one."""
    joined: Ranges = []
    for start, stop in ranges:
        if start == stop:
            continue
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class ServerTopology(Topology):
    """Servers hold the model in shards, and server 0 the clock."""

    clocked = True

    def __init__(self, choice: ParameterServer, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.servers = choice.shards
        self.colocated = choice.colocated

    def check(self) -> None:
        _ = self.ranges

    @cached_property
    def ranges(self) -> list[Ranges]:
        replica = self.plan.replica
        return held_by(self.choice, replica.layers, replica.numel)

    @property
    def worker_vectors(self) -> float:
        """Room for the next pull; where results of votes are received, the mirror of the servers and a result."""
        plan = self.plan
        votes = plan.codec is not None and plan.codec.vote() is not None
        return 1.0 + votes * (2 + vectors_of(plan.server_optimizer))

    @property
    def server_vectors(self) -> float:
        """Versions and updates, the state of the optimizer, and the vectors of corrections.

        | updates            | versions and updates at a shard at once                                      |
        |--------------------|------------------------------------------------------------------------------|
        | applied on arrival | the newest version and the next                                              |
        | in groups          | an update of each worker and their sum, the newest version and the one before |
        | in groups, stale   | a group and its sum, a version for each worker, the newest and the next      |
        | of a coordinator   | the model, a sum of each worker, the method's vectors and the next one       |

        Corrections that compare keep a version for each worker, and a copy of the update.
        """
        plan, method = self.plan, self.plan.method
        at_once = plan.workers + 3 if method.ordered else 2
        if method.coordinated:
            at_once = plan.workers + 2 + len(method.vectors)
        elif method.ordered and method.stale:
            at_once = plan.workers + 3 + method.group
        if any(correction.compares for correction in method.corrections):
            at_once += 1 if method.ordered else plan.workers + 1
        corrections = sum(kept_by(correction, plan.workers) for correction in method.corrections)
        return float(at_once + corrections + vectors_of(plan.server_optimizer))

    def shard(self, node: Node, number: int, *, log: bool = False) -> Shard:
        plan, ranges, initial = self.plan, self.ranges[number], self.plan.model.params
        if isinstance(initial, Ghost):
            values: Any = Ghost(size(ranges), plan.replica.params.element_size())
        else:
            values = torch.cat([initial[start:stop] for start, stop in ranges]) if ranges else initial[:0].clone()
        more: dict[str, Any] = {
            "log": log,
            "corrections": Corrections.of(plan.method.corrections),
            "max_delay": plan.method.max_delay,
        }
        if plan.codec is not None:
            more |= {"coder": plan.codec.coder(self.layouts[number], COMBINED_SEED), "vote": plan.codec.vote()}
        segments = plan.server_segments(ranges)
        return Shard(node, values, plan.server_optimizer, ranges=ranges, segments=segments, **more)

    def restarted(self, shard: Shard, incarnation: int) -> None:
        shard.start_generation(incarnation)

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        plan = self.plan
        if plan.codec is not None and plan.codec.vote() is not None:
            held = [plan.server_segments(ranges) for ranges in self.ranges]
            worker.sessions.server.client.follow(worker.params, plan.server_optimizer, held)
