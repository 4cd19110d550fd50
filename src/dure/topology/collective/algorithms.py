"""Algorithms of collectives, written from messages between the ranks of a line.

    algorithm          all_reduce                     all_gather              class
    ring               chunks around a ring, twice    around the ring         `Ring`
    tree               up a tree, and down            up, and down            `Tree`
    halving-doubling   by halves with ranks far away  doubling (Bruck)        `HalvingDoubling`
    hierarchical       tree, ring of hosts, tree      tree, ring, tree        `Hierarchical`
    torus              rings in hosts and across      rings across and in     `Torus`
    all-to-all         all vectors to all ranks       all to all              `AllToAll`

Their costs: `docs/choosing/topologies/collective.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from dure.core.vectors import Range, equal_ranges

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation
    from dure.topology.collective.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Ring:
    """All-reduce around a ring: each of K ranks sends the least possible number of bytes, in 2 (K - 1) rounds.

    In `line` each rank has the next one on its right, and the last one has the first.

    Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.

        cut the vector into K chunks
        K - 1 rounds    send chunk i - r to the right, add what comes from the left to chunk i - r - 1
        K - 1 rounds    send chunk i + 1 - r, which is complete, to the right; what comes from the left is complete too

    A chunk is summed along the ring in one order, and copied from there: all ranks end with the same bits.
    """

    line: Ranks

    async def all_reduce(self, whole: torch.Tensor) -> None:
        cuts = equal_ranges(whole.numel(), len(self.line))
        parts = [whole.new_empty(len(range(*cuts[self._chunk(-r - 1)]))) for r in range(len(cuts) - 1)]
        coming = [self._recv(part) for part in parts]
        complete = [self._recv(_cut(whole, cuts[self._chunk(-r)])) for r in range(len(cuts) - 1)]
        await self._add_up(whole, cuts, parts, coming, first=0)
        await self._pass_on(whole, cuts, complete, first=1)

    async def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the sum; the rest of `whole` holds partial sums afterwards."""
        cuts = equal_ranges(whole.numel(), len(self.line))
        parts = [whole.new_empty(len(range(*cuts[self._chunk(-r - 2)]))) for r in range(len(cuts) - 1)]
        coming = [self._recv(part) for part in parts]
        await self._add_up(whole, cuts, parts, coming, first=-1)
        return _cut(whole, cuts[self.line.here])

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: the rank at each place has its `cuts[place]`."""
        coming = [self._recv(_cut(whole, cuts[self._chunk(-r - 1)])) for r in range(len(cuts) - 1)]
        await self._pass_on(whole, cuts, coming, first=0)

    async def _add_up(
        self,
        whole: torch.Tensor,
        cuts: Sequence[Range],
        parts: Sequence[torch.Tensor],
        coming: Sequence[Operation[torch.Tensor]],
        *,
        first: int,
    ) -> None:
        """Round r sends chunk i + first - r, and adds `parts[r]` to the one before it."""
        for r, (part, asked) in enumerate(zip(parts, coming, strict=True)):
            sent = self._send(_cut(whole, cuts[self._chunk(first - r)]))
            await self.line.end(asked, self._chunk(-1))
            await self.line.add(_cut(whole, cuts[self._chunk(first - r - 1)]), part)
            await self.line.end(sent, self._chunk(1))

    async def _pass_on(
        self, whole: torch.Tensor, cuts: Sequence[Range], coming: Sequence[Operation[torch.Tensor]], *, first: int
    ) -> None:
        """Round r sends chunk i + first - r, which came in the round before."""
        for r, asked in enumerate(coming):
            sent = self._send(_cut(whole, cuts[self._chunk(first - r)]))
            await self.line.end(asked, self._chunk(-1))
            await self.line.end(sent, self._chunk(1))

    def _chunk(self, offset: int) -> int:
        """The place, or the chunk, so far to the right of this rank's."""
        return (self.line.here + offset) % len(self.line)

    def _send(self, part: torch.Tensor) -> Operation[None]:
        return self.line.send(self._chunk(1), part)

    def _recv(self, into: torch.Tensor) -> Operation[torch.Tensor]:
        return self.line.recv(self._chunk(-1), into)


def _cut(whole: torch.Tensor, cut: Range) -> torch.Tensor:
    return whole[cut[0] : cut[1]]


AHEAD = 2
"""Children from which a rank receives at one time. Each takes a buffer as large as the whole vector."""


class Subtree(NamedTuple):
    """The ranks from `root`, which is the first of them, to `stop`."""

    root: int
    stop: int


def place_of(here: int, size: int) -> tuple[int | None, list[Subtree]]:
    """The parent of `here` in a tree of `size` ranks, and its children's subtrees, the largest first.

    >>> place_of(4, 8)
    (0, [Subtree(root=6, stop=8), Subtree(root=5, stop=6)])
    """
    parent, children = None, []
    lo, hi = 0, size
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        if here < middle:
            if here == lo:
                children.append(Subtree(middle, hi))
            hi = middle
        else:
            if here == middle:
                parent = lo
            lo = middle
    return parent, children


@dataclass(frozen=True)
class Tree:
    r"""All-reduce up a tree and down again: few rounds, each with the whole vector.

    The ranks of `line`, the first of them at the root.

    Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (binomial
    trees).

        a tree of ranks lo .. hi - 1 has its root at lo: it is that of the left half, with that of the right as a child

                0                     up      a rank adds its children's sums, the smallest first, then sends to its
              / | \                            parent
             1  2  4                   down    a rank receives from its parent, then sends to its children, the largest
                |  | \                         first
                3  5  6                8 ranks, 3 rounds up and 3 down
                      |
                      7

    With halves that differ by one, no two children of a rank are ready in the same round, however many ranks there are:
    a parent's network card receives one after the other. The sum is made at the root, and copied: all ranks end with
    the same bits.
    """

    line: Ranks

    @cached_property
    def parent(self) -> int | None:
        return place_of(self.line.here, len(self.line))[0]

    @cached_property
    def children(self) -> list[Subtree]:
        return place_of(self.line.here, len(self.line))[1]

    async def all_reduce(self, whole: torch.Tensor) -> None:
        coming = self.ask_for(whole)
        await self.reduce(whole)
        await self.broadcast(whole, coming)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: the rank at each place has its `cuts[place]`."""
        coming = self.ask_for(whole)
        await self.gather(whole, cuts)
        await self.broadcast(whole, coming)

    async def reduce(self, whole: torch.Tensor) -> None:
        """Reduce to the root; at each other rank `whole` then holds the sum of its subtree."""
        line, rising = self.line, self.children[::-1]
        parts = [whole.new_empty(whole.numel()) for _ in rising[:AHEAD]]
        coming = [line.recv(child.root, part) for child, part in zip(rising, parts, strict=False)]
        for k, child in enumerate(rising):
            part = parts[k % AHEAD]
            await line.end(coming[k], child.root)
            await line.add(whole, part)
            if k + AHEAD < len(rising):
                coming.append(line.recv(rising[k + AHEAD].root, part))
        if self.parent is not None:
            await line.end(line.send(self.parent, whole), self.parent)

    async def gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather the parts of all ranks at the root; each other rank then has those of its subtree."""
        line = self.line
        coming = [(child.root, line.recv(child.root, _of(child, whole, cuts))) for child in self.children[::-1]]
        for child, asked in coming:
            await line.end(asked, child)
        if self.parent is not None:
            stop = self.children[0].stop if self.children else line.here + 1
            await line.end(line.send(self.parent, _of(Subtree(line.here, stop), whole, cuts)), self.parent)

    def ask_for(self, whole: torch.Tensor) -> Operation[torch.Tensor] | None:
        """Ask ahead for the vector of `broadcast`. `whole` may still be sent up: the parent sends down after that."""
        return None if self.parent is None else self.line.recv(self.parent, whole)

    async def broadcast(self, whole: torch.Tensor, coming: Operation[torch.Tensor] | None) -> None:
        """Copy the root's `whole` to every rank; `coming` is the operation that `ask_for` has returned."""
        if coming is not None and self.parent is not None:
            await self.line.end(coming, self.parent)
        for child in self.children:
            await self.line.end(self.line.send(child.root, whole), child.root)


def _of(tree: Subtree, whole: torch.Tensor, cuts: Sequence[Range]) -> torch.Tensor:
    return whole[cuts[tree.root][0] : cuts[tree.stop - 1][1]]


@dataclass(frozen=True)
class HalvingDoubling:
    """All-reduce by halves: a rank sends as few bytes as around a ring, in 2 log2 K rounds.

    The ranks of `line`; rank P + e is the extra of rank e.

    Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004; for all_gather, Bruck et al., "Efficient
    Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS 1997.

        halving     with the rank P/2 away, then P/4, ... 1: keep one half of what you have, give the other, add
        doubling    with the rank 1 away, then 2, ... P/2: exchange what is complete

                                            P = 4, chunks a b c d
        rank 0   abcd -> ab.. -> a...    -> ab..  -> abcd
        rank 1   abcd -> ab.. -> .b..    -> ab..  -> abcd
        rank 2   abcd -> ..cd -> ..c.    -> ..cd  -> abcd
        rank 3   abcd -> ..cd -> ...d    -> ..cd  -> abcd

    P is the largest power of two within K. Each of the other K - P ranks folds into one of the first P: it gives its
    whole vector before, and gets the sum afterwards. A chunk is summed at one rank, and copied: all end with the same
    bits.
    """

    line: Ranks

    @cached_property
    def power(self) -> int:
        return 1 << (len(self.line).bit_length() - 1)

    async def all_reduce(self, whole: torch.Tensor) -> None:
        line, here, power = self.line, self.line.here, self.power
        if here >= power:
            coming = line.recv(here - power, whole)
            await line.end(line.send(here - power, whole), here - power)
            await line.end(coming, here - power)
            return
        extra = here + power if here + power < len(line) else None
        if extra is not None:
            part = whole.new_empty(whole.numel())
            await line.end(line.recv(extra, part), extra)
            await line.add(whole, part)
        await self._halve_and_double(whole)
        if extra is not None:
            await line.end(line.send(extra, whole), extra)

    async def _halve_and_double(self, whole: torch.Tensor) -> None:
        """All-reduce among the first P ranks."""
        line = self.line
        rounds = self._rounds(whole)
        asking = [partial(line.recv, partner, part) for partner, _, part, _ in rounds]
        # All begin at the same time, and ask ahead. With extras, ranks that have received one begin later: messages of
        # the others for later rounds, if asked for ahead, would share the links with those of the present round.
        coming = [ask() for ask in asking] if self.power == len(line) else []
        for r, (partner, give, part, keep) in enumerate(rounds):
            asked = coming[r] if coming else asking[r]()
            sent = line.send(partner, give)
            await line.end(asked, partner)
            if keep is not None:
                await line.add(keep, part)
            await line.end(sent, partner)

    def _rounds(self, whole: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Each round: its partner, the part to send, memory for the partner's part, and the part to add that to."""
        here, chunks = self.line.here, equal_ranges(whole.numel(), self.power)

        def those(first: int, count: int) -> torch.Tensor:
            return whole[chunks[first][0] : chunks[first + count - 1][1]]

        halving, doubling = [], []
        distance = self.power // 2
        while distance:
            partner = here ^ distance
            mine, theirs = (those(each & -distance, distance) for each in (here, partner))
            halving.append((partner, theirs, whole.new_empty(mine.numel()), mine))
            doubling.append((partner, mine, theirs, None))
            distance //= 2
        return [*halving, *reversed(doubling)]

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: the rank at each place has its `cuts[place]`, all of one size.

        Round r sends the parts that this rank has, at most 2^r, to the rank 2^r to the left, and receives as many from
        the right: `turned` has the own part first, then those of the ranks to the right.
        """
        line, here, size = self.line, self.line.here, len(self.line)
        numel = len(range(*cuts[here]))
        turned = whole.new_empty(whole.numel())
        turned[:numel].copy_(whole[cuts[here][0] : cuts[here][1]])
        steps = [1 << r for r in range((size - 1).bit_length())]
        coming = [line.recv((here + step) % size, turned[step * numel : min(2 * step, size) * numel]) for step in steps]
        for step, asked in zip(steps, coming, strict=True):
            sent = line.send((here - step) % size, turned[: (min(2 * step, size) - step) * numel])
            await line.end(asked, (here + step) % size)
            await line.end(sent, (here - step) % size)
        behind = here * numel
        whole[behind:].copy_(turned[: whole.numel() - behind])
        whole[:behind].copy_(turned[whole.numel() - behind :])


def hosts_of(machines: Sequence[int]) -> list[range]:
    """The hosts of a line whose ranks are on `machines`: ranks in a row that share a machine are on one host.

    >>> hosts_of([0, 0, 1, 1, 1])
    [range(0, 2), range(2, 5)]
    """
    groups = [list(group) for _, group in groupby(range(len(machines)), key=machines.__getitem__)]
    return [range(group[0], group[-1] + 1) for group in groups]


@dataclass(frozen=True)
class Hierarchical:
    """All-reduce in two levels: a tree within each host, a ring among the hosts.

    The ranks of `line`, which are on `hosts`: a range of places in the line for each host, in order.

    Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018 (hierarchical all-reduce).

        host 0: 0 <- 1      1. the ranks of a host reduce to its first, the leader
        host 1: 2 <- 3      2. the leaders all-reduce around a ring
        host 2: 4           3. each leader broadcasts to its host

    Only the leader of a host exchanges messages with other hosts, and the ring has one rank per host.
    """

    line: Ranks
    hosts: Sequence[range]

    @cached_property
    def host(self) -> range:
        return self._of(self.line.here)

    def _of(self, place: int) -> range:
        """The host of the rank at `place`."""
        return next(host for host in self.hosts if place in host)

    @cached_property
    def within(self) -> Tree:
        return Tree(self.line.among(self.host))

    @cached_property
    def leaders(self) -> Ring | None:
        """The ring of the leaders; None at other ranks."""
        leads = self.line.here == self.host[0]
        return Ring(self.line.among([host[0] for host in self.hosts])) if leads else None

    async def all_reduce(self, whole: torch.Tensor) -> None:
        coming = self.within.ask_for(whole)
        await self.within.reduce(whole)
        if self.leaders is not None:
            await self.leaders.all_reduce(whole)
        await self.within.broadcast(whole, coming)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: the rank at each place has its `cuts[place]`."""
        coming = self.within.ask_for(whole)
        await self.within.gather(whole, [cuts[place] for place in self.host])
        if self.leaders is not None:
            await self.leaders.all_gather(whole, [(cuts[host[0]][0], cuts[host[-1]][1]) for host in self.hosts])
        await self.within.broadcast(whole, coming)

    async def broadcast(self, whole: torch.Tensor, root: int) -> None:
        """Copy the `whole` of the rank at `root` to one rank of each host, and from it to the others there."""
        above = self.hosts.index(self._of(root))
        hosts = [*self.hosts[above:], *self.hosts[:above]]
        heads = [root, *(host[0] for host in hosts[1:])]
        head = root if root in self.host else self.host[0]
        within = Tree(self.line.among([head, *(place for place in self.host if place != head)]))
        coming = within.ask_for(whole)
        if self.line.here == head:
            between = Tree(self.line.among(heads))
            await between.broadcast(whole, between.ask_for(whole))
        await within.broadcast(whole, coming)


@dataclass(frozen=True)
class Torus:
    """All-reduce in two levels, all ranks at work in both: rings within hosts, and rings across them.

    The ranks of `line`, `per_host` in a row on each host.

    Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018 (2D-torus all-reduce).

        host 0:  0 - 1      1. the ranks of a host reduce-scatter: the one at place i has the host's sum of chunk i
                 |   |      2. the ranks at place i of all hosts all-reduce chunk i: rings 0 - 2 and 1 - 3
        host 1:  2 - 3      3. the ranks of a host all-gather the chunks

    The rings of step 2 share the hosts' cards, over which as many bytes go as in a ring of one rank per host. Within a
    host a rank sends 2 (m - 1) / m of the vector, for m ranks on each host.
    """

    line: Ranks
    per_host: int

    @cached_property
    def within(self) -> Ring:
        """The ring of this host."""
        first = self.line.here - self._place
        return Ring(self.line.among(range(first, first + self.per_host)))

    @cached_property
    def across(self) -> Ring:
        """The ring of the ranks at this place of all hosts."""
        return Ring(self.line.among(range(self._place, len(self.line), self.per_host)))

    @property
    def _place(self) -> int:
        return self.line.here % self.per_host

    async def all_reduce(self, whole: torch.Tensor) -> None:
        chunk = await self.within.reduce_scatter(whole)
        await self.across.all_reduce(chunk)
        await self.within.all_gather(whole, equal_ranges(whole.numel(), self.per_host))

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: first the `cuts` of this place at all hosts, then the others in the host."""
        await self.across.all_gather(whole, cuts[self._place :: self.per_host])
        for first in range(0, len(self.line), self.per_host):
            await self.within.all_gather(whole, cuts[first : first + self.per_host])


@dataclass(frozen=True, slots=True)
class AllToAll:
    """All-reduce by an exchange of all with all: one round, in which every rank sends its whole vector to all others.

    The ranks of `line`, each with all others.

    It is the exchange without an algorithm, for comparison: each rank sends (K - 1) n bytes, a ring sends 2 (K - 1) / K
    n, and each holds K vectors at once. Vectors are added in the order of the ranks, so that all ranks end with the
    same bits.
    """

    line: Ranks

    async def all_reduce(self, whole: torch.Tensor) -> None:
        own = whole.clone()  # it is added in its turn, when `whole` holds the sum of the ranks before
        vectors = [own if place == self.line.here else whole.new_empty(whole.numel()) for place in self._places()]
        await self._exchange(own, vectors)
        whole.copy_(vectors[0])
        for vector in vectors[1:]:
            await self.line.add(whole, vector)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Gather `whole` at every rank: the rank at each place has its `cuts[place]`."""
        parts = [whole[start:stop] for start, stop in cuts]
        await self._exchange(parts[self.line.here], parts)

    async def _exchange(self, own: torch.Tensor, vectors: Sequence[torch.Tensor]) -> None:
        """Send `own` to all others, and receive theirs into `vectors`."""
        line = self.line
        others = [place for place in self._places() if place != line.here]
        coming = [line.recv(place, vectors[place]) for place in others]
        sent = [line.send(place, own) for place in others]
        for place, received, given in zip(others, coming, sent, strict=True):
            await line.end(received, place)
            await line.end(given, place)

    def _places(self) -> range:
        return range(len(self.line))
