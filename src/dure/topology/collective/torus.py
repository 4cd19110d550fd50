"""All-reduce in two levels, all ranks at work in both: rings within hosts, and rings across them.

Mikami et al., "Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash", 2018 (2D-torus all-reduce).

    host 0:  0 - 1      1. the ranks of a host reduce-scatter: the one at place i has the host's sum of chunk i
             |   |      2. the ranks at place i of all hosts all-reduce chunk i: rings 0 - 2 and 1 - 3
    host 1:  2 - 3      3. the ranks of a host all-gather the chunks

The rings of step 2 share the hosts' cards, over which as many bytes go as in a ring of one rank per host. Within a host
a rank sends 2 (m - 1) / m of the vector, for m ranks on each host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from dure.core.ranges import Range, equal_ranges
from dure.topology.collective.ring import Ring

if TYPE_CHECKING:
    import torch

    from dure.topology.collective.ranks import Ranks


@dataclass(frozen=True)
class Torus:
    """The ranks of `line`, `per_host` in a row on each host."""

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
        """Have everybody's `cuts[place]` of `whole` at every rank: those of this place, then each host's."""
        await self.across.all_gather(whole, cuts[self._place :: self.per_host])
        for first in range(0, len(self.line), self.per_host):
            await self.within.all_gather(whole, cuts[first : first + self.per_host])
