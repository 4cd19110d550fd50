"""Inputs and targets, side by side."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dure.errors import UsageError


@dataclass(frozen=True, slots=True)
class Data:
    """Samples in memory: row i of `inputs` belongs to row i of `targets`.

    >>> import torch
    >>> data = Data(torch.zeros(3, 8), torch.tensor([0, 1, 2]))
    >>> inputs, targets = data.batch(torch.tensor([2, 0]))
    >>> len(data), tuple(inputs.shape), targets.tolist()
    (3, (2, 8), [2, 0])
    """

    inputs: Tensor
    targets: Tensor

    def __post_init__(self) -> None:
        if self.inputs.dim() == 0 or self.targets.dim() == 0:
            raise UsageError("Data needs tensors whose first dimension counts samples, got a scalar. Write x[None].")
        if len(self.inputs) != len(self.targets):
            raise UsageError(
                f"Data needs one target per input, got {len(self.inputs)} inputs and {len(self.targets)} targets. "
                "Give tensors with the same first dimension."
            )
        if len(self.inputs) == 0:
            raise UsageError("Data needs at least one sample, got none.")

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the rows `indices` (int64), in that order."""
        return self.inputs.index_select(0, indices), self.targets.index_select(0, indices)  # faster than [indices]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a loader found. `source` is a sentence for people: how many samples, from where."""

    train: Data
    test: Data
    source: str
