"""The inputs and the targets of a batch: a tensor, a mapping of tensors, or a tuple of tensors.

    | inputs            | call of the model             | a sample is                 |
    |-------------------|-------------------------------|-----------------------------|
    | a tensor `x`      | `model(x)`                    | a row of `x`                |
    | a mapping `named` | `model(**named)`              | the same row of each tensor |
    | a tuple `several` | `model(*several)`             | the same row of each tensor |

The loss and the accuracy get `(outputs, targets)`; targets have any of the three structures and are passed unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dure.errors import UsageError

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
