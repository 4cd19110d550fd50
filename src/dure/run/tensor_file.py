"""Files of safetensors that are written piece by piece, so that no process holds all tensors of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from dure.core.vectors import Range
from dure.job.replica import as_bytes

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""The types of tensors that the format has, by their names there."""

ALIGNED = 8
"""The header's size is a multiple of so many bytes, so that values are aligned."""


class TensorSize(NamedTuple):
    """The type and the shape of a tensor in a file."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A new file of safetensors with `tensors`, whose values come later, in any order. A context manager.

    Raises `ValueError` for a tensor of a type that the format has not, `OSError` where the file cannot be written.
    """

    def __init__(self, path: Path, tensors: Mapping[str, TensorSize]) -> None:
        at = 0
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._starts: dict[str, tuple[int, int]] = {}
        for name, each in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):  # each value is aligned
            if each.dtype not in _DTYPES:
                raise ValueError(f"{name} is {each.dtype}, which files of safetensors do not have")
            header[name] = {
                "dtype": _DTYPES[each.dtype],
                "shape": list(each.shape),
                "data_offsets": [at, at + each.nbytes],
            }
            self._starts[name] = at, each.dtype.itemsize
            at += each.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % ALIGNED)
        self._values = len(text) + 8
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._values + at)

    def put(self, name: str, start: int, values: torch.Tensor) -> None:
        """Write `values` as the elements of a tensor from `start` on, in the order of its memory."""
        at, itemsize = self._starts[name]
        self._file.seek(self._values + at + start * itemsize)
        self._file.write(as_bytes(values.detach().cpu()).numpy().data)

    def put_ranges(self, name: str, ranges: Sequence[Range], start: int, values: torch.Tensor) -> None:
        """Write the part of a flat vector that a tensor holds, which is `ranges` of it one after another.

        `values` are the elements of the vector from `start` on.
        """
        at, stop = 0, start + values.numel()
        for low, high in ranges:
            first, last = max(low, start), min(high, stop)
            if first < last:
                self.put(name, at + first - low, values[first - start : last - start])
            at += high - low

    def close(self) -> None:
        """Flush the file to the disk, and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._file.close()
