"""The search of a plan: what is timed, and until when."""

import math
import time

import pytest

from dure.job.initial_model import shapes_of
from dure.job.job import load_job
from dure.planner import search as searching
from dure.planner import side_by_side
from dure.planner.bound import least_seconds
from dure.planner.candidates import ONE, Scene, roomy, shape_of, single
from dure.planner.ranking import Ranked
from dure.planner.search import Found, search
from dure.planner.side_by_side import Deadline
from dure.planner.timing import timed
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, Trace


def scene(memory):
    return Scene(load_job("digits-mlp"), Cluster(machines=(Machines(count=4, memory=memory),)), 128)


def test_without_time_one_machine_and_plain_data_parallelism_are_timed_and_the_others_have_bounds():
    found = search(scene(None), Deadline(-1.0))
    assert {row.strategy for row in found.rows} == {ONE, "bsp"}
    assert ["bsp", *found.left] == list(dict.fromkeys(single(shape_of(scene(None)))))
    assert all(least > 0 for least in found.left.values())


def test_the_blocks_of_a_large_model_are_measured_once_for_all_processes():
    here = Scene(shapes_of(load_job("digits-mlp")), Cluster.uniform(4), 128)
    assert search(here, Deadline(-1.0)).left
    assert any("profile" in key for key in here.model.replica.figures)


def test_strategies_are_timed_in_the_order_of_their_bounds(monkeypatch):
    timed = []
    real = searching.timings

    def noted(scenes, wanted, *others):
        timed.append([strategy for _, strategy in wanted])
        return real(scenes, wanted, *others)

    monkeypatch.setattr(searching, "timings", noted)
    monkeypatch.setattr(side_by_side, "_timed", lambda scenes, wanted, began: "it is refused.")
    here = scene(None)
    found = search(here, Deadline(math.inf))
    assert timed[:2] == [[ONE], ["bsp"]]
    bounds = [least_seconds(here, strategy) for strategy in timed[2]]
    assert bounds == sorted(bounds)
    assert bounds[0] < bounds[-1]
    first = [ONE, *dict.fromkeys(single(shape_of(here)))]
    assert found.order[: len(first)] == first


@pytest.mark.parametrize(("memory", "first"), [(None, ONE), (20_000, None)])
def test_where_no_worker_has_memory_for_the_model_pipelines_with_split_layers_are_timed_first(
    monkeypatch, memory, first
):
    monkeypatch.setattr(side_by_side, "_timed", lambda scenes, wanted, began: "it is refused.")
    kind = Machines(count=2, workers=2, memory=memory)
    here = Scene(load_job("digits-mlp"), Cluster(machines=(kind,)), 128)
    found = search(here, Deadline(math.inf))
    assert found.order[0] == (first or next(roomy(shape_of(here))))


def test_one_machine_is_no_answer_where_nothing_else_could_be_timed():
    found = Found(rows=[Ranked(ONE, None, 1.0)], order=[ONE, "bsp"], left={"bsp": 1.0})
    assert not found.has_answer
    del found.left["bsp"]  # refused, as it does not fit
    assert found.has_answer


@pytest.mark.long
def test_a_strategy_that_takes_long_keeps_none_of_the_others_from_being_timed(monkeypatch):
    def slowed(scenes, wanted, began):
        if wanted[1] == "bsp":
            began(lambda: 1e3)
            time.sleep(600)
        return "it is refused."

    monkeypatch.setattr(side_by_side, "_timed", slowed)
    monkeypatch.setattr(searching, "LEAST", 0.1)
    found = search(scene(None), Deadline(4.0))
    assert found.left == {"bsp": 1e3}
    assert len(found.refused) > 20


@pytest.mark.parametrize(
    ("gbits", "workers"),
    [(0.1, 4), *(pytest.param(*each, marks=pytest.mark.long) for each in [(0.1, 1), (10, 1), (10, 4)])],
)
def test_no_strategy_is_faster_than_its_bound(gbits, workers):
    link = Link(bandwidth=gbits * 1.25e8)
    kinds = (Machines(count=3, workers=workers), Machines(count=1, workers=workers, speed=0.6))
    here = Scene(load_job("digits-mlp"), Cluster(machines=kinds, link=link), 32 * 4 * workers)
    found = search(here, Deadline(math.inf))
    assert len(found.rows) > 20
    for row in found.rows:
        # durations of workers that do not meet are drawn with a spread of 2 %
        assert row.timing.seconds >= 0.97 * least_seconds(here, row.strategy), row.strategy


def test_the_bound_of_plain_data_parallelism_is_that_of_the_ring_and_the_slowest_worker():
    job = load_job("digits-mlp")
    kinds = (Machines(count=3), Machines(count=1, speed=0.5))
    nbytes = 4 * sum(each.numel() for each in job.build(0).parameters())
    slow = Scene(job, Cluster(machines=kinds, link=Link(bandwidth=1e6)), 128)
    assert least_seconds(slow, "bsp") == pytest.approx(2 * 3 / 4 * nbytes / 1e6)
    assert least_seconds(slow, "averaging:period=8") == pytest.approx(2 * 3 / 4 * nbytes / 8e6)
    assert least_seconds(slow, "bsp ps:shards=2") == pytest.approx(4 / 2 * nbytes / 1e6)
    fast = Scene(job, Cluster(machines=kinds, link=Link(bandwidth=1e12)), 128)
    step = kinds[0].compute.mean(32 * job.flops_per_sample)
    assert least_seconds(fast, "bsp") == pytest.approx(step / 0.5)


def test_the_bounds_of_shards_count_what_nothing_is_computed_beside():
    job = load_job("digits-mlp")
    kind = Machines(count=4)
    nbytes = [4 * sum(each.numel() for each in layer.parameters()) for layer in job.build(0)]
    first, last = (each for each in nbytes if each)
    whole, step = first + last, kind.compute.mean(32 * job.flops_per_sample)
    slow = Scene(job, Cluster(machines=(kind,), link=Link(bandwidth=1e6)), 128)
    once = 3 / 4 * whole / 1e6
    assert least_seconds(slow, "bsp zero:stage=1") == least_seconds(slow, "bsp zero:stage=2") == pytest.approx(2 * once)
    assert least_seconds(slow, "bsp zero:stage=3") == pytest.approx((3 - last / whole) * once)
    fast = Scene(job, Cluster(machines=(kind,), link=Link(bandwidth=1e10)), 128)
    once /= 1e4
    assert least_seconds(fast, "bsp zero:stage=1") == pytest.approx(step + once)
    assert least_seconds(fast, "bsp zero:stage=3") == pytest.approx(step + 2 * first / whole * once)
    assert least_seconds(fast, "bsp zero:stage=1,within=2") == pytest.approx(step)


def test_a_partition_without_room_is_tried_with_more_of_its_memory_sharded(monkeypatch):
    def refused(scenes, wanted, began):
        strategy = wanted[1]
        return "it needs 9 bytes of memory or more." if strategy in ("bsp zero:stage=1", "bsp tensor:ways=2") else "no."

    monkeypatch.setattr(side_by_side, "_timed", refused)
    found = search(scene(None), Deadline(math.inf))
    more = [each for each in found.order if "+zero" in each or "zero:stage=2" in each]
    more = more[:3]  # later ones are those of a search in which nothing fits
    first = ["bsp zero:stage=2", "bsp tensor:ways=2+zero:stage=1", "bsp tensor:ways=2+zero:stage=3"]
    assert set(more) == set(first)


def test_updates_of_fast_workers_and_of_those_beside_servers_load_no_slow_card():
    """Worker 0 is beside the server and a thousand times as fast: most updates cross no card."""
    kinds = (Machines(speed=1000.0), Machines(count=2), Machines(link=Link(bandwidth=1e4)))
    job = load_job("digits-mlp")
    here = Scene(job, Cluster(machines=kinds), 4 * 32)
    nbytes = 4 * sum(each.numel() for each in job.build(0).parameters())
    for strategy in ("downpour ps:colocated=true", "downpour ps:shards=2", "bsp ps:colocated=true", "k-sync:k=1"):
        assert timed(here, strategy).seconds >= 0.97 * least_seconds(here, strategy), strategy
    hosts = (Machines(gpus=8), Machines(gpus=4), Machines(gpus=1, link=Link(bandwidth=5e6)))
    unequal = Scene(job, Cluster(machines=hosts, link=Link(bandwidth=1e7)), 13 * 32)
    assert least_seconds(unequal, "bsp ps:colocated=true") == pytest.approx(5 * nbytes / (0.88 * 1e7))
    assert least_seconds(unequal, "bsp ps:shards=2") == pytest.approx(8 * nbytes / (0.88 * 1e7))
    assert least_seconds(unequal, "downpour ps") == pytest.approx(13 * nbytes / 1e7)


@pytest.mark.parametrize("compute", [Trace(durations=[0.01, 0.02]), Constant(seconds=0.01)])
def test_steps_of_stated_seconds_have_a_bound_though_no_speed(compute):
    here = Scene(load_job("digits-mlp"), Cluster(machines=(Machines(count=4, compute=compute),)), 128)
    assert least_seconds(here, "bsp") >= 0.01
    for strategy in single(shape_of(here)):
        assert least_seconds(here, strategy) >= 0
