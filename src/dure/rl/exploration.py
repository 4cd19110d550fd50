"""Exploration of many actors: each has a rate of its own, which does not change during a run.

Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018.

    epsilon_i = epsilon ^ (1 + alpha i / (N - 1))         i = 0 .. N - 1
"""

from __future__ import annotations

from dure.errors import UsageError


def ladder(actors: int, index: int, epsilon: float = 0.4, alpha: float = 7.0) -> float:
    """The rate of random actions of actor `index` among `actors`. A single actor has `epsilon` itself.

    >>> [round(ladder(8, index), 6) for index in range(8)]
    [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.001638, 0.000655]

    Raises:
        UsageError: `index` is no actor's, or a value is out of its range.
    """
    if not 0 <= index < actors:
        raise UsageError(f"actors are numbered from 0 to {actors - 1}, got {index}.")
    if not 0 <= epsilon <= 1:
        raise UsageError(f"epsilon is a probability between 0 and 1, got {epsilon}.")
    if not alpha >= 0:
        raise UsageError(f"alpha must be a number >= 0, got {alpha}. 0 gives every actor the same epsilon.")
    return float(epsilon ** (1 + alpha * index / max(actors - 1, 1)))
