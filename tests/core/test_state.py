"""State of objects: parts, nested under names."""

from __future__ import annotations

import torch
from support.wording import raising

from dure.core.state import State, under_prefix, with_prefix


def nested() -> State:
    inner = State({"momentum": torch.ones(2)}, {"steps": 3})
    middle = State({"values": torch.zeros(2)}, {"version": 1}) | inner.under("optimizer")
    return State({"params": torch.zeros(1)}, {"clock": 7}) | middle.under("shard", "shards")


def test_names_of_nested_parts() -> None:
    state = nested()
    assert sorted(state.tensors) == ["params", "shard.optimizer.momentum", "shard.values"]
    assert state.plain == {"clock": 7, "shards": {"version": 1, "optimizer": {"steps": 3}}}


def test_a_part_is_read_back() -> None:
    inner = nested().part("shard", "shards").part("optimizer")
    assert list(inner.tensors) == ["momentum"]
    assert inner.tensors["momentum"].equal(torch.ones(2))
    assert inner.plain == {"steps": 3}


def test_a_missing_part_is_an_error() -> None:
    with raising(KeyError, "shard"):
        nested().part("shard")


def test_an_empty_part_is_kept() -> None:
    part = State().under("optimizer").part("optimizer")
    assert (part.tensors, part.plain) == ({}, {})


def test_a_clone_shares_no_memory() -> None:
    state = nested()
    copy = state.cloned()
    copy.tensors["params"].fill_(5)
    copy.plain["shards"]["version"] = 9
    assert state.tensors["params"].tolist() == [0.0]
    assert state.plain["shards"]["version"] == 1


def test_a_prefix_takes_its_own_names_alone() -> None:
    named = with_prefix("1 ", {"residual": 1}) | with_prefix("11 ", {"residual": 2})
    assert under_prefix("1 ", named) == {"residual": 1}
