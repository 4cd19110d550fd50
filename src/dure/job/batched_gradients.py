"""Stacked gradients: the interface `Stacked`, the memory of stacks, and `Vmapped`, by `torch.func.vmap`.

Rows of stacked tensors start at multiples of 64 bytes. Kernels treat unaligned edges differently, and so treat every
row of a stack alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dure.job.data.structure import Batch, arguments, joined, keywords

if TYPE_CHECKING:
    from dure.job.gradient import GradientWork
    from dure.job.replica import Layer, Replica

Loss = Callable[[Any, Any], Tensor]


class Stacked(Protocol):
    """A way to compute several gradients of equal shapes at once."""

    describe: str
    least: int
    """Least number of pending gradients for which the engine uses it."""
    fewest: int
    """Fewest gradients in one stack, where the engine divides more than the most into several stacks."""

    def evaluate(self, works: Sequence[GradientWork]) -> tuple[Tensor, Tensor]:
        """Compute flat gradients, one per row of a new tensor, and the losses; the host does not wait for them."""
        ...


class StackMemory:
    """Memory for a stack of tensors of one shape, kept between uses, since new pages cost more than the copy."""

    def __init__(self, shape: Sequence[int], like: Tensor) -> None:
        self.shape = torch.Size(shape)
        self._memory = like.new_empty(0)

    def stack(self, tensors: list[Tensor]) -> Tensor:
        """Copy `tensors` into a stack (len(tensors), *shape), valid until the next call."""
        if len(self._memory) < len(tensors):
            self._memory = aligned_rows(len(tensors), self.shape.numel(), self._memory)
        room = self._memory[: len(tensors), : self.shape.numel()].view(-1, *self.shape)
        return torch.stack(tensors, out=room)


def aligned_rows(count: int, numel: int, like: Tensor) -> Tensor:
    """New memory for `count` rows of at least `numel` elements, each row at a multiple of 64 bytes."""
    return like.new_empty(count, numel + -numel % 16)


def part_of(rows: Tensor, layer: Layer) -> Tensor:
    """A view of one parameter in every row: (rows, *its shape)."""
    return rows[:, layer.start : layer.stop].view(-1, *layer.shape)


def present(batch: Batch | None) -> Batch:
    """The batch of a work, which has one except in timing-only runs."""
    assert batch is not None
    return batch


def _places(replica: Replica) -> dict[str, str]:
    """Every place of a parameter in the module, with the name of its layer; each place once.

    `functional_call` with `tie_weights` sets a module that has two names twice, and so never sets it back.
    """
    names = {id(each): layer.name for each, layer in zip(replica.parameters, replica.layers, strict=True)}
    return {
        f"{path}.{name}" if path else name: names[id(each)]
        for path, part in replica.module.named_modules()
        for name, each in part._parameters.items()
        if id(each) in names
    }


class Vmapped:
    """Computes stacked gradients by `torch.func.vmap` over stacked parameters, if at least `least` are pending."""

    def __init__(self, replica: Replica, loss: Loss, least: int) -> None:
        self.least = least
        self.fewest = least // 2
        self.describe = f"vmap, where at least {least} are pending"
        self._layers = replica.layers
        self._values = StackMemory([replica.numel], replica.params)
        module, places = replica.module, _places(replica)

        def loss_at(parameters: Mapping[str, Tensor], inputs: Batch, targets: Batch) -> Tensor:
            placed = {place: parameters[name] for place, name in places.items()}
            outputs = torch.func.functional_call(module, placed, arguments(inputs), keywords(inputs), tie_weights=False)
            return loss(outputs, targets)

        self._gradients = torch.func.vmap(torch.func.grad_and_value(loss_at), randomness="error")

    def evaluate(self, works: Sequence[GradientWork]) -> tuple[Tensor, Tensor]:
        values = self._values.stack([work.values for work in works])
        inputs = joined(torch.stack, [present(work.inputs) for work in works])
        targets = joined(torch.stack, [present(work.targets) for work in works])
        parameters = {layer.name: part_of(values, layer) for layer in self._layers}
        gradients, losses = self._gradients(parameters, inputs, targets)
        result = aligned_rows(len(values), values.shape[1], values)[:, : values.shape[1]]
        for layer in self._layers:
            part_of(result, layer).copy_(gradients[layer.name])
        return result, losses
