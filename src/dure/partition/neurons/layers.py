"""The layers of units of a model: dense and locally connected ones, in the order of an `nn.Sequential`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.models.local import LocallyConnected2d
from dure.partition.blocks import is_sequence
from dure.partition.tensor.pairs import ELEMENTWISE


@dataclass(frozen=True, slots=True)
class UnitLayer:
    """A layer that reads `inputs` numbers. Its units stand on a `grid` of (channels, height, width).

    A dense layer is one row of units. Row i of each parameter belongs to unit i. `reads` holds the inputs that each
    unit reads; None: all.
    """

    name: str
    inputs: int
    grid: tuple[int, int, int]
    reads: Tensor | None

    @property
    def units(self) -> int:
        """The number of its units."""
        return math.prod(self.grid)

    @property
    def places(self) -> int:
        """The places of its grid, at each of which there is a unit of each channel."""
        return self.grid[1] * self.grid[2]

    @property
    def fan_in(self) -> int:
        """The inputs of a unit."""
        return self.inputs if self.reads is None else self.reads.shape[1]

    def inputs_of(self, units: Tensor) -> Tensor:
        """The inputs that some of `units` read, in order."""
        if self.reads is None:
            return torch.arange(self.inputs if units.numel() else 0)
        found: Tensor = self.reads[units].unique()  # type: ignore[no-untyped-call]
        return found


class UnitModel(NamedTuple):
    """The layers of units of a model, and the names of the modules with random numbers between them."""

    layers: Sequence[UnitLayer]
    inside: frozenset[str]


def unit_model(module: nn.Module) -> UnitModel:
    """The layers of units of an `nn.Sequential`. Raises `UsageError` for a model that has other layers between them.

    Behind the last of them there may be any layers without parameters, and before the first too.
    """
    if not is_sequence(module):
        raise UsageError(
            f"units of a model can be assigned if it is an nn.Sequential of dense and locally connected layers without "
            f"a forward of its own, and this one is a {type(module).__name__}: write it as one, or split its layers by "
            "tensor:ways=2."
        )
    found: list[UnitLayer] = []
    behind: list[tuple[str, nn.Module]] = []
    inside: set[str] = set()
    for name, layer in _in_order("", module):
        if type(layer) in (nn.Linear, LocallyConnected2d):
            unit_layer = _unit_layer(name, layer)
            if found:
                _check_between(found[-1], unit_layer, behind)
                inside.update(place for place, each in behind if isinstance(each, nn.Dropout))
            found.append(unit_layer)
            behind = []
        elif next(layer.parameters(), None) is not None or next(layer.buffers(), None) is not None:
            raise UsageError(_refusal(name, layer, "has parameters or buffers of other layers"))
        else:
            behind.append((name, layer))
    _check_own(module)
    if not found:
        raise UsageError(
            f"this {type(module).__name__} has no dense or locally connected layer whose units could move."
        )
    return UnitModel(found, frozenset(inside))


def _in_order(path: str, sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, in the order of the computation; one may come again."""
    for name, layer in sequence._modules.items():
        assert layer is not None
        if is_sequence(layer):
            yield from _in_order(f"{path}{name}.", layer)
        else:
            yield f"{path}{name}", layer


def _check_own(module: nn.Module) -> None:
    """Raise `UsageError` for a parameter of two layers: its units would have two owners."""
    names: dict[int, str] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(each), name)
        if first != name:
            raise UsageError(
                f"the parameters {first} and {name} are one, and a weight is with the unit that reads by it: give each "
                "layer its own."
            )


def _unit_layer(name: str, layer: nn.Module) -> UnitLayer:
    if isinstance(layer, nn.Linear):
        return UnitLayer(name, layer.in_features, (1, 1, layer.out_features), None)
    assert isinstance(layer, LocallyConnected2d)
    return UnitLayer(name, math.prod(layer.inputs), layer.outputs, layer.reads())


def _check_between(before: UnitLayer, after: UnitLayer, between: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise `UsageError` unless machines can apply the layers between two layers of units to units of their own."""
    flat = before.reads is None or after.reads is not None
    for name, layer in between:
        flattens = isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
        flat = flat or flattens
        if not (flattens or isinstance(layer, (*ELEMENTWISE, nn.Dropout))):
            raise UsageError(_refusal(name, layer, "does not act on each unit alone"))
    if before.units != after.inputs or not flat:
        raise UsageError(
            f"layer {after.name} reads {after.inputs} inputs, and layer {before.name} before it has {before.units} "
            "units: let it read all of them, in one row (nn.Flatten) where it is dense."
        )


def _refusal(name: str, layer: nn.Module, reason: str) -> str:
    return (
        f"layer {name} ({type(layer).__name__}) {reason}, and units are assigned in models of nn.Linear, "
        "LocallyConnected2d, functions of single units, nn.Dropout and nn.Flatten: leave it out, or use tensor:ways=2."
    )
