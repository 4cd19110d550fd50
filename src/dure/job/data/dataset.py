"""Data sets: samples in memory (`Data`), map-style data sets (`Samples`), and the structure of their batches.

    | inputs            | call of the model             | a sample is                 |
    |-------------------|-------------------------------|-----------------------------|
    | a tensor `x`      | `model(x)`                    | a row of `x`                |
    | a mapping `named` | `model(**named)`              | the same row of each tensor |
    | a tuple `several` | `model(*several)`             | the same row of each tensor |

The loss and the accuracy get `(outputs, targets)`; targets have any of the three structures and are passed unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dure.core.chance import seeded
from dure.errors import UsageError
from dure.job.data.split import BatchSampler, Split

Batch = Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]
"""One row per sample in each tensor. `torch.vmap` accepts a `Batch`, because each structure is a pytree."""

_WRITE = "Write torch.as_tensor(...)."


def checked(value: Any, what: str) -> Batch:
    """Convert `value` to a `Batch`: a list becomes a tuple, any mapping a `dict`.

    Raises `UsageError`, which calls the value `what`, if it is no `Batch`.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise UsageError(f"{what} is a mapping, and its key {wrong[0]!r} is no text. Its keys name arguments.")
        found: Any = dict(value)
        parts = [(f"[{key!r}]", each) for key, each in found.items()]
    elif isinstance(value, tuple | list):
        found = tuple(value)
        parts = [(f"[{place}]", each) for place, each in enumerate(found)]
    else:
        raise UsageError(
            f"{what} must be a tensor, a mapping or a tuple of tensors, got {type(value).__name__}. {_WRITE}"
        )
    for place, each in parts:
        if not isinstance(each, Tensor):
            raise UsageError(f"{what}{place} must be a tensor, got {type(each).__name__}. {_WRITE}")
    if not parts:
        raise UsageError(f"{what} is an empty {type(value).__name__}. It needs at least one tensor.")
    return found  # type: ignore[no-any-return]


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    return list(batch.values() if isinstance(batch, Mapping) else batch)


def mapped(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """Apply `function` to each tensor, and keep the structure."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: function(each) for key, each in batch.items()}
    return tuple(function(each) for each in batch)


def moved(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to an accelerator, through pinned memory: the host does not wait."""
    return mapped(lambda each: each.pin_memory().to(device, non_blocking=True), batch)


def joined(function: Callable[[list[Tensor]], Tensor], batches: Sequence[Batch]) -> Batch:
    """Join batches of one structure: `function`, such as `torch.stack`, joins the tensors of each position."""
    first = batches[0]
    if isinstance(first, Tensor):
        return function(list(batches))  # type: ignore[arg-type]
    if isinstance(first, Mapping):
        return {key: function([each[key] for each in batches]) for key in first}  # type: ignore[call-overload, index]
    return tuple(function(list(place)) for place in zip(*batches, strict=True))


def called(model: nn.Module, inputs: Batch) -> Any:
    """Call `model` with `inputs` according to the table above, and return its outputs."""
    return model(inputs) if isinstance(inputs, Tensor) else model(*arguments(inputs), **keywords(inputs))


def arguments(inputs: Batch) -> tuple[Tensor, ...]:
    """The positional arguments of the model."""
    if isinstance(inputs, Tensor):
        return (inputs,)
    return () if isinstance(inputs, Mapping) else tuple(inputs)


def keywords(inputs: Batch) -> dict[str, Tensor]:
    """The keyword arguments of the model."""
    return dict(inputs) if isinstance(inputs, Mapping) else {}


def described(value: Any) -> str:
    """Shape and dtype of a tensor, or of each tensor in a mapping or tuple; else the type of `value`.

    >>> import torch
    >>> described({"ids": torch.zeros(2, 3)}), described((torch.zeros(1),)), described("text")
    ('{ids: (2, 3) torch.float32}', '((1,) torch.float32)', 'type str')
    """
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, Mapping) and value and all(isinstance(each, Tensor) for each in value.values()):
        return "{" + ", ".join(f"{key}: {described(each)}" for key, each in value.items()) + "}"
    if isinstance(value, tuple) and value and all(isinstance(each, Tensor) for each in value):
        return f"({', '.join(map(described, value))})"
    return f"type {type(value).__name__}"


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
        """Make one sampler per worker according to `split`; worker k has batches of `batch_sizes[k]`."""
        labels = self.targets if isinstance(self.targets, Tensor) else no_labels(len(self))
        return split.samplers(labels, batch_sizes, seed=seed)

    def steps(self, epochs: float, batch: int) -> int:
        """Number of steps of `batch` samples in `epochs` passes."""
        return math.ceil(epochs * len(self) / batch)

    def to(self, dtype: torch.dtype) -> Data:
        """The same data set with floating-point values of `dtype`."""

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


@dataclass(frozen=True, slots=True)
class Samples:
    """A map-style `dataset` of `len(dataset)` samples; `dataset[i]` is sample i.

    `collate` makes one batch, `(inputs, targets)`, from a list of samples; each part is a tensor, a mapping or a tuple
    of tensors. The default is `torch.utils.data.default_collate`, for samples `(input, target)`.
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
        """Make one sampler per worker according to `split`; worker k has batches of `batch_sizes[k]`."""
        return split.samplers(_labels(self.dataset), batch_sizes, seed=seed)

    def steps(self, epochs: float, batch: int) -> int:
        """Number of steps of `batch` samples in `epochs` passes."""
        return math.ceil(epochs * len(self) / batch)

    def to(self, dtype: torch.dtype) -> Samples:
        """The same data set with floating-point values of `dtype`, to which each collated batch is cast."""
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
