"""What a codec takes of a core: a line (start + value * values) for each operation, and fits of such lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dure.core.node import CodecWork
from dure.core.units import Seconds
from dure.core.validated import Validated
from dure.errors import UsageError


class Line(Validated):
    """Seconds of a call, and of each value in it."""

    start: Seconds = 0.0
    value: Seconds = 0.0


class CodecCost(Validated):
    """What a codec's coder takes of a core, on a machine of speed 1."""

    encode: Line = Line()
    decode: Line = Line()
    combine: Line = Line()

    def seconds(self, codec_works: Iterable[CodecWork]) -> float:
        """All of `codec_works`, one after another."""
        total = 0.0
        for coding in codec_works:
            line: Line = getattr(self, coding.operation)
            total += coding.calls * (line.start + coding.numel * line.value)
        return total


NOTHING = 1e-9
"""Seconds below which the largest message's part is none at all."""


@dataclass(frozen=True, slots=True)
class Fit:
    """start + sum of slopes * x; `residual` is the root mean square of relative errors."""

    start: float
    slopes: tuple[float, ...]
    residual: float


def fit(rows: Sequence[Sequence[float]]) -> Fit:
    """The least squares of relative errors over rows of (x, ..., y), with no slope below zero.

    >>> fit([(0.0, 2.0), (1.0, 5.0), (4.0, 14.0)])
    Fit(start=2.0, slopes=(3.0,), residual=0.0)
    """
    from scipy.optimize import lsq_linear

    table = np.array(rows, dtype=float)
    x, y = table[:, :-1], table[:, -1:]
    scale = np.abs(x).max(axis=0)  # seconds per byte are tiny beside seconds
    matrix = np.hstack([np.ones_like(y), x / scale]) / y
    if len(rows) < matrix.shape[1] or np.linalg.matrix_rank(matrix) < matrix.shape[1]:
        raise UsageError(f"{matrix.shape[1]} constants cannot be told from {len(rows)} measurements like these.")
    lower = [-np.inf] + [0.0] * x.shape[1]
    solution = lsq_linear(matrix, np.ones(len(rows)), (lower, np.inf), method="bvls", tol=1e-14).x
    residual = float(np.sqrt(np.mean((matrix @ solution - 1) ** 2)))
    start, *slopes = (_rounded(value, 9) for value in (solution / [1.0, *scale]))
    slopes = [slope if slope * most > NOTHING else 0.0 for slope, most in zip(slopes, scale, strict=True)]
    return Fit(start, tuple(slopes), _rounded(residual, 3) if residual > 1e-9 else 0.0)


def codec_cost(points: Mapping[str, Sequence[Sequence[float]]]) -> CodecCost:
    """What a codec costs, from the (values, seconds) of each operation. A call takes no less than nothing."""
    return CodecCost(**{operation: _line(rows) for operation, rows in points.items()})


def _line(rows: Sequence[Sequence[float]]) -> Line:
    if len(rows) < 2:  # a model of so few values that a call is all it takes
        return Line(start=_rounded(max(seconds for _, seconds in rows)))
    found = fit(rows)
    return Line(start=_rounded(max(found.start, 0.0)), value=_rounded(found.slopes[0]))


def _rounded(value: float, digits: int = 4) -> float:
    """Four digits are as many as a measurement has, at most."""
    return float(f"{value:.{digits}g}")
