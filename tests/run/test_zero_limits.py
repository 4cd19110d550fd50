"""Sharded parameters under an enforced limit of memory: one process fails, and two train the same model."""

from pathlib import Path

import pytest
import torch
from support.cgroups import can_limit_memory, limited
from support.runs import local, virtual
from torch import nn
from torch.nn.functional import cross_entropy

from dure.errors import DureError
from dure.job.data.loaders import load_digits
from dure.job.job import Job

WIDTH, BLOCKS = 1120, 16
LIMIT = 340 * 2**20
OPTIONS = {"steps": 3, "seed": 3, "optimizer": "adam:lr=0.001"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not can_limit_memory(), reason="only root can limit the memory of processes, in control groups"),
]


def model() -> nn.Module:
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    return nn.Sequential(nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 10))


def large() -> Job:
    """81 MB of weights in blocks of 5 MB: 323 MB with gradient and Adam's vectors, and the memory of a process.

    A shard of two has half of it, and some blocks that are gathered or scattered.
    """
    data = load_digits()
    return Job(model, cross_entropy, data.train, data.test, batch_size=4, name="large")


TEXT = f"{Path(__file__)}:large"


def test_one_process_has_no_room_and_says_so():
    with limited(LIMIT) as (server, _), pytest.raises(DureError) as caught:
        local(TEXT, "bsp collective", workers=1, fork_server=server, **OPTIONS)
    assert "worker 0 needs 403,446,600 bytes of memory or more (weights 80,689,320" in str(caught.value)
    assert "optimizer 161,378,640" in str(caught.value)
    assert f"its control group allows {LIMIT:,}." in str(caught.value)
    assert "Shard it, as in --partition zero:stage=3" in str(caught.value)


def test_two_processes_in_groups_of_their_own_train_what_one_has_no_room_for():
    with limited(LIMIT) as (server, used):
        sharded = local(TEXT, "bsp collective zero:stage=3", workers=2, fork_server=server, **OPTIONS)
    assert torch.equal(sharded.params, virtual(TEXT, "bsp collective", workers=2, **OPTIONS).params)
    if used:  # the file of the peak is missing in some kernels
        assert sorted(used) == ["worker 0", "worker 1"]
        assert all(LIMIT / 2 < nbytes <= LIMIT for nbytes in used.values()), used
