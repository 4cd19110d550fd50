"""Splitting a model under an enforced limit of memory: one process fails, and two train the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cgroups import can_limit_memory, limited
from support.runs import local, virtual
from torch import nn
from torch.nn.functional import cross_entropy

from dure.errors import DureError
from dure.job.data.digits import load_digits
from dure.job.job import Job

WIDTH = 2240
LIMIT = 300 * 2**20
OPTIONS = {"steps": 2, "seed": 3}


def model() -> nn.Module:
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    return nn.Sequential(nn.Linear(64, WIDTH), *hidden, nn.Linear(WIDTH, 10))


def large() -> Job:
    """81 MB of weights; 324 MB with their gradient, momentum and the gradients of a backward."""
    data = load_digits()
    return Job(model, cross_entropy, data.train, data.test, batch_size=4, name="large")


TEXT = f"{Path(__file__)}:large"


@pytest.mark.skipif(not can_limit_memory(), reason="only root can limit the memory of processes, in a control group")
def test_two_processes_train_a_model_that_one_process_has_no_room_for():
    options = OPTIONS | {"optimizer": "momentum:lr=0.01"}
    with limited(LIMIT) as (server, _), pytest.raises(DureError) as caught:
        local(TEXT, "bsp collective", workers=1, fork_server=server, **options)
    assert "worker 0 needs 323,9" in str(caught.value)
    assert "optimizer 80,98" in str(caught.value)
    assert f"its control group allows {LIMIT:,}. Split the model by layers" in str(caught.value)

    strategy = "bsp collective gpipe:stages=2,micro=2"
    with limited(LIMIT) as (server, used):
        cut = local(TEXT, strategy, workers=2, fork_server=server, **options)
    assert torch.equal(cut.params, virtual(TEXT, strategy, workers=2, **options).params)
    if used:
        assert all(LIMIT / 3 < nbytes <= LIMIT for nbytes in used.values()), used
