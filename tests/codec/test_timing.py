"""The seconds of a codec's operations, on a clock that the test winds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, chain, cycle, repeat

import pytest

from dure.codec import cost
from dure.codec.sign import Sign


def clock(seconds: list[float]) -> Iterator[float]:
    """Readings before and after calls that take `seconds`, one after another and again; no time passes between them."""
    return accumulate(chain.from_iterable(zip(repeat(0.0), cycle(seconds), strict=False)))


@pytest.mark.parametrize(
    ("seconds", "calls"),
    [
        ([0.5, 0.25, 0.125, 0.75, 1.0], cost.FEWEST),
        ([*[2.0**-10] * 20, 2.0**-11, 2.0**-10, 2.0**-10, 2.0**-10, 2.0**-10], cost.MOST),
    ],
)
def test_a_point_has_the_seconds_of_the_fastest_call(
    monkeypatch: pytest.MonkeyPatch, seconds: list[float], calls: int
) -> None:
    readings = clock(seconds)
    taken: list[float] = []
    monkeypatch.setattr(cost.time, "perf_counter", lambda: taken.append(next(readings)) or taken[-1])
    points = cost.timed(Sign(), cost.random_slices(64, messages=3))
    least = min(seconds)
    sizes = [1, 4, 16, 64]
    assert cost.sizes(64) == sizes
    assert points["encode"] == points["decode"] == [(size, least) for size in sizes]
    assert points["combine"] == [(3 * size, least) for size in sizes]  # a vote on three messages
    assert len(taken) == 2 * calls * 3 * len(sizes)
