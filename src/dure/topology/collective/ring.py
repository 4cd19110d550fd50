"""All-reduce around a ring: every rank sends as little as is possible, in as many rounds as there are ranks, twice.

Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.

    cut the vector into K chunks
    K - 1 rounds    send chunk i - r to the right, add what comes from the left to chunk i - r - 1
    K - 1 rounds    send chunk i + 1 - r, which is complete, to the right; what comes from the left is complete too

A chunk is summed along the ring in one order, and copied from there: all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.ranges import Range, equal_ranges

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation
    from dure.topology.collective.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Ring:
    """The ranks of `line`, each with the next one on its right, the last with the first."""

    line: Ranks

    async def all_reduce(self, whole: torch.Tensor) -> None:
        cuts = equal_ranges(whole.numel(), len(self.line))
        parts = [whole.new_empty(len(range(*cuts[self._chunk(-r - 1)]))) for r in range(len(cuts) - 1)]
        coming = [self._recv(part) for part in parts]
        complete = [self._recv(_cut(whole, cuts[self._chunk(-r)])) for r in range(len(cuts) - 1)]
        await self._add_up(whole, cuts, parts, coming, first=0)
        await self._pass_on(whole, cuts, complete, first=1)

    async def reduce_scatter(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the sum; `whole` is left with parts of it."""
        cuts = equal_ranges(whole.numel(), len(self.line))
        parts = [whole.new_empty(len(range(*cuts[self._chunk(-r - 2)]))) for r in range(len(cuts) - 1)]
        coming = [self._recv(part) for part in parts]
        await self._add_up(whole, cuts, parts, coming, first=-1)
        return _cut(whole, cuts[self.line.here])

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Have everybody's `cuts[place]` of `whole` at every rank."""
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
