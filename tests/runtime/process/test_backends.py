"""The backends of a process group of ranks on devices; the choices without an existing group are in the doctest."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.wording import raising

from dure.errors import UsageError
from dure.runtime.launch.engine_store import BLOCKING_WAIT
from dure.runtime.process import group as engine
from dure.runtime.process.group import backends_of, place_of

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize("given", ["cpu:gloo,cuda:ucc", "cuda:ucc"])
def test_the_choice_of_an_existing_group_is_kept_and_control_is_on_gloo(given):
    assert backends_of(CUDA, ["a/cuda:0", "a/cuda:1"], given) == "cpu:gloo,cuda:ucc"


def test_an_existing_group_without_the_device_gets_the_default_backend():
    assert backends_of(CUDA, ["a/cuda:0", "a/cuda:1"], "cpu:gloo") == "cpu:gloo,cuda:nccl"


def test_a_group_of_the_cpu_is_on_gloo_whatever_exists():
    assert backends_of(torch.device("cpu"), ["cpu", "cpu"], "cuda:nccl") == "gloo"


def test_ranks_on_different_types_of_device_are_refused():
    with raising(UsageError, "different"):
        backends_of(CUDA, ["a/cuda:0", place_of(torch.device("cpu"))])


def test_a_device_without_a_known_backend_is_refused_with_the_call_that_names_one():
    with raising(UsageError, "cpu:gloo,xla:<backend>"):
        backends_of(torch.device("xla:0"), ["a/xla:0", "a/xla:1"])


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize("given", [None, "cpu:gloo,cuda:nccl"])
def test_a_group_of_nccl_is_created_without_its_watchdog_and_groups_of_the_user_keep_theirs(given, before, monkeypatch):
    if before is None:
        monkeypatch.delenv(BLOCKING_WAIT, raising=False)
    else:
        monkeypatch.setenv(BLOCKING_WAIT, before)
    created = []
    for name in ("new_group", "init_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, **__: created.append(os.environ[BLOCKING_WAIT]))
    monkeypatch.setattr(dist, "is_initialized", lambda: given is not None)
    monkeypatch.setattr(dist, "get_backend_config", lambda: given)
    monkeypatch.setattr(engine, "place_of", lambda device: f"a/{device}")
    rendezvous = SimpleNamespace(
        place=SimpleNamespace(world_size=2), store=dist.HashStore(), exchange=lambda *_: ["a/cuda:0", "a/cuda:1"]
    )
    engine.Engine(SimpleNamespace(rank=0), rendezvous, CUDA)
    assert created == ["1"]
    assert os.environ.get(BLOCKING_WAIT) == before
