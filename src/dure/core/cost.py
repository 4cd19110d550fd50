"""Cost of a codec on one core: a line (start + value * values) for each operation, and the fit of such lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.node import CodecWork
from dure.core.units import Seconds
from dure.core.validated import Validated
from dure.errors import UsageError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray


class Line(Validated):
    """Cost of an operation."""

    start: Seconds = 0.0
    """Time of a call."""
    value: Seconds = 0.0
    """Time for each value in the call."""


class CodecCost(Validated):
    """Cost of a coder's operations on one core of a machine of speed 1."""

    encode: Line = Line()
    """Cost of encoding."""
    decode: Line = Line()
    """Cost of decoding."""
    combine: Line = Line()
    """Cost of combining the messages of several workers."""

    @classmethod
    def measured(
        cls, encode: tuple[float, float], decode: tuple[float, float], combine: tuple[float, float]
    ) -> CodecCost:
        """A cost from pairs of microseconds of a call and nanoseconds of a value.

        >>> CodecCost.measured((24, 0.82), (22, 0.44), (180, 0.047)).encode
        Line(start=2.4e-05, value=8.2e-10)
        """
        lines = [Line(start=start * 1e-6, value=value * 1e-9) for start, value in (encode, decode, combine)]
        return cls(encode=lines[0], decode=lines[1], combine=lines[2])

    def seconds(self, codec_works: Iterable[CodecWork]) -> float:
        """The duration of `codec_works`, one after another."""
        total = 0.0
        for work in codec_works:
            line: Line = getattr(self, work.operation)
            total += work.calls * (line.start + work.numel * line.value)
        return total


NOTHING = 1e-9
"""Seconds. A slope is rounded to 0 where it adds less than this to the largest measurement."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted plane: start + sum of slopes * x. `residual` is the root mean square of the relative errors."""

    start: float
    slopes: tuple[float, ...]
    residual: float


def fit(rows: Sequence[Sequence[float]]) -> Fit:
    """Fit rows of (x, ..., y) by the least squares of relative errors, with slopes of at least 0.

    Raises `UsageError` where the rows do not determine the constants.

    >>> fit([(0.0, 2.0), (1.0, 5.0), (4.0, 14.0)])
    Fit(start=2.0, slopes=(3.0,), residual=0.0)
    """
    import numpy as np

    table = np.array(rows, dtype=float)
    x, y = table[:, :-1], table[:, -1:]
    scale = np.abs(x).max(axis=0)  # the solver needs columns of similar size; seconds per byte are tiny
    matrix = np.hstack([np.ones_like(y), x / scale]) / y
    if len(rows) < matrix.shape[1] or np.linalg.matrix_rank(matrix) < matrix.shape[1]:
        raise UsageError(
            f"{len(rows)} measurements do not determine {matrix.shape[1]} constants: measure more different sizes."
        )
    solution = _least_squares(matrix)
    residual = float(np.sqrt(np.mean((matrix @ solution - 1) ** 2)))
    start, *slopes = (_rounded(value, 9) for value in (solution / [1.0, *scale]))
    slopes = [slope if slope * most > NOTHING else 0.0 for slope, most in zip(slopes, scale, strict=True)]
    return Fit(start, tuple(slopes), _rounded(residual, 3) if residual > 1e-9 else 0.0)


def _least_squares(matrix: NDArray[float64]) -> NDArray[float64]:
    """The coefficients of at least 0, the first of any sign, with which the columns of `matrix` are nearest to 1.

    The optimum has no bounds on its columns of coefficients above 0. So it is the best of the optima without bounds of
    all subsets of columns, of those that keep the bounds.
    """
    import numpy as np

    found = []
    for slopes in itertools.product([True, False], repeat=matrix.shape[1] - 1):
        columns = np.flatnonzero([True, *slopes])
        solution = np.zeros(matrix.shape[1])
        solution[columns] = np.linalg.lstsq(matrix[:, columns], np.ones(len(matrix)), rcond=None)[0]
        if (solution[1:] >= 0).all():
            found.append(solution)
    return min(found, key=lambda each: float(np.sum((matrix @ each - 1) ** 2)))


def codec_cost(points: Mapping[str, Sequence[Sequence[float]]]) -> CodecCost:
    """Fit the cost of a codec to the (values, seconds) of each operation. A start below 0 becomes 0."""
    return CodecCost(**{operation: _line(rows) for operation, rows in points.items()})


def _line(rows: Sequence[Sequence[float]]) -> Line:
    if len(rows) < 2:  # slices of a tiny model all have one size
        return Line(start=_rounded(max(seconds for _, seconds in rows)))
    found = fit(rows)
    return Line(start=_rounded(max(found.start, 0.0)), value=_rounded(found.slopes[0]))


def _rounded(value: float, digits: int = 4) -> float:
    """Round to significant `digits`; measurements have at most four."""
    return float(f"{value:.{digits}g}")
