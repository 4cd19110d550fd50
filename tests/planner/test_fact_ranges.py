"""The range of an answer over the facts that a cluster leaves open, and the facts on which the answer depends."""

from __future__ import annotations

import json
from functools import cache

import pytest

from dure.job.job import load_job
from dure.planner.candidates import ONE, PLAIN, Scene
from dure.planner.fact_ranges import FactRanges, fact_ranges, said
from dure.planner.ranking import Ranked, ranked
from dure.planner.search import Found
from dure.planner.side_by_side import Deadline
from dure.planner.timing import timed
from dure.run.step_shape import referred
from dure.runtime.virtual.cluster import Cluster

OPEN = "2x8 v100-sxm2-16gb @ 100 Gbit/s"
SECONDS = "215 ms"
"""Of a step of VGG-16 with 32 samples on one of these."""


@cache
def vgg() -> Scene:
    job = load_job("vgg16:batch=32")
    return Scene(job, Cluster.uniform(2), 64)


def ranges(cluster: Cluster, seconds: float = 600.0, strategies: tuple[str, ...] = (PLAIN, ONE)) -> FactRanges | None:
    scene = vgg().on(referred(cluster, vgg().job))
    rows = [ranked(each, timed(scene, each), scene) for each in strategies]
    return fact_ranges(scene, Found(rows, order=[ONE, PLAIN, *strategies]), rows, Deadline(seconds))


@cache
def left_open() -> FactRanges:
    found = ranges(Cluster.described(OPEN))
    assert found is not None
    return found


def stated(**card: object) -> FactRanges:
    """The same machines with all facts stated but the spread, and `card`."""
    kind = {"count": 2, "gpus": 8, "compute": {"seconds": SECONDS}, "inside": {"kind": "mesh"}}
    found = ranges(Cluster(machines=[kind], link={"bandwidth": "100 Gbit/s"}, card=card))
    assert found is not None
    return found


def width(found: FactRanges) -> float:
    low, high = found.samples(PLAIN)
    return high / low


def test_the_range_of_vgg_on_two_hosts_is_wide_and_stated_facts_narrow_it() -> None:
    known = stated(count=4, transport="rdma", share=0.88)
    assert width(left_open()) > 3
    assert width(known) < 1.05
    assert [fact.key for fact in known.facts] == ["engine.spread"]
    part = stated(count=4)
    assert width(known) < width(part) < width(left_open())
    assert part.by_effect()[0].key == "card.transport"


def test_the_interval_has_the_values_that_are_slowest_together() -> None:
    found = left_open()
    alone = [found.samples(PLAIN, fact.name) for fact in found.facts]
    low, high = found.samples(PLAIN)
    assert low < min(least for least, _ in alone)
    assert high > max(most for _, most in alone)
    slow, fast = (point for point in found.rows if len(point) > 1)
    assert ("the transport of the network", "TCP at 8 Gbit/s of a card") in slow
    assert {words for _, words in fast} >= {"8 cards", "a spread of 1 %", "2.1 of the catalogue's speed"}


def test_the_fact_that_flips_the_answer_is_named_with_its_value_and_strategy() -> None:
    """Over 8 Gbit/s of TCP two hosts are slower than one; over RDMA nearly twice as fast."""
    others = left_open().others()
    assert (("the transport of the network", "TCP at 8 Gbit/s of a card"),) in others[ONE]
    assert all(name == "the transport of the network" for point in others[ONE] for name, _ in point)
    text = said(left_open(), OPEN)
    assert any(line.startswith("The answer depends on these facts: with TCP at 8 Gbit/s") for line in text)
    known = stated(count=4, transport="rdma")
    assert known.others() == {}
    assert "No value changes the answer, among the 2 strategies that were timed again." in said(known, "a.yaml")


def test_values_together_may_change_an_answer_that_none_of_them_changes_alone() -> None:
    one, two = (("a", "x"),), (("b", "y"),)
    found = FactRanges([], {}, {(): PLAIN, one + two: ONE, one: "averaging"}, complete=True)
    assert found.others() == {"averaging": [one], ONE: [one + two]}
    assert FactRanges([], {}, {(): PLAIN, one: ONE, one + two: ONE}, complete=True).others() == {ONE: [one]}


def test_the_text_says_how_the_first_fact_is_stated() -> None:
    part = stated(count=4)
    lines = said(part, "cluster.yaml")
    assert lines[1].startswith("Most of that is the transport of the network: ")
    assert "State it by card: {transport: rdma} or {transport: tcp} in a cluster file." in lines[1]
    assert '"2x8 v100-sxm2-16gb @ 100 Gbit/s rdma"' in said(part, OPEN)[1]


def test_all_is_said_to_be_open_where_no_time_was_left() -> None:
    found = ranges(Cluster.described(OPEN), seconds=0.0)
    assert found is not None
    assert not found.complete
    (line,) = said(found, OPEN)
    assert "the transport of the network" in line
    assert "--within" in line
    assert found.samples(PLAIN)[0] == found.samples(PLAIN)[1]
    assert found.others() == {}


def test_no_strategy_is_first_where_one_was_not_timed() -> None:
    """The messages of 128 workers take seconds to simulate, and their mean by the engine takes none."""
    scene = vgg().on(referred(Cluster.described("16x8 v100-sxm2-16gb @ 100 Gbit/s"), vgg().job))
    plain = timed(scene, PLAIN)
    rows = [Ranked("bsp fp16", plain, 1.0), Ranked(PLAIN, plain, 1.0)]
    found = fact_ranges(scene, Found(rows, order=[PLAIN, "bsp fp16"]), rows[::-1], Deadline(1.5))
    assert found is not None
    assert not found.complete
    assert all(len(found.rows[point]) == 2 for point in found.first)
    assert "The seconds did not suffice" in said(found, OPEN)[-1] or len(said(found, OPEN)) == 1


def test_seconds_to_a_target_scale_with_the_step() -> None:
    scene = vgg().on(referred(Cluster.described("2x1 v100-sxm2-16gb @ 100 Gbit/s"), vgg().job))
    given = Ranked(PLAIN, timed(scene, PLAIN), 1.0, seconds_to_target=1e3)
    found = fact_ranges(scene, Found([given], order=[PLAIN]), [given], Deadline(600.0))
    assert found is not None
    (row,) = found.rows[(("the speed of a GPU", "0.6 of the catalogue's speed"),)]
    assert row.timing.seconds > 1.5 * given.timing.seconds
    assert row.seconds_to_target == pytest.approx(1e3 * row.timing.seconds / given.timing.seconds)


def test_the_values_are_plain() -> None:
    values = json.loads(json.dumps(left_open().values(OPEN)))
    assert [each["strategy"] for each in values["ranges"]] == [PLAIN]
    (low, high), (short, long) = (values["ranges"][0][key] for key in ("samples_per_second", "seconds_per_step"))
    assert low * long == pytest.approx(512)
    assert high * short == pytest.approx(512)
    assert {each["key"] for each in values["facts"]} >= {"card.count", "card.transport", "engine.spread"}
    (other,) = values["answers"]
    assert other["strategy"] == ONE
    assert {"the transport of the network": "TCP at 8 Gbit/s of a card"} in other["values"]
    assert values["timed"] == [PLAIN, ONE]
    assert values["complete"] is True
