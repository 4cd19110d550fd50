"""The tensors that cross the border between two blocks, and the cost of each block, found by one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dure.errors import UsageError
from dure.job.data.structure import Batch, described, tensors

Call = Callable[[nn.Module, Any], Any]
"""The call of a block with the output of the block before."""


class BorderTensor(NamedTuple):
    """A tensor that crosses a border; `gradient`: its gradient comes back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    gradient: bool


@dataclass(frozen=True, slots=True)
class Border:
    """The tensors of a border: one, several of a tuple, or those of a mapping with `keys`."""

    tensors: tuple[BorderTensor, ...]
    keys: tuple[str, ...] | None = None
    single: bool = True

    @classmethod
    def of(cls, value: Any, block: str) -> Border:
        """The border behind a block that gave `value`. Raises `UsageError` for a value that is no `Batch`."""
        found: Batch = value
        parts = [value] if isinstance(value, Tensor) else None
        if isinstance(value, tuple | list) and value:
            found, parts = tuple(value), list(value)
        elif isinstance(value, Mapping) and value:
            parts = list(value.values())
        if parts is None or not all(isinstance(each, Tensor) for each in parts):
            raise UsageError(
                f"{block} returns {described(value)}, which cannot cross a border of stages: a block returns a tensor, "
                "or a tuple or a mapping of tensors. Let it return tensors only, or cut elsewhere."
            )
        specs = tuple(BorderTensor(each.dtype, tuple(each.shape), each.requires_grad) for each in parts)
        return cls(specs, tuple(value) if isinstance(value, Mapping) else None, isinstance(found, Tensor))

    def flat(self, value: Any) -> list[Tensor]:
        """The tensors of `value`, in order. Raises `UsageError` where they differ from those of the border."""
        found = tensors(tuple(value) if isinstance(value, list) else value)
        shapes = [(each.dtype, tuple(each.shape)) for each in found]
        right = [(each.dtype, each.shape) for each in self.tensors]
        if shapes != right:
            raise UsageError(
                f"a stage gave {described(value)} in place of {right}: the tensors between two stages have one shape "
                "for each number of samples. Pad the samples to one length, or cut elsewhere."
            )
        return found

    def value(self, parts: Sequence[Tensor]) -> Batch:
        """The value that `parts` are the tensors of."""
        if self.single:
            return parts[0]
        return tuple(parts) if self.keys is None else dict(zip(self.keys, parts, strict=True))


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block for one micro-batch: operations of its forward, and bytes that its backward keeps."""

    flops: float
    activation_nbytes: int


def measure(
    blocks: Sequence[nn.Module], call: Call, inputs: Any, names: Sequence[str]
) -> tuple[list[Border], list[BlockCost]]:
    """Run `inputs` through the blocks: the border behind each block, and the cost of each.

    Random state is left as it was; the caller takes care of buffers.
    """
    borders, costs = [], []
    value = inputs
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        for block, name in zip(blocks, names, strict=True):
            own = {parameter.data_ptr() for parameter in block.parameters()}
            kept: dict[int, int] = {}

            def keep(tensor: Tensor, own: set[int] = own, kept: dict[int, int] = kept) -> Tensor:
                if tensor.data_ptr() not in own:
                    kept[tensor.data_ptr()] = tensor.nbytes
                return tensor

            counter = FlopCounterMode(display=False)
            with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                value = call(block, value)
            borders.append(Border.of(value, name))
            costs.append(BlockCost(float(counter.get_total_flops()), sum(kept.values())))
    return borders, costs
