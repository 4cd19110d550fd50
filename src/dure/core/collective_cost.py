"""Cost of the engine's collectives in virtual time: closed forms of its algorithms instead of simulated messages.

    kind            algorithm             rounds           bytes that a rank sends (n elements of b bytes, K ranks)
    all_reduce      ring                  2 (K - 1)        2 (K - 1) / K n b
    reduce_scatter  ring                  K - 1            (K - 1) / K n b
    all_gather      ring                  K - 1            (K - 1) n b, where n is the elements of one rank
    broadcast       binomial tree         ceil(log2 K)     n b to each child; the root sends ceil(log2 K) n b
    barrier         dissemination         ceil(log2 K)     a header per round

The ring cuts a tensor into K chunks whose sizes differ by at most one element, the larger chunks first. A round lasts
as long as its largest message on the slowest link: latency + alpha + bytes * (beta + 1 / bandwidth), plus gamma for
each byte where the round adds. If several ranks are on one machine (`HostedRanks`), the messages of a round that leave
the machine share its card, and so do those that enter it; messages between its ranks take the link inside the machine.
All ranks are taken to begin a round together: that is exact for equal links, and an upper bound for others. Messages of
a round that take an uplink of a rack or a line between sites (`Transit`) share it as they share cards. Latencies then
differ much, so a rank of a ring sends a chunk on once it has it and its link is free, and waits for no other rank.
Chunks have no headers. A collective neither slows other traffic on the same network cards nor is slowed by it.
Collectives that algorithms build from sends are simulated messages instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

HEADER = 64
"""Bytes of a message's header, unless the cluster says otherwise."""

SMALL = 4096
"""Bytes with header up to which a message neither queues nor costs `beta`, unless the cluster says otherwise."""


class Shift(NamedTuple):
    """A round of a collective of K ranks: each rank i < `senders` sends to rank i + `distance`, modulo K."""

    senders: int
    distance: int = 1

    def hops(self, ranks: int) -> Iterable[tuple[int, int]]:
        """The sender and the receiver of each message among `ranks` ranks."""
        return ((i, (i + self.distance) % ranks) for i in range(self.senders))


class Paths(Protocol):
    """Costs of the rounds of a collective."""

    @property
    def header(self) -> int: ...

    def shift_seconds(self, shift: Shift, nbytes: int, *, adds: bool = False) -> float:
        """Seconds of a round whose messages have `nbytes`; `adds`: receivers add the bytes up."""
        ...

    def ring_seconds(self, ranks: int, nbytes: int, halves: Sequence[bool]) -> float:
        """Seconds of `ranks` - 1 rounds of a ring for each of `halves`; True: receivers add the bytes up."""
        ...


class Path(NamedTuple):
    """Costs of a message between neighbors. As `Paths`: all rounds are alike.

    Seconds: `latency`, and `alpha` per message. Bytes per second: `bandwidth`. Seconds per byte: `beta` for sending,
    `gamma` for adding. Bytes: `header`.
    """

    latency: float
    alpha: float
    bandwidth: float
    beta: float = 0.0
    gamma: float = 0.0
    header: int = HEADER

    def seconds(self, nbytes: int, *, adds: bool = False) -> float:
        """Seconds of a message of `nbytes` in a collective of the engine; `adds`: the receiver adds the bytes up."""
        per_byte = self.beta + 1.0 / self.bandwidth + (self.gamma if adds else 0.0)
        return self.latency + self.alpha + nbytes * per_byte

    def shift_seconds(self, _shift: Shift, nbytes: int, *, adds: bool = False) -> float:
        return self.seconds(nbytes, adds=adds)

    def ring_seconds(self, ranks: int, nbytes: int, halves: Sequence[bool]) -> float:
        return (ranks - 1) * sum(self.seconds(nbytes, adds=adds) for adds in halves)


@dataclass(frozen=True, slots=True, eq=False)
class SharedLink:
    """One direction of a link of several `machines`, which send into it; those of a downlink receive from it.

    `bandwidth` is in bytes per second.
    """

    kind: Literal["uplink", "line", "downlink"]
    bandwidth: float
    machines: range


class Transit(NamedTuple):
    """The way of a message beside the cards of its ends: shared `links`, and seconds of `latency`."""

    links: tuple[SharedLink, ...]
    latency: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a message alone."""
        return min((link.bandwidth for link in self.links), default=math.inf)


@dataclass(frozen=True)
class HostedRanks:
    """Costs of the rounds of ranks of which several are on one machine, or behind shared links.

    `machines` has the machine of each rank; `cards` and `inside` have the path over the card of each machine and the
    path between two ranks there. `transit` gives the way between two machines beside their cards; None: none shares a
    link.
    """

    machines: Sequence[int]
    cards: Mapping[int, Path]
    inside: Mapping[int, Path]
    transit: Callable[[int, int], Transit | None] | None = None

    @property
    def header(self) -> int:
        return self.cards[self.machines[0]].header

    def shift_seconds(self, shift: Shift, nbytes: int, *, adds: bool = False) -> float:
        return max(path.seconds(nbytes, adds=adds) for path in self.paths(shift))

    def ring_seconds(self, ranks: int, nbytes: int, halves: Sequence[bool]) -> float:
        ring = Shift(ranks)
        if self.transit is None:
            return (ranks - 1) * sum(self.shift_seconds(ring, nbytes, adds=adds) for adds in halves)
        found = self._paths(ring)
        paths = [found[hop] for hop in self._hops(ring)]
        busy = np.array([nbytes / path.bandwidth for path in paths])
        arrived, free = np.zeros(ranks), np.zeros(ranks)
        for adds in halves:
            message = np.array([path.seconds(nbytes, adds=adds) for path in paths])
            for _ in range(ranks - 1):
                begin = np.maximum(arrived, free)
                free = begin + busy
                arrived = np.roll(begin + message, 1)
        return float(arrived.max())

    def paths(self, shift: Shift) -> set[Path]:
        """The paths of the messages of a round. Those through one direction of a link share its bandwidth equally."""
        return set(self._paths(shift).values())

    def _hops(self, shift: Shift) -> list[tuple[int, int]]:
        """The machines at both ends of each message of a round."""
        return [(self.machines[i], self.machines[j]) for i, j in shift.hops(len(self.machines))]

    def _paths(self, shift: Shift) -> dict[tuple[int, int], Path]:
        """The path between the machines at both ends of each message of a round."""
        hops = Counter(self._hops(shift))
        leaving, entering, sharing = Counter[int](), Counter[int](), Counter[SharedLink]()
        for (here, there), count in hops.items():
            if here != there:
                leaving[here] += count
                entering[there] += count
                sharing.update(dict.fromkeys(self._transit(here, there).links, count))
        found = {}
        for here, there in hops:
            if here == there:
                found[here, there] = self.inside[here]
                continue
            out, into, way = self.cards[here], self.cards[there], self._transit(here, there)
            shares = (link.bandwidth / sharing[link] for link in way.links)
            bandwidth = min(out.bandwidth / leaving[here], into.bandwidth / entering[there], *shares)
            latency = max(out.latency, into.latency) + way.latency
            found[here, there] = out._replace(latency=latency, bandwidth=bandwidth)
        return found

    def _transit(self, here: int, there: int) -> Transit:
        """The way between two machines; without links within a rack."""
        return (self.transit and self.transit(here, there)) or Transit((), 0.0)


class Cost(NamedTuple):
    """Cost of one collective: its seconds, and the bytes and messages of each rank."""

    seconds: float
    sent: tuple[int, ...]
    received: tuple[int, ...]
    messages: tuple[int, ...]


def chunk_bytes(numel: int, ranks: int, itemsize: int = 4) -> tuple[int, ...]:
    """The sizes in bytes of the `ranks` chunks of a tensor of `numel` elements.

    >>> chunk_bytes(10, 4)
    (12, 12, 8, 8)
    """
    size, larger = divmod(numel, ranks)
    return tuple((size + (i < larger)) * itemsize for i in range(ranks))


def ring_all_reduce(numel: int, ranks: int, path: Paths, itemsize: int = 4) -> Cost:
    """All-reduce by a ring. In round r of the first half, rank i sends chunk i - r (modulo `ranks`).

    >>> ring_all_reduce(10, 4, Path(latency=0.5, alpha=0.0, bandwidth=12.0))
    Cost(seconds=9.0, sent=(60, 64, 60, 56), received=(56, 60, 64, 60), messages=(6, 6, 6, 6))
    """
    chunks = chunk_bytes(numel, ranks, itemsize)
    # Rank i sends all chunks but i + 1 in the first half, whose sum ends there, and all but i + 2 in the second half.
    rounds, twice = ranks - 1, 2 * sum(chunks)
    sent = tuple(twice - chunks[(i + 1) % ranks] - chunks[(i + 2) % ranks] for i in range(ranks))
    seconds = path.ring_seconds(ranks, chunks[0], (True, False))
    return Cost(seconds, sent, sent[-1:] + sent[:-1], (2 * rounds,) * ranks)


def ring_reduce_scatter(numel: int, ranks: int, path: Paths, itemsize: int = 4) -> Cost:
    """Reduce-scatter by a ring: rank i gets the sum of chunk i, and sends every other chunk once."""
    chunks = chunk_bytes(numel, ranks, itemsize)
    whole = sum(chunks)
    sent = tuple(whole - own for own in chunks)
    seconds = path.ring_seconds(ranks, chunks[0], (True,))
    return Cost(seconds, sent, sent[-1:] + sent[:-1], (ranks - 1,) * ranks)


def ring_all_gather(numel: int, ranks: int, path: Paths, itemsize: int = 4) -> Cost:
    """All-gather of `numel` elements from each rank by a ring: a rank sends on all tensors but its neighbor's."""
    rounds, nbytes = ranks - 1, numel * itemsize
    moved = (rounds * nbytes,) * ranks
    return Cost(path.ring_seconds(ranks, nbytes, (False,)), moved, moved, (rounds,) * ranks)


def tree_broadcast(numel: int, ranks: int, path: Paths, itemsize: int = 4) -> Cost:
    """Broadcast by a binomial tree. In round r, rank i < 2^r sends the tensor to rank i + 2^r."""
    nbytes, rounds = numel * itemsize, (ranks - 1).bit_length()
    messages = tuple(sum(i < 2**r and i + 2**r < ranks for r in range(rounds)) for i in range(ranks))
    received = tuple(nbytes * (i > 0) for i in range(ranks))
    tree = (Shift(min(2**r, ranks - 2**r), 2**r) for r in range(rounds))
    seconds = math.fsum(path.shift_seconds(shift, nbytes) for shift in tree)
    return Cost(seconds, tuple(nbytes * m for m in messages), received, messages)


def barrier(_numel: int, ranks: int, path: Paths, _itemsize: int = 4) -> Cost:
    """Dissemination barrier. In round r, each rank sends a header to the rank 2^r further."""
    rounds = (ranks - 1).bit_length()
    moved = (rounds * path.header,) * ranks
    seconds = math.fsum(path.shift_seconds(Shift(ranks, 2**r), path.header) for r in range(rounds))
    return Cost(seconds, moved, moved, (rounds,) * ranks)


COLLECTIVES: dict[str, Callable[[int, int, Paths, int], Cost]] = {
    "all_reduce": ring_all_reduce,
    "reduce_scatter": ring_reduce_scatter,
    "all_gather": ring_all_gather,
    "broadcast": tree_broadcast,
    "barrier": barrier,
}
