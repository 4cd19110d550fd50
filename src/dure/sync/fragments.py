"""Fragments of a model, each averaged at its own time in a block of steps: Streaming DiLoCo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from dure.core.node import Ghost


@dataclass(frozen=True, slots=True)
class Fragments:
    """The times and the places of `count` fragments in blocks of `period` steps.

    The mean of a fragment is taken in `overlap` steps after the fragment was sent.

    >>> two = Fragments(2, period=6, overlap=1)
    >>> [(clock, two.sent_at(clock)) for clock in range(1, 7) if two.sent_at(clock)]
    [(3, [0]), (6, [1])]
    >>> two.under_way(3), two.under_way(4), two.unsent(4)
    ([(3, 0)], [], [0, 1])
    """

    count: int
    period: int
    overlap: int

    def cuts(self, numel: int) -> list[slice]:
        """Return the range of each fragment in a flat vector."""
        return [slice(i * numel // self.count, (i + 1) * numel // self.count) for i in range(self.count)]

    def last_sent(self, number: int, clock: int) -> int:
        """Return the last clock, up to `clock`, at which a fragment was sent; 0 or less before the first time."""
        offset = (number + 1) * self.period // self.count
        return clock - (clock - offset) % self.period

    def sent_at(self, clock: int) -> list[int]:
        """Return the numbers of the fragments that are sent at `clock`."""
        return [number for number in range(self.count) if self.last_sent(number, clock) == clock]

    def unsent(self, clock: int) -> list[int]:
        """Return the numbers of the fragments that are not sent at `clock`."""
        return [number for number in range(self.count) if self.last_sent(number, clock) != clock]

    def under_way(self, clock: int) -> list[tuple[int, int]]:
        """Return the fragments whose means are not yet taken in at `clock`: when each was sent, and its number."""
        times = ((self.last_sent(number, clock), number) for number in range(self.count))
        return sorted((sent, number) for sent, number in times if 0 < sent <= clock < sent + self.overlap)


def part(values: torch.Tensor, cut: slice) -> torch.Tensor:
    """Return a fragment of a vector, or of the placeholder for one where only time counts."""
    if isinstance(values, Ghost):
        return cast(torch.Tensor, Ghost(cut.stop - cut.start, values.nbytes // max(values.numel(), 1)))
    return values[cut]
