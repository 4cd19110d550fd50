"""The memory around a worker's parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from dure.sync.worker_state import Storage
from dure.topology.replica import Pulled


def test_a_pull_beside_the_gradient_is_not_received_in_the_memory_of_the_module() -> None:
    """The module computes there meanwhile, on the parameters of the pull before."""
    home = torch.zeros(3)
    worker: Any = SimpleNamespace(params=home, rank=0)
    storage, rooms = Storage(), set()
    coming = storage.room(worker)
    for step in range(6):
        storage.settle(worker, home)  # the step before has computed there
        storage.adopt(worker, Pulled(coming.fill_(step), [step]))
        coming = storage.room(worker)
        storage.settle(worker, home)
        rooms.add(coming.data_ptr())
        assert coming is not home
        assert home.tolist() == [step] * 3
    assert len(rooms) == 2, "memory is used again"
