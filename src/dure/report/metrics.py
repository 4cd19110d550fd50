"""Staleness, version skew and shares of time of a run, and the time to a target."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dure.core.target import Target

Activity = Literal["compute", "communicate", "wait"]


@dataclass(slots=True)
class VersionCounts:
    """Counts updates by staleness, or pulls by version skew.

    *Staleness* is the server versions between the pull of a gradient and its application. The *version skew* of a pull
    from several servers is the versions between the oldest and the newest part of the model.

    >>> staleness = VersionCounts()
    >>> staleness.add(0); staleness.add(3)
    >>> staleness.as_dict()
    {'mean': 1.5, 'max': 3, 'histogram': {'0': 1, '3': 1}}
    """

    histogram: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, histogram: Mapping[str, int]) -> VersionCounts:
        """From a histogram whose keys are text."""
        return cls(Counter({int(versions): int(count) for versions, count in histogram.items()}))

    def add(self, versions: int, count: int = 1) -> None:
        if versions < 0:
            raise ValueError(f"versions between two others must be >= 0, got {versions}. Was the base version newer?")
        self.histogram[versions] += count

    def merge(self, other: VersionCounts) -> None:
        self.histogram.update(other.histogram)

    @property
    def mean(self) -> float:
        """Mean over all that is counted; 0.0 when it is nothing."""
        counted = self.histogram.total()
        return sum(versions * count for versions, count in self.histogram.items()) / counted if counted else 0.0

    @property
    def max(self) -> int:
        return max(self.histogram, default=0)

    def as_dict(self) -> dict[str, Any]:
        """The form in `summary.json`: keys of the histogram are text, in rising order."""
        histogram = {str(versions): self.histogram[versions] for versions in sorted(self.histogram)}
        return {"mean": self.mean, "max": self.max, "histogram": histogram}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> VersionCounts:
        return cls.of(values["histogram"])


@dataclass(slots=True)
class TimeShare:
    """Seconds in which ranks computed, communicated and waited; `as_dict` gives shares of their sum."""

    compute: float = 0.0
    communicate: float = 0.0
    wait: float = 0.0

    def add(self, activity: Activity, seconds: float) -> None:
        if not seconds >= 0:
            raise ValueError(f"a time spent must be >= 0 s, got {seconds} s of {activity!r}. Did a clock go backwards?")
        if activity not in ("compute", "communicate", "wait"):
            raise ValueError(f"an activity is 'compute', 'communicate' or 'wait', got {activity!r}.")
        setattr(self, activity, getattr(self, activity) + seconds)

    def merge(self, other: TimeShare) -> None:
        self.compute += other.compute
        self.communicate += other.communicate
        self.wait += other.wait

    def as_dict(self) -> dict[str, float]:
        """Shares that sum to 1; all 0.0 if no time was spent."""
        total = self.compute + self.communicate + self.wait
        return {name: seconds / total if total else 0.0 for name, seconds in asdict(self).items()}


_RATES = 200
"""Most intervals of a run that have a rate of frames of their own."""


def frame_rates(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with "seconds" and "frames_per_second": the new frames of each interval between rows, by its seconds.

    The first interval begins with the run. Rows that follow each other within a 200th of the run share an interval.

    >>> frame_rates([{"seconds": 2.0, "frames": 100}, {"seconds": 4.0, "frames": 500}])
    [{'seconds': 2.0, 'frames_per_second': 50.0}, {'seconds': 4.0, 'frames_per_second': 200.0}]
    """
    known = [(float(row["seconds"]), row["frames"]) for row in history if row.get("frames") is not None]
    least = known[-1][0] / _RATES if known else 0.0
    rates: list[dict[str, Any]] = []
    since, before = 0.0, 0
    for seconds, frames in known:
        if seconds > since and seconds - since >= least:
            rates.append({"seconds": seconds, "frames_per_second": (frames - before) / (seconds - since)})
            since, before = seconds, frames
    return rates


def time_to(history: Iterable[Mapping[str, Any]], target: Target) -> float | None:
    """Seconds of the first row that reaches `target`; None if no row does.

    Rows are not interpolated, as values between them were not measured.
    """
    for row in history:
        value = row.get(target.measure)
        if value is not None and (value >= target.value if target.measure == "accuracy" else value <= target.value):
            return float(row["seconds"])
    return None
