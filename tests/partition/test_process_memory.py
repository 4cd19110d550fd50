"""Splitting a model under an enforced limit of memory: one process fails, and two train the same model."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path

import pytest
import torch
from support.cgroups import can_limit_memory, limited
from support.runs import local, resolved, virtual
from torch import nn
from torch.nn.functional import cross_entropy

from dure.errors import DureError
from dure.job.data.loaders import load_digits
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


def bytes_of_tensors() -> int:
    """Bytes of the storages of all tensors. The memory of a test process changes by what other tests left, too."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor):
            with contextlib.suppress(NotImplementedError):  # wrappers, which have no storage
                found[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(found.values())


@pytest.mark.long
@pytest.mark.skipif(not can_limit_memory(), reason="only root can limit the memory of processes, in a control group")
def test_two_processes_train_a_model_that_one_process_has_no_room_for():
    options = OPTIONS | {"optimizer": "momentum:lr=0.01"}
    with limited(LIMIT) as (server, _), pytest.raises(DureError) as caught:
        local(TEXT, "bsp collective", workers=1, fork_server=server, **options)
    assert "worker 0 needs 323,9" in str(caught.value)
    assert "optimizer 80,98" in str(caught.value)
    assert f"its control group allows {LIMIT:,}. Shard it, as in --partition zero:stage=3, split" in str(caught.value)

    strategy = "bsp collective gpipe:stages=2,micro=2"
    with limited(LIMIT) as (server, used):
        cut = local(TEXT, strategy, workers=2, fork_server=server, **options)
    assert torch.equal(cut.params, virtual(TEXT, strategy, workers=2, **options).params)
    if used:
        assert all(LIMIT / 3 < nbytes <= LIMIT for nbytes in used.values()), used


def test_the_process_of_a_stage_keeps_its_own_parameters_alone():
    setup, _ = resolved(TEXT, "bsp collective gpipe:stages=2", workers=4, on="local")
    stages = setup.stages
    stages.prepare()
    own, bounds, whole = stages.modules[1].replica.params.clone(), stages.layout.bounds, stages.whole.replica
    before = bytes_of_tensors()
    stages.keep(1)
    freed = 2 * whole.params.nbytes + 2 * stages.modules[0].replica.params.nbytes + own.nbytes  # with gradients
    assert abs(before - bytes_of_tensors() - freed) < 100
    assert torch.equal(stages.modules[1].replica.params, own)
    assert (whole.numel, stages.layout.bounds) == (20_247_370, bounds)
