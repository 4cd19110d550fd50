"""The order of strategies: by samples of synchronous SGD per second, the simplest of those that are nearly equal."""

import math

import pytest

from dure.partition.memory import MemoryUse
from dure.planner.candidates import ONE
from dure.planner.ranking import Ranked, assumed_factor, in_order, with_target
from dure.planner.timing import Timing
from dure.run.strategy import Strategy


def timing(speed=100.0, staleness=0.0, batch=10, servers=0, workers=4, exchanges=0.0):
    shares, memory = {"compute": 1.0, "communicate": 0.0, "wait": 0.0}, MemoryUse(400, 400, 0, 0, 0)
    figures = (40 / speed, speed, 0.0, staleness, shares, memory, batch, 4, workers, servers)
    return Timing(*figures, exchanges=exchanges)


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
        ("ad-psgd", {"exchanges": 1.0}, 1 + 0.1 * math.log2(4)),
        ("ad-psgd", {"exchanges": 0.25}, (1 + 0.1 * math.log2(4)) * (1 + 0.05 * 2)),
    ],
)
def test_assumed_factors_are_those_of_the_table_in_runs_of_many_exchanges(strategy, figures, factor):
    assert assumed_factor(Strategy.parse(strategy), timing(**figures), 40, 10**9) == pytest.approx(factor)


@pytest.mark.parametrize(
    ("strategy", "period", "figures", "counted"),
    [
        ("averaging:period=16", 16, {}, 1),
        ("diloco:period=100", 100, {}, 1),
        ("ad-psgd", 400, {"exchanges": 1 / 400}, 1 / 2),
        ("averaging:period=16 top-k", 16, {}, 0.01),
        ("averaging:period=16 1bit", 16, {}, 1 / 8),
    ],
)
def test_replicas_with_next_to_no_exchange_learn_as_one_machine(strategy, period, figures, counted):
    """Half of the gain over one replica is reached with four exchanges in a run."""
    chosen = Strategy.parse(strategy)
    never, often = (assumed_factor(chosen, timing(**figures), 40, steps) for steps in (1, 10**9))
    assert never == pytest.approx(4, rel=0.05)  # samples of four machines, for the learning of one
    half = assumed_factor(chosen, timing(**figures), 40, round(4 * period / counted))
    assert 4 / half == pytest.approx((1 + 4 / often) / 2, rel=1e-4)


def test_gossip_without_an_exchange_learns_as_one_machine():
    assert assumed_factor(Strategy.parse("ad-psgd"), timing(), 40, 500) == 4


def test_replicas_with_a_momentum_of_blocks_learn_as_one_machine_from_single_bits():
    for method, factor in (("diloco:period=30", 4.0), ("bmuf:period=16", 4.0)):
        assert assumed_factor(Strategy.parse(f"{method} 1bit"), timing(), 40, 10**9) == pytest.approx(factor)
        assert assumed_factor(Strategy.parse(method), timing(), 40, 10**9) < 1.3


def test_a_center_that_next_to_nothing_moves_learns_less_than_one_machine():
    assert assumed_factor(Strategy.parse("easgd:period=64 ps"), timing(), 40, 64) > 4


def test_one_machine_is_first_unless_another_is_better_by_more_than_its_known_error():
    one, assumed = row(ONE, 100, workers=1), 1.2
    assert order(one, row("bsp", 110), row("a", 1.2 * 135, factor=assumed))[0] == ONE
    assert order(one, row("bsp", 120))[0] == "bsp"
    assert order(one, row("bsp", 100), row("a", 1.2 * 145, factor=assumed))[0] == "a"
    measured = with_target(one, 10.0), with_target(row("a", 300, factor=assumed), 9.0)
    assert order(*measured, row("bsp", 1000))[0] == ONE
    assert order(with_target(one, 10.0), with_target(row("a", 300), 8.0))[0] == "a"


def test_no_strategy_has_no_order():
    assert in_order([]) == []
