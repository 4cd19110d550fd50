"""The result of a run, from what workers and servers report."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dure.run.gathering import merged_buffers
from dure.run.outcome import Totals
from dure.run.snapshots import Delivered, count_servers, count_steps, count_updates, model_of_workers


def setup(delivers="replica", *offers):
    merge = lambda found: torch.stack(list(found)).sum(dim=0)  # noqa: E731
    strategy = SimpleNamespace(topology=SimpleNamespace(offers=offers))
    delivery = SimpleNamespace(merge_buffers=merge)
    return SimpleNamespace(stages=None, traits=SimpleNamespace(delivers=delivers), strategy=strategy, delivery=delivery)


def delivered():
    return {f"worker {rank}": Delivered(torch.full((2,), float(rank)), None) for rank in (10, 2, 3)}


@pytest.mark.parametrize(
    ("delivers", "offers", "value"),
    [
        ("replica", ("peers",), 2.0),
        ("mean", ("group",), 2.0),
        ("mean", ("mean gradient",), 2.0),
        ("mean", ("peers",), 5.0),
    ],
)
def test_workers_that_are_alike_deliver_the_first_ones_model_and_others_the_mean(delivers, offers, value):
    assert model_of_workers(setup(delivers, *offers), delivered()).tolist() == [value] * 2


def test_buffers_are_merged_where_there_are_any():
    assert merged_buffers(setup(), {}) is None
    found = merged_buffers(setup(), {10: torch.ones(1), 2: torch.full((1,), 2.0)})
    assert found is not None
    assert found.tolist() == [3.0]


def test_without_a_clock_each_step_that_was_not_refused_is_an_update():
    totals = Totals()
    reports = {"worker 0": {"done": 10, "refused": 3, "updates": 6}, "worker 1": {"done": 5, "updates": 5}}
    assert count_steps(totals, reports) == 11
    assert totals.counts["updates_applied"] == totals.staleness.histogram[0] == 12


def test_updates_are_those_of_the_shard_with_the_highest_staleness():
    statuses = {
        "server 0": {"staleness": {"0": 4}, "applied": 4, "refused": 0},
        "server 1": {"staleness": {"0": 1, "2": 2}, "applied": 3, "refused": 1, "written": 7},
    }
    totals = Totals()
    count_servers(totals, statuses)
    count_updates(totals, statuses)
    assert totals.per_shard["server 1"] == {"applied": 3, "refused": 1, "written": 7}
    assert totals.per_shard["server 0"] == {"applied": 4, "refused": 0}
    assert (totals.counts["updates_applied"], totals.counts["updates_refused"]) == (3, 1)
    assert totals.staleness.histogram == {0: 1, 2: 2}
