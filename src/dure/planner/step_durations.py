"""The mean duration of the step of workers that wait for each other: of the slowest, or of the K-th of P.

    equal in all steps        the K-th of the durations in ascending order
    all of P, random          integral of 1 - product of F_k(x)
    K of P, random, equal     integral of P(binomial(P, F(x)) < K): (H_P - H_(P-K)) / mu for exponential durations
    sharing C cores           sum over i = 1 .. P of (m_i - m_(i-1)) max(1, (P - i + 1) / C), m_i the i-th of P
    several steps             as one step of the sum's mean and variance, log-normal

F_k is the distribution of the durations of worker k. The second and third are order statistics (Dutta et al., "Slow and
Stale Gradients Can Win the Race", AISTATS 2018).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dure.planner.step_forms import Vector, expected
from dure.runtime.virtual.compute import Constant, LogNormal, Pareto, ShiftedExponential

if TYPE_CHECKING:
    from dure.runtime.virtual.compute import Compute


KNOWN = (Constant, ShiftedExponential, LogNormal, Pareto)
"""Distributions with a known form; a trace has none."""


class StepDuration(NamedTuple):
    """The duration of a worker's step: its mean, and the distribution of its factor."""

    mean: float
    compute: Compute

    @property
    def constant(self) -> bool:
        """Whether all steps take the mean."""
        return isinstance(self.compute, Constant)


def slowest(durations: Sequence[StepDuration], first: int | None = None) -> float | None:
    """The mean of the largest of independent `durations`, or of the `first`-th smallest; None where no form is known.

    >>> slowest([StepDuration(1.0, Constant()), StepDuration(5.0, Constant())])
    5.0
    """
    count = len(durations)
    if all(each.constant for each in durations):
        return sorted(each.mean for each in durations)[(first or count) - 1]
    if not all(isinstance(each.compute, KNOWN) for each in durations):
        return None
    times = Counter(durations)
    scale = max(each.mean for each in times)
    if first is None or first == count:
        return expected(lambda x: 1 - np.prod([below(each, x) ** n for each, n in times.items()], axis=0), scale)
    if len(times) > 1:
        return None
    from scipy.stats import binom

    return expected(lambda x: binom.cdf(first - 1, count, below(durations[0], x)), scale)


def shared(durations: Sequence[StepDuration], cores: int, first: int | None = None) -> float | None:
    """As `slowest`, where all computations begin together and share `cores` equally.

    >>> shared([StepDuration(1.0, Constant()), StepDuration(3.0, Constant())], cores=1)
    4.0
    """
    count, total, before = len(durations), 0.0, 0.0
    for number in range(1, (first or count) + 1):
        own = slowest(durations, number)
        if own is None:
            return None
        total, before = total + (own - before) * max(1.0, (count - number + 1) / cores), own
    return total


def several(duration: StepDuration, steps: int) -> StepDuration | None:
    """The duration of so many steps of a worker; None where no form is known, or the variance is infinite."""
    mean, compute = duration.mean * steps, duration.compute
    if isinstance(compute, Constant) or steps == 1:
        return StepDuration(mean, compute)
    if isinstance(compute, LogNormal):
        variance = math.expm1(compute.sigma**2)
    elif isinstance(compute, ShiftedExponential):
        variance = (1 - compute.shift) ** 2
    elif isinstance(compute, Pareto) and compute.tail > 2:
        variance = 1 / (compute.tail * (compute.tail - 2))
    else:
        return None
    return StepDuration(mean, LogNormal(sigma=math.sqrt(math.log1p(variance / steps))))


def below(duration: StepDuration, x: Vector) -> Vector:
    """The probability that a duration is at most `x`."""
    mean, compute = duration.mean, duration.compute
    if isinstance(compute, ShiftedExponential):
        return -np.expm1(-np.maximum(x / mean - compute.shift, 0.0) / (1 - compute.shift))
    if isinstance(compute, LogNormal) and compute.sigma:
        from scipy.special import ndtr

        found: Vector = ndtr(np.log(x / mean) / compute.sigma + compute.sigma / 2)
        return found
    if isinstance(compute, Pareto):
        least = (compute.tail - 1) / compute.tail * mean
        return 1 - np.minimum(least / x, 1.0) ** compute.tail
    return (x >= mean).astype(float)
