"""Fits of the figures of `dure probe`: the cost of a byte and of a message, the inequality of messages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dure.core.cost import Fit, fit
from dure.planner.probe.measure import Figures

MOST_SHARE = 0.95
"""Largest share of a link that is attributed to the faster of two messages."""


def wire_of(figures: Figures) -> Fit:
    """Fit the seconds that a byte takes outside the link (beta) and on it (1 / bandwidth).

    `count` messages of `size` bytes at once occupy the link one after another; the last of them is then handled. They
    take start + size * beta + count * size / bandwidth. If noise hides the cost of bytes, the whole time of the largest
    message is attributed to the link, so that no link looks faster than it was measured.
    """
    line = fit([(size, count * size, seconds) for size, count, *both in figures["points"] for seconds in both])
    if any(line.slopes):
        return line
    size, count, *both = figures["points"][-1]
    return replace(line, slopes=(0.0, min(both) / (count * size)))


def unfairness_of(rounds: Sequence[tuple[float, float]]) -> float:
    """Estimate the standard deviation of log(weight of a message) from the ends of two equal messages sent at once.

    Of two messages with weights v > w, the faster has the share v / (v + w) of the link until its end; then the slower
    has the whole link. So the share is half the later end divided by the earlier end. log(v / w) has twice the variance
    of log(v).

    Example: with weights 3 and 1, the faster has 3/4 of the link and ends after 4/3 of its time alone, the slower
    after 2.

    >>> round(unfairness_of([(4 / 3, 2.0), (2.0, 4 / 3)]), 4)  # log(3) / sqrt(2)
    0.7768
    """
    if not rounds:
        return 0.0
    shares = np.array([min(max(ends) / (2 * min(ends)), MOST_SHARE) for ends in rounds])
    return float(np.sqrt(np.mean(np.log(shares / (1 - shares)) ** 2) / 2))


def hand_over(points: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Costs of a message: alpha and beta of each of its two processes, and the latency between them.

    `points` are (bytes, seconds by the clock, seconds of the caller's cores, seconds of the host's cores). The first
    point measures a step alone. Each other point measures a step, a push and a reply of the same size: two messages,
    each of which costs both processes.
    """
    (_, alone, own, _), *others = points
    costs = [(nbytes, (here - own + there) / 4) for nbytes, _, here, there in others]
    (few, least), (many, most) = costs[0], costs[-1]
    beta = max((most - least) / (many - few), 0.0) if many > few else 0.0
    alpha = max(statistics.mean(cost - nbytes * beta for nbytes, cost in costs), 0.0)
    idle = [(clock - alone - (here - own) - there) / 2 for _, clock, here, there in others]
    return alpha, beta, max(min(idle), 0.0)
