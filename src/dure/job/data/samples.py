"""Map-style data sets, such as `torch.utils.data.Dataset`: samples are read one at a time and collated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dure.core.chance import seeded
from dure.errors import UsageError
from dure.job.data.dataset import no_labels
from dure.job.data.split import BatchSampler, Split
from dure.job.data.structure import Batch, checked, mapped, tensors


@dataclass(frozen=True, slots=True)
class Samples:
    """A map-style `dataset` of `len(dataset)` samples; `dataset[i]` is sample i.

    `collate` makes one batch, `(inputs, targets)`, from a list of samples; each part is a tensor, a mapping or a tuple
    of tensors (`data/structure.py`). The default is `torch.utils.data.default_collate`, for samples `(input, target)`.
    Transforms may draw from PyTorch, NumPy and `random`. Their generators are seeded for each batch from the run's
    seed, the rank and the step, so a repeated run reads the same samples. The split `dirichlet` takes its labels from
    `dataset.targets`.

    >>> squares = Samples([(torch.tensor([float(i)]), torch.tensor(i * i)) for i in range(5)])
    >>> inputs, targets = squares.batch(torch.tensor([3, 1]))
    >>> inputs.tolist(), targets.tolist()
    ([[3.0], [1.0]], [9, 1])
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_map_style(self.dataset, "Samples.dataset")
        if self.collate is not None and not callable(self.collate):
            raise UsageError(f"Samples.collate must be a function of a list of samples, got {self.collate!r}.")
        if len(self.dataset) == 0:
            raise UsageError("Samples needs at least one sample, got none.")

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Tensor, draw: Sequence[int] = ()) -> tuple[Batch, Batch]:
        """Read the samples `indices` and collate them. Raises `UsageError` if the result is not (inputs, targets)."""
        collate = _default_collate if self.collate is None else self.collate
        with seeded(draw):
            made = collate(_read(self.dataset, indices.tolist()))
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise UsageError(_no_pair(made))
        inputs, targets = checked(made[0], "the inputs of collate"), checked(made[1], "the targets of collate")
        _check_rows("inputs", inputs, len(indices))
        _check_rows("targets", targets, len(indices))
        if self.dtype is None:
            return inputs, targets
        return mapped(self._cast, inputs), mapped(self._cast, targets)

    def samplers(self, split: Split, batch_sizes: Sequence[int], *, seed: int) -> Sequence[BatchSampler]:
        """As `DataSet`."""
        return split.samplers(_labels(self.dataset), batch_sizes, seed=seed)

    def steps(self, epochs: float, batch: int) -> int:
        """As `DataSet`."""
        return math.ceil(epochs * len(self) / batch)

    def to(self, dtype: torch.dtype) -> Samples:
        """As `DataSet`. Batches are cast after they have been collated."""
        return replace(self, dtype=dtype)

    def _cast(self, each: Tensor) -> Tensor:
        return each.to(self.dtype) if each.is_floating_point() else each


def check_map_style(dataset: Any, what: str) -> None:
    """Raise `UsageError` unless `dataset` has a length and can be indexed."""
    if isinstance(dataset, torch.utils.data.DataLoader):
        raise UsageError(
            f"{what} must be a map-style data set, got a DataLoader, which makes batches of its own. Write "
            "dure.Samples(loader.dataset, loader.collate_fn)."
        )
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{what} must be a map-style data set, got {type(dataset).__name__}, which gives no sample by its number. "
            "Write a class with __len__ and __getitem__, or for a long text dure.Stream(tokens, block=...)."
        )
    if not hasattr(dataset, "__len__"):
        raise UsageError(f"{what} has no length: {type(dataset).__name__} needs __len__, the number of its samples.")


def _read(dataset: Any, indices: list[int]) -> list[Any]:
    """Read samples, in one call if the data set has `__getitems__`, as `torch.utils.data` does."""
    several = getattr(dataset, "__getitems__", None)
    return list(several(indices)) if several else [dataset[index] for index in indices]


def _no_pair(made: Any) -> str:
    if isinstance(made, dict):
        found = f"a mapping with {', '.join(map(str, made))}"
        right = "collate=lambda samples: (inputs, targets), where inputs may be a mapping without the targets"
    else:
        found = f"{len(made)} values" if isinstance(made, tuple | list) else type(made).__name__
        right = "collate=lambda samples: (inputs, targets)"
    return f"the collate of Samples must return (inputs, targets), and gave {found}. Write {right}."


def _check_rows(what: str, batch: Batch, samples: int) -> None:
    for each in tensors(batch):
        if each.dim() == 0 or len(each) != samples:
            raise UsageError(
                f"the {what} of collate must have one row per sample, and have shape {tuple(each.shape)} for {samples} "
                "samples. Put the samples in the first dimension."
            )


def _default_collate(samples: list[Any]) -> Any:
    """Collate as PyTorch does. Raises `UsageError` for shapes or types that PyTorch cannot join."""
    try:
        return torch.utils.data.default_collate(samples)
    except (RuntimeError, TypeError) as error:
        raise UsageError(
            f"PyTorch's default_collate cannot join the samples: {error}. Write dure.Samples(dataset, collate) with a "
            "function of a list of samples that returns (inputs, targets)."
        ) from error


def _labels(dataset: Any) -> Tensor:
    """One label per sample if `dataset.targets` holds numbers, as in torchvision; else no labels."""
    try:
        found = torch.as_tensor(dataset.targets)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return no_labels(len(dataset))
    return found if found.dim() > 0 and len(found) == len(dataset) else no_labels(len(dataset))
