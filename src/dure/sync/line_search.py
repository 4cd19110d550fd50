"""Line searches: each finds a step t along a direction, and evaluates the function at each trial.

    phi(t) = f(w + t p)          a trial gives t, phi(t) and phi'(t); at the start, phi'(0) < 0

| search         | accepts t if                                                      | Nocedal and Wright  |
|----------------|-------------------------------------------------------------------|---------------------|
| `backtracking` | phi(t) <= phi(0) + SUFFICIENT t phi'(0), trying ever shorter steps | algorithm 3.1       |
| `wolfe`        | that, and |phi'(t)| <= CURVATURE |phi'(0)|                        | algorithms 3.5, 3.6 |
| `exact`        | |phi'(t)| <= FLAT |phi'(0)|: the minimum, by secants of phi'      |                     |

Each search returns the accepted trial, which is always the last one made, or None. A trial with an infinite loss counts
as too long a step.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

SUFFICIENT = 1e-4
CURVATURE = 0.9
FLAT = 1e-9
TRIALS = 25
"""The most trials of one search."""


class Trial(NamedTuple):
    """A point on the line: its step, loss and slope."""

    step: float
    loss: float
    slope: float


Try = Callable[[float], Awaitable[Trial]]


async def wolfe(attempt: Try, start: Trial, first: float) -> Trial | None:
    """Search a step that meets the strong Wolfe conditions, from a first trial at `first`."""
    low, step = start, first
    for count in range(TRIALS):
        trial = await attempt(step)
        if not _lower(trial, start) or (count and trial.loss >= low.loss):
            return await _zoom(attempt, start, low, trial, TRIALS - count - 1)
        if _flat(trial, start):
            return trial
        if trial.slope >= 0:
            return await _zoom(attempt, start, trial, low, TRIALS - count - 1)
        low, step = trial, 2 * step
    return low


async def _zoom(attempt: Try, start: Trial, low: Trial, high: Trial, trials: int) -> Trial | None:
    """Search between `low`, the lowest trial so far, and `high`; an acceptable step lies between them."""
    last = high
    for _ in range(trials):
        step = _between(low, high)
        if step in (low.step, high.step):
            break
        last = trial = await attempt(step)
        if not _lower(trial, start) or trial.loss >= low.loss:
            high = trial
            continue
        if _flat(trial, start):
            return trial
        if trial.slope * (high.step - low.step) >= 0:
            high = low
        low = trial
    if low is start:
        return None
    return low if last is low else await attempt(low.step)


async def backtracking(attempt: Try, start: Trial, first: float) -> Trial | None:
    """Shorten the step to the minimum of the parabola through the trials, within 0.1 to 0.5 of the last step."""
    step = first
    for _ in range(TRIALS):
        trial = await attempt(step)
        if _lower(trial, start):
            return trial
        rise = trial.loss - start.loss - step * start.slope
        best = -0.5 * start.slope * step**2 / rise if math.isfinite(rise) and rise > 0 else 0.5 * step
        step = min(max(best, 0.1 * step), 0.5 * step)
    return None


async def exact(attempt: Try, start: Trial, first: float) -> Trial | None:
    """Search a zero of the slope by secants, and by bisection where they fail. A quadratic takes two trials."""
    low, high, step = start, math.inf, first  # the slope is negative at `low`, but not at `high`
    last = trial = start
    for count in range(TRIALS):
        trial = await attempt(step)
        if not math.isfinite(trial.loss):
            high, step = step, 0.5 * (low.step + step)
            continue
        if abs(trial.slope) <= FLAT * abs(start.slope):
            return trial
        bend = (trial.slope - last.slope) / (trial.step - last.step)
        guess = trial.step - trial.slope / bend if bend > 0 else math.inf
        if trial.slope < 0:
            low = trial
        else:
            high = step
        if not low.step < guess < high or count % 3 == 2:
            guess = 0.5 * (low.step + high) if high < math.inf else min(max(guess, 2 * step), 10 * step)
        if abs(guess - step) <= 1e-14 * step:
            return trial
        last, step = trial, guess
    return trial if _lower(trial, start) else None


def _lower(trial: Trial, start: Trial) -> bool:
    """Whether a trial meets the condition of sufficient decrease."""
    return trial.loss <= start.loss + SUFFICIENT * trial.step * start.slope


def _flat(trial: Trial, start: Trial) -> bool:
    return abs(trial.slope) <= CURVATURE * abs(start.slope)


def _between(low: Trial, high: Trial) -> float:
    """Return the minimum of the cubic through both trials, not too near to either; the middle if it has none."""
    a, b = low, high
    middle = 0.5 * (a.step + b.step)
    if not (math.isfinite(b.loss) and math.isfinite(b.slope)):
        return middle
    d1 = a.slope + b.slope - 3 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if square < 0:
        return middle
    d2 = math.copysign(math.sqrt(square), b.step - a.step)
    divisor = b.slope - a.slope + 2 * d2
    if divisor == 0:
        return middle
    step = b.step - (b.step - a.step) * (b.slope + d2 - d1) / divisor
    left, right = sorted((a.step, b.step))
    margin = 0.1 * (right - left)
    return min(max(step, left + margin), right - margin)
