"""Means of models after the same step, from workers that reach it at different times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dure.run.gathering import Gathering

SETUP: Any = SimpleNamespace(
    parts=1,
    stages=None,
    reports=lambda rank: True,
    shard_of=lambda rank: 0,
    delivery=SimpleNamespace(merge_buffers=torch.stack),
)
"""Of a run without a pipeline, whose buffers are merged by stacking them."""


def test_a_mean_is_given_once_all_have_reached_its_step():
    gathering = Gathering(SETUP)
    model = torch.tensor([1.0])
    gathering.add(4, 0, model, updates=4)
    gathering.add(8, 0, model * 2, updates=8)
    model[0] = 100.0  # a worker goes on
    assert gathering.complete(3) == []
    gathering.add(4, 1, torch.tensor([5.0]), updates=3)
    ((step, values, buffers, updates),) = gathering.complete(7)
    assert (step, values.item(), buffers, updates) == (4, 3.0, None, 7)
    assert gathering.complete(7) == []
    assert gathering
    assert [found.step for found in gathering.complete(9)] == [8]
    assert not gathering


def test_weights_count_and_buffers_come_in_rank_order():
    gathering = Gathering(SETUP)
    for rank, value in ((2, 6.0), (0, 2.0)):
        gathering.add(1, rank, torch.tensor([value]), updates=1, weight=rank + 1.0, buffers=torch.tensor([value]))
    (found,) = gathering.complete(1)
    assert found.values.item() == (3 * 6.0 + 2.0) / 4
    assert found.buffers is not None
    assert found.buffers.tolist() == [[2.0], [6.0]]
