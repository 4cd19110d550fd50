"""Coders, which turn flat slices into messages. A codec makes a coder for each slice of each worker.

    values (float32, flat)  -- encode -->  message (uint8, flat)  -- decode, accumulate -->  values

A codec is a choice without state (`Sign()`). Its coder is bound to one slice and may keep a residual. Sender and
receiver each make a coder for the same slice, so a message does not repeat the layout. `most_bytes` bounds its length,
and a receiver checks its content before use.

The state is on the device of the last values; a restored one comes from the CPU and moves with the next values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from dure.codec.blocks import all_finite, blocks, empty, is_finite, require_finite, viewed
from dure.core.state import under_prefix, with_prefix
from dure.core.vectors import ShapedSlice
from dure.errors import DamagedMessage


class SliceLayout(NamedTuple):
    """A slice of `numel` elements, with the borders of the columns in it.

    A column is the weights of one output of a layer: a row of PyTorch's weight, contiguous in memory. `bounds` are the
    borders of all columns, 0 and `numel` included. `is_column[i]` is false where the elements between bounds i and
    i + 1 belong to no matrix (a bias, a scale).
    """

    numel: int
    bounds: tuple[int, ...]
    is_column: tuple[bool, ...]

    @classmethod
    def plain(cls, numel: int) -> SliceLayout:
        """The layout of a slice that is one column."""
        return cls(numel, (0, numel), (True,)) if numel else cls(0, (0,), ())

    @classmethod
    def of(cls, layers: Sequence[ShapedSlice], ranges: Sequence[tuple[int, int]]) -> SliceLayout:
        """The layout of the `ranges` of the flat parameters, one after another. A cut column counts as two."""
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
    """Encodes and decodes the `numel` elements of a slice, on the device of the values.

    `most_bytes` bounds the length of a message. Decoding raises `DamagedMessage` for a message that `encode` cannot
    give, and then writes nothing. `looks`: `encode_finite` itself refuses NaN and infinity, in a pass that it needs
    anyway. On other devices than the CPU every `encode_finite` does so: the host waits for the device once per message.
    """

    looks: ClassVar[bool] = False

    def __init__(self, numel: int) -> None:
        self.numel = numel

    @property
    @abstractmethod
    def most_bytes(self) -> int: ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode `values` (flat, `numel` elements, not changed) to a message (uint8, flat).

        Raises `DivergedError` for NaN or infinity, since a receiver could not tell their message from an ordinary one.
        """
        values = values.contiguous()
        if not self.looks and values.device.type == "cpu":
            require_finite(values)
        return self.encode_finite(values)

    @abstractmethod
    def encode_finite(self, values: torch.Tensor) -> torch.Tensor: ...

    def _encode_and_subtract(self, values: torch.Tensor) -> torch.Tensor:
        """Encode `values` and subtract from them the values of the message."""
        message = self.encode_finite(values)
        self.accumulate(message, values, -1.0)
        return message

    @abstractmethod
    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of `message` to the flat `out`."""

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the values of `message` to the flat `out`."""
        values = torch.empty_like(out)
        self.decode(message, values)
        out.add_(values, alpha=weight)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros for a sum of messages, on the device of `like`."""
        return torch.zeros(self.numel, device=like.device)

    def verdict(self, values: torch.Tensor) -> torch.Tensor:
        """Encode a combined result. As `encode`, but without momentum, which the senders have applied already."""
        return self.encode(values)

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        """The packed signs of a message that consists of them alone; None for any other message."""
        return None

    def state(self) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint keeps, on the CPU."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:  # noqa: B027  (most coders have no state)
        """Continue from a `state`. Its tensors move to the device of the next values."""

    def check_length(self, message: torch.Tensor, least: int, most: int | None = None) -> None:
        """Raise `DamagedMessage` unless `message` has `least` to `most` bytes; `most` is `least` if None."""
        most = least if most is None else most
        if not least <= message.numel() <= most:
            right = str(least) if least == most else f"{least} to {most}"
            kind = type(self).__name__
            raise DamagedMessage(f"{kind}: {message.numel()} bytes for {self.numel} elements; {right} were expected.")


class DenseCoder(Coder):
    """A coder whose messages hold every element, so that each block can be decoded alone."""

    @property
    def least_bytes(self) -> int:
        """The length of the shortest message."""
        return self.most_bytes

    @abstractmethod
    def _parts(self, message: torch.Tensor) -> Any:
        """The parts of a message of a right length."""

    def _check(self, parts: Any) -> None:
        """Raise `DamagedMessage` for parts that `encode` cannot give."""

    @abstractmethod
    def _write(self, parts: Any, where: slice, out: torch.Tensor) -> None:
        """Decode the elements `where` to `out`."""

    def _blocks(self, out: torch.Tensor) -> Iterable[slice]:
        return blocks(out)

    def _open(self, message: torch.Tensor, out: torch.Tensor) -> Any:
        self.check_length(message, self.least_bytes, self.most_bytes)
        parts = self._parts(message.to(out.device))
        self._check(parts)
        return parts

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        parts = self._open(message, out)
        for where in self._blocks(out):
            self._write(parts, where, out[where])

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self._add(self._open(message, out), out, weight)

    def _encode_and_subtract(self, values: torch.Tensor) -> torch.Tensor:
        message = self.encode_finite(values)
        self._add(self._parts(message), values, -1.0)  # a message of its own needs no check
        return message

    def _add(self, parts: Any, out: torch.Tensor, weight: float) -> None:
        most = max((where.stop - where.start for where in self._blocks(out)), default=0)
        scratch = out.new_empty(most)
        for where in self._blocks(out):
            values = scratch[: where.stop - where.start]
            self._write(parts, where, values)
            out[where].add_(values, alpha=weight)


def states(coders: Sequence[Coder]) -> dict[str, torch.Tensor]:
    """The states of several coders in one mapping: "1 residual" is the residual of coder 1."""
    return {key: kept for i, coder in enumerate(coders) for key, kept in with_prefix(f"{i} ", coder.state()).items()}


def restore(coders: Sequence[Coder], tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore several coders from their `states`."""
    for i, coder in enumerate(coders):
        coder.restore(under_prefix(f"{i} ", tensors))


class CastCoder(DenseCoder):
    """Encodes each element as the nearest number of `dtype`; numbers beyond its range become its largest number."""

    looks = True

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel)
        self.dtype = dtype

    @property
    def most_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        if values.device.type != "cpu":
            return self._encode_by_operations(values)
        cast = empty(self.numel, values, self.dtype)
        for where in blocks(values):
            cast[where] = values[where]
            if not is_finite(cast[where]):  # not finite before, or beyond the range of `dtype`
                require_finite(values[where])
                most = torch.finfo(self.dtype).max
                cast[where] = values[where].clamp(-most, most)
        return cast.view(torch.uint8)

    def _encode_by_operations(self, values: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(self.dtype).max
        within = values.clamp(-most, most) if torch.finfo(values.dtype).max > most else values
        message = within.to(self.dtype, copy=True).view(torch.uint8)
        require_finite(values)
        return message

    def _parts(self, message: torch.Tensor) -> torch.Tensor:
        return viewed(message, self.dtype)

    def _check(self, parts: torch.Tensor) -> None:
        if not all_finite(parts):
            raise DamagedMessage("a value that is not finite.")

    def _write(self, parts: torch.Tensor, where: slice, out: torch.Tensor) -> None:
        out.copy_(parts[where])


class FeedbackCoder(Coder):
    """Error feedback: adds the residual before encoding with `inner`. Decodes as `inner`.

    Only the sender has a residual, which checkpoints keep.
    """

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.residual: torch.Tensor | None = None

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        total = self._with_residual(values)
        message = self.inner._encode_and_subtract(total)
        self.residual = total
        return message

    def _with_residual(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of `values` and the residual, within the range of their type; on the CPU in place of the residual."""
        if self.residual is None:
            return values.clone()
        residual, most = self.residual.to(values.device), torch.finfo(values.dtype).max
        if values.device.type != "cpu":
            # The residual stays as it was until `inner`, which is the first to look, has found the sum finite.
            return torch.where(values.isfinite(), (residual + values).clamp_(-most, most), values)
        residual.add_(values)
        if not all_finite(residual):  # the sum of two finite numbers overflowed
            residual.clamp_(-most, most)
        return residual

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.residual is None else {"residual": self.residual.cpu()}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.residual = state["residual"].clone() if "residual" in state else None
        self.inner.restore(state)


class MomentumCoder(Coder):
    """Momentum: encodes the moving average of the values with `inner`. Decodes as `inner`."""

    def __init__(self, inner: Coder, beta: float) -> None:
        super().__init__(inner.numel)
        self.inner = inner
        self.beta = beta
        self.average: torch.Tensor | None = None

    @property
    def most_bytes(self) -> int:
        return self.inner.most_bytes

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        average = torch.zeros_like(values) if self.average is None else self.average.to(values.device)
        # On the CPU, values have been found finite. Elsewhere `inner` looks, and the average stays until it has.
        average = (average.lerp_ if values.device.type == "cpu" else average.lerp)(values, 1 - self.beta)
        message = self.inner.encode_finite(average)
        self.average = average
        return message

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self.inner.decode(message, out)

    def accumulate(self, message: torch.Tensor, out: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.accumulate(message, out, weight)

    def verdict(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner.verdict(values)

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        return self.inner.packed_signs(message)

    def state(self) -> dict[str, torch.Tensor]:
        own = {} if self.average is None else {"average": self.average.cpu()}
        return own | self.inner.state()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.average = state["average"].clone() if "average" in state else None
        self.inner.restore(state)
