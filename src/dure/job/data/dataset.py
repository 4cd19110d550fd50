"""Data sets of a job: a length, and a batch for any indices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from dure.errors import UsageError
from dure.job.data.structure import Batch, checked, mapped, tensors

if TYPE_CHECKING:
    from dure.job.data.split import BatchSampler, Split


class DataSet(Protocol):
    """The types of a job's `train` and `test`: `Data`, `Samples` or `Stream`. Samples are numbered from 0."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, draw: Sequence[int] = ()) -> tuple[Batch, Batch]:
        """Return inputs and targets of the samples `indices` (int64), in that order.

        Random transforms draw from a generator that is seeded with `draw`.
        """
        ...

    def samplers(self, split: Split, batch_sizes: Sequence[int], *, seed: int) -> Sequence[BatchSampler]:
        """Make one sampler per worker according to `split`; worker k has batches of `batch_sizes[k]`.

        Raises `UsageError` if the data cannot be split in this way.
        """
        ...

    def steps(self, epochs: float, batch: int) -> int:
        """Number of steps of `batch` samples in `epochs` passes."""
        ...

    def to(self, dtype: torch.dtype) -> DataSet:
        """The same data set with floating-point values of `dtype`."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """Samples in memory: row i of `inputs` belongs to row i of `targets`.

    Each is a tensor, a mapping of tensors or a tuple of tensors, all of one length. A mapping of inputs is given to the
    model as `model(**inputs)`, a tuple as `model(*inputs)`; the loss gets `(outputs, targets)`.

    >>> import torch
    >>> data = Data(torch.zeros(3, 8), torch.tensor([0, 1, 2]))
    >>> inputs, targets = data.batch(torch.tensor([2, 0]))
    >>> len(data), tuple(inputs.shape), targets.tolist()
    (3, (2, 8), [2, 0])
    >>> data = Data({"ids": torch.zeros(3, 5), "mask": torch.ones(3, 5)}, torch.tensor([0, 1, 2]))
    >>> inputs, targets = data.batch(torch.tensor([1]))
    >>> inputs["mask"].shape
    torch.Size([1, 5])
    """

    inputs: Batch
    targets: Batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", checked(self.inputs, "Data.inputs"))
        object.__setattr__(self, "targets", checked(self.targets, "Data.targets"))
        inputs, targets = tensors(self.inputs), tensors(self.targets)
        if any(each.dim() == 0 for each in (*inputs, *targets)):
            raise UsageError("Data needs tensors whose first dimension counts samples, got a scalar. Write x[None].")
        for what, value, parts in (("inputs", self.inputs, inputs), ("targets", self.targets, targets)):
            lengths = [len(each) for each in parts]
            if len(set(lengths)) > 1:
                keys = list(value) if isinstance(value, dict) else range(len(parts))
                found = ", ".join(f"{key}: {length}" for key, length in zip(keys, lengths, strict=True))
                raise UsageError(
                    f"the tensors of Data.{what} must have one row per sample each, got different lengths ({found}). "
                    "Give tensors with the same first dimension."
                )
        if len(inputs[0]) != len(targets[0]):
            raise UsageError(
                f"Data needs one target per input, got {len(inputs[0])} inputs and {len(targets[0])} targets. "
                "Give tensors with the same first dimension."
            )
        if len(self) == 0:
            raise UsageError("Data needs at least one sample, got none.")

    def __len__(self) -> int:
        return len(tensors(self.targets)[0])

    def batch(self, indices: Tensor, draw: Sequence[int] = ()) -> tuple[Batch, Batch]:
        """Copy the rows `indices` (int64), in that order."""
        inputs, targets = self.inputs, self.targets
        if isinstance(inputs, Tensor) and isinstance(targets, Tensor):
            return inputs.index_select(0, indices), targets.index_select(0, indices)  # faster than [indices]

        def rows(each: Tensor) -> Tensor:
            return each.index_select(0, indices)

        return mapped(rows, inputs), mapped(rows, targets)

    def samplers(self, split: Split, batch_sizes: Sequence[int], *, seed: int) -> Sequence[BatchSampler]:
        """As `DataSet`."""
        labels = self.targets if isinstance(self.targets, Tensor) else no_labels(len(self))
        return split.samplers(labels, batch_sizes, seed=seed)

    def steps(self, epochs: float, batch: int) -> int:
        """As `DataSet`."""
        return math.ceil(epochs * len(self) / batch)

    def to(self, dtype: torch.dtype) -> Data:
        """As `DataSet`."""

        def cast(each: Tensor) -> Tensor:
            return each.to(dtype) if each.is_floating_point() else each

        return Data(mapped(cast, self.inputs), mapped(cast, self.targets))


def no_labels(samples: int) -> Tensor:
    """Placeholder for the targets of data without a tensor of labels: shape (samples, 0)."""
    return torch.empty(samples, 0)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a loader. `source` states in words how many samples were found, and where."""

    train: Data
    test: Data
    source: str
