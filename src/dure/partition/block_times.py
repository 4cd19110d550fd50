"""Seconds of the blocks of a model: a call, whatever the number of samples, and each sample.

    seconds of a pass of n samples through a block  =  call + n * sample

A mini-batch that is cut into U micro-batches pays U calls. So small micro-batches are inefficient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class PassTime(NamedTuple):
    """Seconds of a forward or a backward through a block: of a call, and of each sample in it."""

    call: float
    sample: float


class BlockTimes(NamedTuple):
    """The seconds of each block's forward and backward."""

    forward: Sequence[PassTime]
    backward: Sequence[PassTime]


class PassShare(NamedTuple):
    """The share of a stage in the time of the model's pass: of calls, and of work that grows with the samples."""

    call: float
    work: float

    @property
    def total(self) -> float:
        """Both together."""
        return self.call + self.work

    def split(self, fraction: float) -> float:
        """The factor of a worker with this fraction of the work: it makes all calls."""
        return (self.call + self.work * fraction) / self.total if self.total else fraction


def share(times: Sequence[PassTime], blocks: Iterable[int], rows: int, batch: int) -> PassShare:
    """The share of a pass of `rows` samples through some `blocks` in a pass of `batch` samples through all.

    >>> share([PassTime(1.0, 0.5), PassTime(1.0, 1.0)], [0], rows=2, batch=4)
    PassShare(call=0.125, work=0.125)
    """
    own = [times[number] for number in blocks]
    whole = sum(each.call + batch * each.sample for each in times)
    return PassShare(sum(each.call for each in own) / whole, sum(rows * each.sample for each in own) / whole)
