"""Schedules of the period of model averaging: constant, decaying, by the loss (AdaComm), by seconds, or by epochs.

| schedule   | the next period                                                                            |
|------------|--------------------------------------------------------------------------------------------|
| `fixed`    | the last one                                                                               |
| `decay`    | `factor` times the last one, every `interval` steps                                        |
| `adaptive` | every `interval` steps: ceil(sqrt(F / F_0) times the first period), where F is the mean    |
|            | loss of the round and F_0 of the first; `factor` times the last one if that is less        |
| `overhead` | the least one at which averaging takes at most `overhead` of the time                      |
| `epoch`    | the steps of one pass of all workers over all samples                                      |

All workers compute the same period from the same figures, which travel with each average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dure.topology.replica import Stats


@dataclass(frozen=True, slots=True)
class Rounds:
    """The state of a schedule, equal at all workers. The last average was at clock `began`; `period` is the next one.

    `rounds` counts the averages so far, and `first` is the mean loss of the first round. `step` is the mean seconds of
    a step at the slowest worker, `sync` those of an average. Where rounds take equal time (`pace.EqualTime`), the next
    one takes `seconds`, in which a worker makes `steps` on average.
    """

    period: int
    began: int = 0
    rounds: int = 0
    first: float = 0.0
    step: float = 0.0
    sync: float = 0.0
    seconds: float = 0.0
    steps: float = 1.0

    @classmethod
    def of(cls, stats: Stats) -> Rounds:
        """The state that a worker sent with its figures."""
        period, began, rounds = (int(stats[name]) for name in ("period", "began", "rounds"))
        first, step, sync, seconds, steps = (stats[name] for name in ("first", "step", "sync", "seconds", "steps"))
        return cls(period, began, rounds, first, step, sync, seconds, steps)

    @property
    def plain(self) -> dict[str, float]:
        """The fields by name. `asdict` copies each deeply, which takes half the time of an average beside its mean."""
        return {name: getattr(self, name) for name in self.__slots__}

    def followed_by(self, sent: Sequence[Stats]) -> Rounds:
        """Return the state after a round in which workers `sent` their figures; the period is still the old one."""
        step, sync = (max(stats[name] for stats in sent) for name in ("round step", "last sync"))
        return replace(
            self,
            began=int(max(stats["clock"] for stats in sent)),
            rounds=self.rounds + 1,
            first=self.first if self.rounds else mean_loss(sent),
            step=self.step + (step - self.step) / (self.rounds + 1),
            sync=self.sync + (sync - self.sync) / max(self.rounds, 1),
        )


def mean_loss(sent: Sequence[Stats]) -> float:
    """Return the mean of the losses of all workers in a round."""
    return math.fsum(stats["round loss"] for stats in sent) / len(sent)


class Schedule(Protocol):
    """Gives the period of the next round. `measures`: from figures of all workers, not of one alone.

    `no_loop` is the reason why a loop of the user's cannot have it, `unstaged` why the stages of a pipeline cannot.
    """

    measures: ClassVar[bool] = False
    unstaged: ClassVar[str] = ""
    no_loop: ClassVar[str] = ""

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        """Return the period, given the state before and after a round, and the figures that workers `sent`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPeriod(Schedule):
    """A constant period."""

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        return last.period


@dataclass(frozen=True, slots=True)
class EpochPeriod(FixedPeriod):
    """The steps of an epoch, which the method's period is once the job is known (`base.OfEpochs`)."""

    no_loop: ClassVar[str] = "the loop alone knows its samples; write their steps as `period`"


@dataclass(frozen=True, slots=True)
class DecayingPeriod(Schedule):
    """`factor` times the last period at the first average at or after each multiple of `interval` steps."""

    factor: float
    interval: int

    def __post_init__(self) -> None:
        _check(self.factor, self.interval)

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        return shortened(last.period, self.factor) if _passed(self.interval, last, now) else last.period


@dataclass(frozen=True, slots=True)
class AdaptivePeriod(Schedule):
    """AdaComm: `start` times the root of the loss as a share of the first, every `interval` steps."""

    start: int
    factor: float
    interval: int

    measures: ClassVar[bool] = True
    unstaged: ClassVar[str] = "schedule=adaptive uses the loss, and only the last stage knows it"
    no_loop: ClassVar[str] = "the loss stays in the loop, and this method needs it"

    def __post_init__(self) -> None:
        _check(self.factor, self.interval)

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        if not _passed(self.interval, last, now):
            return last.period
        if now.first > 0:
            wanted = math.ceil(math.sqrt(mean_loss(sent) / now.first) * self.start)
            if wanted < last.period:
                return max(1, wanted)
        return shortened(last.period, self.factor)


@dataclass(frozen=True, slots=True)
class OverheadPeriod(Schedule):
    """The least period at which averaging takes at most `overhead` of the time, by the seconds measured so far."""

    overhead: float

    measures: ClassVar[bool] = True
    unstaged: ClassVar[str] = "schedule=overhead measures seconds, and stages differ in theirs"

    def __post_init__(self) -> None:
        if not 0 < self.overhead < 1:
            raise ValueError(
                f"overhead is a share of the time, in (0, 1), got {self.overhead}. Use 0.05 for 5 per cent."
            )

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        if now.rounds < 2 or now.step <= 0:  # the seconds of the first average are sent with the second
            return last.period
        return max(1, math.ceil(now.sync * (1 - self.overhead) / (self.overhead * now.step)))


def shortened(period: int, factor: float) -> int:
    """Return `factor` times a period, rounded down, but at least 1.

    >>> shortened(100, 0.29)
    29
    """
    return max(1, math.floor(round(factor * period, 9)))  # 0.29 * 100 is 28.999... in binary


def _check(factor: float, interval: int) -> None:
    if interval < 1:
        raise ValueError(f"interval counts mini-batches and must be >= 1, got {interval}. Use 1 for each round.")
    if not 0 < factor <= 1:
        raise ValueError(f"factor shortens the period and must be in (0, 1], got {factor}. The paper's is 0.5.")


def _passed(interval: int, last: Rounds, now: Rounds) -> bool:
    """Whether a multiple of `interval` was passed or reached in the last round."""
    return now.began // interval > last.began // interval
