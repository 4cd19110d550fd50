"""All-reduce by halves: as little is sent as around a ring, in 2 log2 K rounds.

Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004; for all_gather, Bruck et al., "Efficient
Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS 1997.

    halving     with the rank P/2 away, then P/4, ... 1: keep one half of what you have, give the other, add
    doubling    with the rank 1 away, then 2, ... P/2: exchange what is complete

                                        P = 4, chunks a b c d
    rank 0   abcd -> ab.. -> a...    -> ab..  -> abcd
    rank 1   abcd -> ab.. -> .b..    -> ab..  -> abcd
    rank 2   abcd -> ..cd -> ..c.    -> ..cd  -> abcd
    rank 3   abcd -> ..cd -> ...d    -> ..cd  -> abcd

P is the largest power of two within K. Each of the other K - P ranks folds into one of the first P: it gives its whole
vector before, and gets the sum afterwards. A chunk is summed at one rank, and copied: all end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from dure.core.ranges import Range, equal_ranges

if TYPE_CHECKING:
    import torch

    from dure.topology.collective.ranks import Ranks


@dataclass(frozen=True)
class HalvingDoubling:
    """The ranks of `line`; rank P + e is the extra of rank e."""

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
        """Among the first P. Where all come at the same time they ask ahead.

        Where some have taken in an extra before, who asked ahead would have the early ones crowd out those whose turn
        it is.
        """
        line = self.line
        rounds = self._rounds(whole)
        asking = [partial(line.recv, partner, part) for partner, _, part, _ in rounds]
        coming = [ask() for ask in asking] if self.power == len(line) else []
        for r, (partner, give, part, keep) in enumerate(rounds):
            asked = coming[r] if coming else asking[r]()
            sent = line.send(partner, give)
            await line.end(asked, partner)
            if keep is not None:
                await line.add(keep, part)
            await line.end(sent, partner)

    def _rounds(self, whole: torch.Tensor) -> list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Of each round: the partner, what to give it, where to take in its part, and what to add that to."""
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
        """Have everybody's `cuts[place]` of `whole`, all of one size, at every rank.

        Round r gives what is there, at most 2^r parts, to the rank 2^r to the left, and takes as much from the right:
        `turned` has the own part first, then those of the ranks to the right.
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
