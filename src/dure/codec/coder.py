"""What turns flat slices into messages: the coder that a codec makes for one slice of one worker.

    values (float32, flat)  -- encode -->  message (uint8, flat)  -- decode, accumulate -->  values

A codec is a choice (`Sign()`), without state; its coder is bound to a slice, and may keep a residual. Sender and
receiver each make one for the same slice, so a message says nothing of what both know: its length is bounded by
`most_bytes`, and whatever it says is checked before it is used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from dure.codec.blocks import blocks, require_finite
from dure.core.ranges import ShapedSlice
from dure.errors import DamagedMessage


class SliceLayout(NamedTuple):
    """A slice of `numel` elements, and where in it columns begin.

    A column is what feeds one output of a layer: one row of PyTorch's weight, contiguous in memory. `bounds` are the
    borders of all of them, 0 and `numel` included; `is_column[i]` is false where what lies between bounds i and i + 1
    is no matrix (a bias, a scale).
    """

    numel: int
    bounds: tuple[int, ...]
    is_column: tuple[bool, ...]

    @classmethod
    def plain(cls, numel: int) -> SliceLayout:
        """One column."""
        return cls(numel, (0, numel), (True,)) if numel else cls(0, (0,), ())

    @classmethod
    def of(cls, layers: Sequence[ShapedSlice], ranges: Sequence[tuple[int, int]]) -> SliceLayout:
        """The slice that consists of `ranges` of the flat parameters: a column that is cut counts as two."""
        bounds, is_column, position = [0], [], 0
        for start, stop in ranges:
            for layer in layers:
                low, high = max(start, layer.start), min(stop, layer.stop)
                if low >= high:
                    continue
                matrix = len(layer.shape) > 1
                width = (layer.stop - layer.start) // layer.shape[0] if matrix else layer.stop - layer.start
                first = layer.start + ((low - layer.start) // width + 1) * width
                ends = [*range(first, high, width), high]
                bounds += [position + end - low for end in ends]
                is_column += [matrix] * len(ends)
                position += high - low
        return cls(position, tuple(bounds), tuple(is_column))


class Coder(ABC):
    """Encodes and decodes the `numel` elements of a slice.

    `most_bytes` bounds a message. A decoder raises `DamagedMessage` for what no encoder would have sent, and writes
    nothing then. `looks` says that `_encode` refuses NaN and infinity itself, as it comes by.
    """

    looks: ClassVar[bool] = False

    def __init__(self, numel: int) -> None:
        self.numel = numel

    @property
    @abstractmethod
    def most_bytes(self) -> int: ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The message for `values` (flat, of `numel` elements, left as they are).

        Raises `DivergedError` for NaN or infinity: what a coder makes of them looks like an ordinary message.
        """
        values = values.contiguous()
        if not self.looks:
            require_finite(values)
        return self._encode(values)

    @abstractmethod
    def _encode(self, values: torch.Tensor) -> torch.Tensor: ...

    @abstractmethod
    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of `message` to the flat `out`."""

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the values of `message` to the flat `out`."""
        values = torch.empty_like(out)
        self.decode(message, values)
        out.add_(values, alpha=weight)

    def verdict(self, values: torch.Tensor) -> torch.Tensor:
        """The message for what others have come to: as `encode`, but for momentum, which senders have applied."""
        return self.encode(values)

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        """The signs in a message, if a bit for each is all that it has; None where it has more."""
        return None

    def state(self) -> dict[str, torch.Tensor]:
        """What survives a restart."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  (most have nothing to take up)
        """Take up a `state`."""

    def _check_length(self, message: torch.Tensor, least: int, most: int | None = None) -> None:
        most = least if most is None else most
        if not least <= message.numel() <= most:
            right = str(least) if least == most else f"{least} to {most}"
            kind = type(self).__name__
            raise DamagedMessage(f"{kind}: {message.numel()} bytes for {self.numel} elements; {right} were expected.")


class DenseCoder(Coder):
    """A coder of messages that say something of every element, so that any block of them can be decoded alone."""

    @abstractmethod
    def _open(self, message: torch.Tensor) -> Any:
        """The parts of a message, once it is known to be a good one. Raises `DamagedMessage`."""

    @abstractmethod
    def _write(self, parts: Any, where: slice, out: torch.Tensor) -> None:
        """Write the elements `where` of a message to `out`."""

    def _blocks(self, out: torch.Tensor) -> Iterable[slice]:
        return blocks(out)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        parts = self._open(message)
        for where in self._blocks(out):
            self._write(parts, where, out[where])

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        parts = self._open(message)
        most = max((where.stop - where.start for where in self._blocks(out)), default=0)
        scratch = out.new_empty(most)
        for where in self._blocks(out):
            values = scratch[: where.stop - where.start]
            self._write(parts, where, values)
            out[where].add_(values, alpha=weight)


def states(coders: Sequence[Coder]) -> dict[str, torch.Tensor]:
    """What several coders keep, by their number and its name."""
    return {f"{i} {name}": value for i, coder in enumerate(coders) for name, value in coder.state().items()}


def restore(coders: Sequence[Coder], tensors: Mapping[str, torch.Tensor]) -> None:
    """Take up their `states`."""
    for i, coder in enumerate(coders):
        coder.restore(
            {name.removeprefix(f"{i} "): value for name, value in tensors.items() if name.startswith(f"{i} ")}
        )
