"""The plan of a split: the layers that are split, the way of each, and the place of each shard in its parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dure.core.vectors import equal_ranges
from dure.errors import UsageError
from dure.job.replica import draws

if TYPE_CHECKING:
    from collections.abc import Callable

    from dure.partition.tensor.ways import Ways


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The entries `index` of a parameter along the dimension `dim`, in this order."""

    dim: int
    index: Tensor

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of the part of a tensor of the shape `whole`."""
        return (*whole[: self.dim], self.index.numel(), *whole[self.dim + 1 :])

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor; a copy."""
        return whole.index_select(self.dim, self.index.to(whole.device))

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Set the entries of this shard in `whole`, in place."""
        whole.index_copy_(self.dim, self.index.to(whole.device), part.to(whole.device))


def even_shards(length: int, size: int, dim: int, unit: int = 1) -> list[ParameterShard]:
    """Consecutive shards of a dimension of `length` entries for `size` workers, as even as whole units allow.

    >>> [each.index.tolist() for each in even_shards(10, 2, dim=0, unit=2)]
    [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    """
    ranges = equal_ranges(length // unit, size)
    return [ParameterShard(dim, torch.arange(start * unit, stop * unit)) for start, stop in ranges]


class LayerSplit(Protocol):
    """The split of one layer over the workers."""

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        """The shards of the layer's parameters and buffers, by their names in it: for each worker one.

        What is left out is whole at every worker.
        """
        ...

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        """The part of a whole layer at a worker, with parameters of the same names in the same order."""
        ...


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """The split of each layer, by the layer's name in the model; that of the model itself, named "", is the last.

    `partial`: the names of parameters that are whole at every worker, and whose gradients there are to be summed over
    the workers. Those of all other whole parameters are the same at all. `inside`: the names of modules between split
    layers that may draw random numbers, each worker its own. `loss` replaces the job's where the outputs are split.
    """

    layers: Mapping[str, LayerSplit]
    partial: frozenset[str] = field(default_factory=frozenset)
    inside: frozenset[str] = field(default_factory=frozenset)
    loss: Callable[[Ways, Any, Any], Tensor] | None = None

    def shards(self, module: nn.Module, size: int) -> dict[str, Sequence[ParameterShard]]:
        """The shards of the parameters and buffers of a whole model that are split, by their names in it."""
        return {
            f"{path}.{name}" if path else name: shards
            for path, split in self.layers.items()
            for name, shards in split.shards(module.get_submodule(path), size).items()
        }

    def apply(self, module: nn.Module, ways: Ways) -> nn.Module:
        """Replace the layers of a whole model, in place, by their parts at a worker; return the model."""
        ways.draws = any(draws(part) for name in self.inside for part in module.get_submodule(name).modules())
        ties = _ties(module)
        frozen = [name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad]
        for path, split in self.layers.items():
            part = split.split(module.get_submodule(path), ways)
            owner, _, name = path.rpartition(".")
            if path:
                setattr(module.get_submodule(owner), name, part)
            else:
                module = part
        for first, *others in ties:
            for other in others:
                _tie(module, first, other)
        for name in frozen:
            module.get_parameter(name).requires_grad_(False)
        return module


def _ties(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _tie(module: nn.Module, first: str, other: str) -> None:
    """Let a parameter be another. Raises `UsageError` if they were split in different ways."""
    shared = module.get_parameter(first)
    if module.get_parameter(other).shape != shared.shape:
        raise UsageError(
            f"the parameters {first!r} and {other!r} are one, and the plan splits them in different ways: split both "
            "alike, or leave both whole."
        )
    owner, _, name = other.rpartition(".")
    setattr(module.get_submodule(owner), name, shared)
