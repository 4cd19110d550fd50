"""The mean duration of the step of workers that wait for each other: of the slowest, or of the K-th of P.

    equal in all steps        the K-th of the durations in ascending order
    all of P, random          integral of 1 - product of F_k(x)
    K of P, random, equal     integral of P(binomial(P, F(x)) < K): (H_P - H_(P-K)) / mu for exponential durations
    sharing C cores           sum over i = 1 .. P of (m_i - m_(i-1)) max(1, (P - i + 1) / C), m_i the i-th of P
    several steps             as one step of the sum's mean and variance, log-normal

F_k is the distribution of the durations of worker k. The second and third are order statistics (Dutta et al., "Slow and
Stale Gradients Can Win the Race", AISTATS 2018). All are None where no form is known, as of a trace.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch

from dure.runtime.virtual.compute import Compute, Constant, LogNormal, Pareto, ShiftedExponential

KNOWN = (Constant, ShiftedExponential, LogNormal, Pareto)

POINTS = 20_000
"""Points of the integral of an expected value."""


class StepDuration(NamedTuple):
    """The duration of a worker's step: its mean, and the distribution of its factor."""

    mean: float
    compute: Compute

    @property
    def constant(self):
        """Whether all steps take the mean."""
        return isinstance(self.compute, Constant)


def expected(exceeds, scale):
    """The mean of a random duration of at least 0, about as large as `scale`: the integral of P(duration > x).

    >>> round(expected(lambda x: np.exp(-x / 3), scale=1.0), 6)
    3.0
    """
    middle = (np.arange(POINTS) + 0.5) / POINTS  # x = scale * u / (1 - u) has all of the tail in 0 < u < 1
    inverse = 1 / (1 - middle)
    return float(scale * np.mean(exceeds(scale * middle * inverse) * inverse * inverse))


def slowest(durations, first=None):
    """The mean of the largest of independent `durations`, or of the `first`-th smallest.

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
    if first in (None, count):
        return expected(lambda x: 1 - np.prod([below(each, x) ** n for each, n in times.items()], axis=0), scale)
    return expected(lambda x: fewer(first, count, below(durations[0], x)), scale) if len(times) == 1 else None


def fewer(first, count, share):
    """The probability that fewer than `first` of `count` independent durations have ended, each with this `share`."""
    return sum(math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(first))


def shared(durations, cores, first=None):
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


def several(duration, steps):
    """The duration of so many steps of a worker; None also where the variance is infinite."""
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


def below(duration, x):
    """The probability that a duration is at most `x`."""
    mean, compute = duration.mean, duration.compute
    if isinstance(compute, ShiftedExponential):
        return -np.expm1(-np.maximum(x / mean - compute.shift, 0.0) / (1 - compute.shift))
    if isinstance(compute, LogNormal) and compute.sigma:
        return torch.special.ndtr(torch.from_numpy(np.log(x / mean) / compute.sigma + compute.sigma / 2)).numpy()
    if isinstance(compute, Pareto):
        least = (compute.tail - 1) / compute.tail * mean
        return 1 - np.minimum(least / x, 1.0) ** compute.tail
    return (x >= mean).astype(float)
