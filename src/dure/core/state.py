"""State of an object in a checkpoint: named tensors and plain values, nested under names."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class State:
    """Tensors by name, and plain JSON values: all that an object needs to continue after a restart.

    Objects whose state is tensors alone (coders) or plain values alone (clocks, samplers) use a dictionary instead.

    >>> optimizer = State({"momentum": torch.zeros(2)}, {"steps": 3})
    >>> server = State({"values": torch.zeros(2)}, {"version": 3}) | optimizer.under("optimizer")
    >>> sorted(server.tensors), server.plain
    (['optimizer.momentum', 'values'], {'version': 3, 'optimizer': {'steps': 3}})
    >>> server.part("optimizer").plain
    {'steps': 3}
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)

    def __or__(self, other: State) -> State:
        return State(self.tensors | other.tensors, self.plain | other.plain)

    def under(self, name: str, key: str | None = None) -> State:
        """This state as part `name` of a larger one. `key` replaces `name` as the key of the plain values."""
        return State(with_prefix(f"{name}.", self.tensors), {key or name: self.plain})

    def part(self, name: str, key: str | None = None) -> State:
        """The state that `under` stored with this `name` and `key`. Raises `KeyError` if it is missing."""
        return State(under_prefix(f"{name}.", self.tensors), self.plain[key or name])

    def cloned(self) -> State:
        """A copy that shares no memory with this state."""
        return State({name: tensor.clone() for name, tensor in self.tensors.items()}, copy.deepcopy(self.plain))

    def to(self, device: torch.device) -> State:
        """This state with its tensors on `device`. Tensors that are there already are not copied."""
        return State({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.plain)


def with_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """`named` with `prefix` before each name."""
    return {prefix + name: value for name, value in named.items()}


def under_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """The values whose names start with `prefix`, by the rest of the name.

    >>> under_prefix("owner ", {"owner mean": 1, "own": 2})
    {'mean': 1}
    """
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
