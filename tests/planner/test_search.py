"""The search of a plan: what is timed, and until when."""

from dure.job.job import load_job
from dure.planner.candidates import Scene, single
from dure.planner.search import Deadline, search, shape_of
from dure.planner.timing import timed
from dure.runtime.virtual.cluster import Cluster, Machines


def scene(memory):
    return Scene(load_job("digits-mlp"), Cluster(machines=(Machines(count=4, memory=memory),)), 128)


def test_plain_data_parallelism_is_timed_without_any_time():
    found = search(scene(None), Deadline(-1.0))
    assert [row.strategy for row in found.rows] == ["bsp"]
    assert found.left == [each for each in dict.fromkeys(single(shape_of(scene(None)))) if each != "bsp"]


def test_without_time_the_search_ends_at_the_first_strategy_that_fits():
    """Memory that is too little for the whole model, and enough for a half of it."""
    whole = timed(scene(None), "bsp").memory.total
    here = scene(whole - 1)
    found = search(here, Deadline(-1.0))
    assert len(found.rows) == 1
    assert found.rows[0].strategy != "bsp"
    assert "bsp" in found.refused
    assert found.left
    assert not set(found.left) & {*found.refused, found.rows[0].strategy}
