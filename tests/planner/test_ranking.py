"""The order of strategies: by samples of synchronous SGD per second, the simplest of those that are nearly equal."""

import math

import pytest

from dure.partition.memory import MemoryUse
from dure.planner.ranking import Ranked, assumed_factor, in_order, with_target
from dure.planner.timing import Timing
from dure.run.strategy import Strategy


def timing(speed=100.0, staleness=0.0, batch=10, servers=0, workers=4, sent=0.0):
    shares = {"compute": 1.0, "communicate": 0.0, "wait": 0.0}
    return Timing(40 / speed, speed, sent, staleness, shares, MemoryUse(400, 400, 0, 0, 0), batch, 4, workers, servers)


def row(name, speed, factor=1.0, **options):
    return Ranked(name, timing(speed, **options), factor)


def order(*rows):
    return [each.strategy for each in in_order(list(rows))]


def test_the_simplest_of_nearly_equal_strategies_is_first_and_the_others_are_in_order():
    assert order(row("bsp", 96), row("a", 90), row("b", 100)) == ["bsp", "b", "a"]
    assert order(row("bsp", 94), row("a", 90), row("b", 100)) == ["b", "bsp", "a"]


def test_samples_for_equal_learning_and_machines_of_servers_count():
    assert order(row("bsp", 76), row("a", 100, factor=1.3), row("b", 120, servers=2)) == ["bsp", "b", "a"]
    assert row("b", 120, servers=2).score == pytest.approx(120 * 4 / 6)


def test_measured_targets_come_before_assumed_factors():
    slow, fast = with_target(row("bsp", 50), 10.0), with_target(row("a", 100, factor=5), 5.0)
    never = with_target(row("c", 1000), None)
    assert order(slow, fast, never) == ["a", "bsp", "c"]


@pytest.mark.parametrize(
    ("strategy", "figures", "factor"),
    [
        ("bsp", {}, 1.0),
        ("downpour ps", {"staleness": 4.0}, 1 + 0.25 * 4 * 10 / 40),
        ("averaging:period=16", {}, 1 + 0.05 * 4),
        ("bsp 1bit", {}, 1.05),
        ("ad-psgd", {"sent": 400.0}, 1 + 0.1 * math.log2(4)),
        ("ad-psgd", {"sent": 100.0}, (1 + 0.1 * math.log2(4)) * (1 + 0.05 * 2)),
    ],
)
def test_assumed_factors_are_those_of_the_table(strategy, figures, factor):
    assert assumed_factor(Strategy.parse(strategy), timing(**figures), 40) == pytest.approx(factor)


def test_no_strategy_has_no_order():
    assert in_order([]) == []
