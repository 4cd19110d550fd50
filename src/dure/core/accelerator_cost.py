"""Cost of the collectives of accelerators in virtual time: hops and bytes over two levels of links.

N ranks are on h hosts, g on each. A ring inside a host moves B_in bytes per second, the cards of a host B_out, and a
hop takes l_in or l_out seconds. S bytes are reduced; a is the start of a collective:

    ring        a + p (2 (N - h) l_in + 2 (h - 1) l_out) + 2 (N - 1) / N S / min(B_in, B_out)     p = 1.9 if h > 1
    tree        a + 2 (t_in (g - 1) + t_out floor(log2 h)) + 2 S / (0.9 min(B_in, B_out))
    two-level   a + 2 (g - 1) l_in + 2 (h - 1) l_out + 2 (g - 1) / g S / B_in + 2 (h - 1) / h S / B_out

A hop of a tree takes t_in = max(28 us, l_in) or t_out = max(50 us, l_out). B_out is at most the share that a ring of
the hosts has of an uplink of a rack, or of a line between sites. Their latencies are added twice: once around that
ring, or of a tree the largest.

Two levels are a reduce-scatter inside each host, rings of h ranks over the cards, and an all-gather inside. For large S
they beat the ring if and only if B_in > h B_out. Without a choice, an all-reduce takes the faster of ring and tree.
A reduce-scatter and an all-gather are half a ring; a broadcast is a chain.

The hops and p are those of NCCL's tuning tables (`src/graph/tuning.cc`); the latencies of a
tree, a chain inside each host, are those of large messages there (2.7). The device and the card handle all bytes, and
no core does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dure.core.collective_cost import HEADER, Cost, chunk_bytes, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from dure.core.collective_cost import Path as FreePath

ROUNDS = 1.9
"""p: a ring over several hosts waits so many times for each hop."""

TREE_RATE = 0.9
"""Share of the bandwidth that a tree has."""

TREE_INSIDE, TREE_ACROSS = 28e-6, 50e-6
"""Least seconds of a hop of a tree in one direction: along the chain inside a host, and between hosts."""

_FREE = FreePath(0.0, 0.0, 1.0)  # for the bytes of a ring; its seconds are not used


class LinkLevel(NamedTuple):
    """The links of a level: bytes per second of a ring over it, and seconds of a hop."""

    bandwidth: float
    hop: float


class LeveledCost(NamedTuple):
    """A `Cost` with the bytes of `sent` and `received` that stay within a host."""

    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]
    local: tuple[int, ...]
    local_received: tuple[int, ...]


@dataclass(frozen=True)
class Levels:
    """The ranks of a collective on their hosts. `hosts` has the host of each rank, `start` the seconds of a start.

    `latencies`: of the ways between racks or sites that a ring of the hosts takes, in seconds.
    """

    hosts: Sequence[int]
    start: float
    inside: LinkLevel
    across: LinkLevel
    latencies: tuple[float, ...] = ()

    @cached_property
    def sizes(self) -> Counter[int]:
        """The number of ranks on each host."""
        return Counter(self.hosts)

    @property
    def count(self) -> int:
        """The number of hosts."""
        return len(self.sizes)

    @property
    def most(self) -> int:
        """The ranks of the host with the most."""
        return max(self.sizes.values())

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a ring over all ranks."""
        rates = [self.across.bandwidth] * (self.count > 1) + [self.inside.bandwidth] * (self.most > 1)
        return min(rates)

    @property
    def hops(self) -> float:
        """Seconds of the hops of half a ring over all ranks."""
        within, between = len(self.hosts) - self.count, self.count - 1
        rounds = ROUNDS if between else 1.0
        return rounds * (within * self.inside.hop + between * self.across.hop) + sum(self.latencies)


def ring(nbytes: int, levels: Levels) -> float:
    """Seconds of an all-reduce of `nbytes` by a ring over all ranks."""
    ranks = len(levels.hosts)
    return levels.start + 2 * levels.hops + 2 * (ranks - 1) / ranks * nbytes / levels.bandwidth


def tree(nbytes: int, levels: Levels) -> float:
    """Seconds of an all-reduce of `nbytes` by a pair of trees."""
    inside, across = max(TREE_INSIDE, levels.inside.hop), max(TREE_ACROSS, levels.across.hop)
    hops = (levels.most - 1) * inside + (levels.count.bit_length() - 1) * across
    moved = 2 * nbytes / (TREE_RATE * levels.bandwidth) + 2 * max(levels.latencies, default=0.0)
    return levels.start + 2 * hops + moved


def two_level(nbytes: int, levels: Levels) -> float:
    """Seconds of an all-reduce of `nbytes` in hosts, over the cards, and in hosts."""
    g, h, (inside, hop_in), (across, hop_out) = levels.most, levels.count, levels.inside, levels.across
    within = 2 * (g - 1) * hop_in + 2 * (g - 1) / g * nbytes / inside
    hops = (h - 1) * hop_out + sum(levels.latencies)
    return levels.start + within + 2 * hops + 2 * (h - 1) / h * nbytes / across


def fastest(nbytes: int, levels: Levels) -> float:
    """Seconds of an all-reduce of `nbytes` by a ring or a tree, whichever is faster."""
    return min(ring(nbytes, levels), tree(nbytes, levels))


ALL_REDUCES: dict[str, Callable[[int, Levels], float]] = {
    "engine": fastest,
    "ring": ring,
    "tree": tree,
    "hierarchical": two_level,
}
"""Seconds of an all-reduce by the name of its algorithm (`Collective.algorithm`)."""


def cost(kind: str, numel: int, levels: Levels, itemsize: int = 4, algorithm: str = "engine") -> LeveledCost:
    """Cost of a collective of `kind` (as in `collective_cost.COLLECTIVES`); `algorithm` is that of an all-reduce.

    `numel` is the elements of one rank's tensor. The bytes of each rank are those of a ring in the order of ranks, or
    of two levels; a tree's are taken as those of the ring.
    """
    ranks = len(levels.hosts)
    if ranks == 1:
        return LeveledCost(0.0, (0,), (0,), (0,), (0,), (0,))
    nbytes = numel * itemsize
    if kind == "all_reduce":
        seconds = ALL_REDUCES[algorithm](nbytes, levels)
        if algorithm == "hierarchical":
            return _two_level_bytes(seconds, numel, levels, itemsize)
        return _along_ring(ring_all_reduce(numel, ranks, _FREE, itemsize), seconds, levels)
    if kind == "reduce_scatter":
        seconds = levels.start + levels.hops + (ranks - 1) / ranks * nbytes / levels.bandwidth
        return _along_ring(ring_reduce_scatter(numel, ranks, _FREE, itemsize), seconds, levels)
    if kind == "all_gather":
        seconds = levels.start + levels.hops + (ranks - 1) * nbytes / levels.bandwidth
        return _along_ring(ring_all_gather(numel, ranks, _FREE, itemsize), seconds, levels)
    moved = nbytes if kind == "broadcast" else HEADER
    chain = Cost(0.0, (moved,) * (ranks - 1) + (0,), (0,) + (moved,) * (ranks - 1), (1,) * (ranks - 1) + (0,))
    return _along_ring(chain, levels.start + levels.hops + moved / levels.bandwidth, levels)


def _along_ring(found: Cost, seconds: float, levels: Levels) -> LeveledCost:
    """`found` with the seconds of the levels; what a rank sends to a rank of its own host is local."""
    hosts = levels.hosts
    local = tuple(sent * (hosts[i] == hosts[(i + 1) % len(hosts)]) for i, sent in enumerate(found.sent))
    return LeveledCost(seconds, found.sent, found.received, found.messages, local, local[-1:] + local[:-1])


def _two_level_bytes(seconds: float, numel: int, levels: Levels, itemsize: int) -> LeveledCost:
    """The bytes of each rank: chunks inside its host, and a ring of its chunk with the same rank of other hosts."""
    shards = min(levels.sizes.values())
    seen: Counter[int] = Counter()
    sent, local, messages = [], [], []
    places = []
    for host in levels.hosts:
        places.append((host, seen[host]))
        seen[host] += 1
    order = {host: number for number, host in enumerate(levels.sizes)}
    chunks = chunk_bytes(numel, shards, itemsize)
    for host, place in places:
        g = levels.sizes[host]
        inner = chunk_bytes(numel, g, itemsize)
        within = 2 * sum(inner) - inner[place] - inner[(place + 1) % g] if g > 1 else 0
        across, rounds = 0, 0
        if place < shards and levels.count > 1:
            over = ring_all_reduce(chunks[place] // itemsize, levels.count, _FREE, itemsize)
            across, rounds = over.sent[order[host]], 2 * (levels.count - 1)
        sent.append(within + across)
        local.append(within)
        messages.append(2 * (g - 1) + rounds)
    return LeveledCost(seconds, tuple(sent), tuple(sent), tuple(messages), tuple(local), tuple(local))
