"""All-reduce in two storeys: a tree within each host, a ring among the hosts.

Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018 (hierarchical all-reduce).

    host 0: 0 <- 1      1. the ranks of a host reduce to its first, the leader
    host 1: 2 <- 3      2. the leaders all-reduce around a ring
    host 2: 4           3. each leader broadcasts to its host

One rank of each host talks to other hosts, and the ring is as long as there are hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from dure.core.ranges import Range
from dure.topology.collective.ring import Ring
from dure.topology.collective.tree import Tree

if TYPE_CHECKING:
    import torch

    from dure.topology.collective.ranks import Ranks


def hosts_of(machines: Sequence[int]) -> list[range]:
    """The hosts of a line whose ranks are on `machines`: ranks in a row that share a machine are on one host.

    >>> hosts_of([0, 0, 1, 1, 1])
    [range(0, 2), range(2, 5)]
    """
    groups = [list(group) for _, group in groupby(range(len(machines)), key=machines.__getitem__)]
    return [range(group[0], group[-1] + 1) for group in groups]


@dataclass(frozen=True)
class Hierarchical:
    """The ranks of `line`, which are on `hosts`: a range of places in the line for each host, in order."""

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
        """The ring, at those who are in it."""
        leads = self.line.here == self.host[0]
        return Ring(self.line.among([host[0] for host in self.hosts])) if leads else None

    async def all_reduce(self, whole: torch.Tensor) -> None:
        coming = self.within.ask_for(whole)
        await self.within.reduce(whole)
        if self.leaders is not None:
            await self.leaders.all_reduce(whole)
        await self.within.broadcast(whole, coming)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Have everybody's `cuts[place]` of `whole` at every rank."""
        coming = self.within.ask_for(whole)
        await self.within.gather(whole, [cuts[place] for place in self.host])
        if self.leaders is not None:
            await self.leaders.all_gather(whole, [(cuts[host[0]][0], cuts[host[-1]][1]) for host in self.hosts])
        await self.within.broadcast(whole, coming)

    async def broadcast(self, whole: torch.Tensor, root: int) -> None:
        """The `whole` of the rank at `root` at every rank: to one rank of each host, and by it to the others there."""
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
