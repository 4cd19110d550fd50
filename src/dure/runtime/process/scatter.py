"""Reduce-scatter and all-gather between processes, of parts of unequal sizes.

A reduce-scatter is an all-to-all with a sum in rank order, as in virtual time, and an all-gather a broadcast of each
part. Gloo's own reduce-scatter sends as many bytes as an all-reduce, and its all-gather copies each part. Gloo's works
of messages between two ranks cannot be asked whether they have ended. On a device, the all-gather of its backend, such
as NCCL, gathers parts of one size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from dure.core.shards import SLICES_AT_ONCE
from dure.core.vectors import Range, equal_ranges


class Scatter:
    """A reduce-scatter of `whole` that has begun: the parts of `size` ranks are those of `equal_ranges`.

    `whole` may be changed once `works` have ended.
    """

    def __init__(self, engine: dist.ProcessGroup | None, place: int, size: int, whole: torch.Tensor) -> None:
        sizes = [stop - start for start, stop in equal_ranges(whole.numel(), size)]
        own = sizes[place]
        self._parts = whole.new_empty(size * own)
        work = dist.all_to_all_single(self._parts, whole, [own] * size, sizes, group=engine, async_op=True)
        self.own = own
        """The elements of the own part."""
        self.works: list[Any] = [work]

    def sum_into(self, out: torch.Tensor) -> torch.Tensor:
        """Write the own part of the sum to `out`, once the works have ended, and return it."""
        out.copy_(self._parts[: self.own])
        for start in range(self.own, self._parts.numel(), max(self.own, 1)):
            out += self._parts[start : start + self.own]
        return out


class Scatters:
    """The reduce-scatters of a gradient's slices, from the last slice to the first.

    The sums fill `own`, in the order of the flat gradient. `wait` waits for an operation of the engine.
    """

    def __init__(
        self, scatter: Callable[[torch.Tensor], Scatter], wait: Callable[[Any], None], own: torch.Tensor
    ) -> None:
        self._scatter = scatter
        self._wait = wait
        self._under_way: deque[Scatter] = deque()
        self._own = own
        self._start = own.numel()

    def begin(self, part: torch.Tensor) -> None:
        """Begin with a slice. Waits for an earlier one where too many are under way."""
        while len(self._under_way) >= SLICES_AT_ONCE:
            self._end_first()
        self._under_way.append(self._scatter(part))

    @property
    def works(self) -> list[Any]:
        """The operations of the engine that have not been waited for."""
        return [work for scatter in self._under_way for work in scatter.works]

    def parts(self) -> torch.Tensor:
        """The own part of the whole gradient, once the works have ended: `own`."""
        while self._under_way:
            self._end_first()
        return self._own

    def _end_first(self) -> None:
        scatter = self._under_way.popleft()
        for work in scatter.works:
            self._wait(work)
        self._start -= scatter.own
        scatter.sum_into(self._own[self._start : self._start + scatter.own])


def gathering(
    engine: dist.ProcessGroup | None, place: int, whole: torch.Tensor, held: Sequence[Sequence[Range]]
) -> list[Any]:
    """Begin to gather `whole` in place: the rank at each place has its `held[place]`. Returns the engine's works."""
    works = []
    parts = [[whole[start:stop] for start, stop in ranges] for ranges in held]
    for unit in zip_longest(*parts, fillvalue=whole[:0]):  # a rank may have nothing of a small unit
        if whole.device.type != "cpu" and len({part.numel() for part in unit}) == 1:
            works.append(dist.all_gather(list(unit), unit[place].clone(), group=engine, async_op=True))
            continue
        for there, part in enumerate(unit):
            if part.numel():
                works.append(dist.broadcast(part, group=engine, group_src=there, async_op=True))
    return works
