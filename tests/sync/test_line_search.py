"""Line searches: what they accept satisfies their conditions, and was the last trial."""

from __future__ import annotations

import math

import pytest
from support.nodes import World

from dure.sync import line_search
from dure.sync.line_search import CURVATURE, SUFFICIENT, Trial

FUNCTIONS = {  # phi, phi', where it is lowest
    "parabola": (lambda t: (t - 0.3) ** 2, lambda t: 2 * (t - 0.3), 0.3),
    "far": (lambda t: (t / 100 - 1) ** 2, lambda t: (t / 100 - 1) / 50, 100.0),
    "near": (lambda t: (1000 * t - 1) ** 2, lambda t: 2000 * (1000 * t - 1), 1e-3),
    "quartic": (lambda t: (t - 2) ** 4, lambda t: 4 * (t - 2) ** 3, 2.0),
    "rational": (lambda t: -t / (t * t + 2), lambda t: (t * t - 2) / (t * t + 2) ** 2, math.sqrt(2)),
    "wall": (
        lambda t: -t - 0.1 * math.log(1 - t) if t < 1 else math.inf,
        lambda t: -1 + 0.1 / (1 - t) if t < 1 else math.nan,
        0.9,
    ),
    "waves": (
        lambda t: 0.05 * t * t - t - 0.3 * math.sin(5 * t),
        lambda t: 0.1 * t - 1 - 1.5 * math.cos(5 * t),
        None,
    ),
}


class Line:
    """phi, and what was tried of it."""

    def __init__(self, name):
        self.phi, self.slope, self.lowest = FUNCTIONS[name]
        self.tried = []

    async def attempt(self, step):
        self.tried.append(Trial(step, self.phi(step), self.slope(step)))
        return self.tried[-1]

    @property
    def start(self):
        return Trial(0.0, self.phi(0.0), self.slope(0.0))

    def search(self, kind, first):
        return World().run(getattr(line_search, kind)(self.attempt, self.start, first))


@pytest.mark.parametrize("first", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["wolfe", "backtracking"])
def test_conditions(kind, name, first):
    line = Line(name)
    found = line.search(kind, first)
    assert found is line.tried[-1]
    assert found.loss <= line.start.loss + SUFFICIENT * found.step * line.start.slope
    if kind == "wolfe":
        assert abs(found.slope) <= CURVATURE * abs(line.start.slope)
    assert len(line.tried) <= 18


@pytest.mark.parametrize("first", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "waves"])
def test_exact(name, first):
    line = Line(name)
    found = line.search("exact", first)
    assert found is line.tried[-1]
    assert found.step == pytest.approx(line.lowest, rel=1e-2 if name == "quartic" else 1e-6)


@pytest.mark.parametrize("name", ["parabola", "far", "near"])
def test_exact_needs_two_trials_of_a_parabola(name):
    line = Line(name)
    line.search("exact", 1.0)
    assert len(line.tried) == 2


@pytest.mark.parametrize("kind", ["wolfe", "backtracking"])
def test_where_it_only_goes_up_nothing_is_found(kind):
    """A direction that does not lead down, though its slope says so: rounding, near the lowest place."""
    line = Line("parabola")
    line.phi, line.slope = (lambda t: abs(t), lambda t: -1e-3)
    assert line.search(kind, 1.0) is None


@pytest.mark.parametrize("kind", ["wolfe", "backtracking", "exact"])
def test_where_nothing_is_a_number_nothing_is_found(kind):
    line = Line("parabola")
    start = line.start
    line.phi, line.slope = (lambda t: math.inf), (lambda t: math.nan)
    assert World().run(getattr(line_search, kind)(line.attempt, start, 1.0)) is None
