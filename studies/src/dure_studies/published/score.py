"""How near predictions are to published figures.

    near     within 15 %, and the lost part (1 - ratio) within the larger of 0.03 and 30 % of it
    inside   the figure is in the predicted interval, which is narrower than a factor of 1.5
    order    Kendall's tau-b of predictions and figures
    within   within 15 %, of rows that divide a model
    right    the predicted ratio is on the same side of `equal` as the figure: the same of two settings is faster

A figure of a source without a prediction counts as not near.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from dure.core.validated import read_yaml_file
from dure_studies.published.rows import HERE

WITHIN, LOST, LEAST_LOST = 0.15, 0.30, 0.03
NARROW = 1.5
LOSS = 0.1
"""From this lost part on, a figure counts among those with a loss."""

DIVIDED = ("G5", "G8", "P1", "P3", "TT6", "M1", "U9")
"""The rows of tensor parallelism, pipelines, and both; without G6 and G7, whose source does not state what decides."""


class RatioPair(NamedTuple):
    """A predicted and a measured ratio."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def near(self) -> bool:
        """Whether the prediction is near in the sense of this module."""
        lost = 1 - self.measured
        allowed = max(LEAST_LOST, LOST * lost)
        return abs(self.error) <= WITHIN and abs(self.predicted - self.measured) <= allowed + 1e-12


class Score(NamedTuple):
    """Figures, the share of near ones, the median error, and Kendall's tau-b."""

    figures: int
    near: float
    median_error: float
    tau: float


def score(pairs: Sequence[RatioPair]) -> Score:
    """The score of some predictions."""
    if not pairs:
        return Score(0, math.nan, math.nan, math.nan)
    near = sum(each.near for each in pairs) / len(pairs)
    return Score(len(pairs), near, statistics.median(abs(each.error) for each in pairs), kendall(pairs))


def kendall(pairs: Sequence[RatioPair]) -> float:
    """Kendall's tau-b; 0 if one side is the same everywhere.

    >>> kendall([RatioPair(1, 1), RatioPair(2, 2), RatioPair(3, 3)]), kendall([RatioPair(1, 3), RatioPair(1, 2)])
    (1.0, 0.0)
    """
    agree = by_predicted = by_measured = 0
    for place, one in enumerate(pairs):
        for other in pairs[:place]:
            predicted, measured = _sign(one.predicted - other.predicted), _sign(one.measured - other.measured)
            agree += predicted * measured
            by_predicted += abs(predicted)
            by_measured += abs(measured)
    return agree / math.sqrt(by_predicted * by_measured) if by_predicted and by_measured else 0.0


def _sign(difference: float) -> int:
    return (difference > 0) - (difference < 0)


def with_loss(pairs: Sequence[RatioPair]) -> list[RatioPair]:
    """The figures whose measured ratio has lost more than `LOSS`."""
    return [each for each in pairs if 1 - each.measured > LOSS]


def is_inside(low: float, high: float, measured: float) -> bool:
    """Whether an interval has the figure, and is narrow."""
    return low <= measured <= high and high < NARROW * low


def scored() -> dict[str, list[str]]:
    """The names of the figures that are scored, by the row's id."""
    found: dict[str, Any] = read_yaml_file(HERE / "figures.yaml")
    return found
