"""The coder of fp32, fp16 and bf16: elements rounded to a floating-point type."""

from __future__ import annotations

import torch

from dure.codec.blocks import all_finite, blocks, empty, is_finite, require_finite, viewed
from dure.codec.coder import DenseCoder
from dure.errors import DamagedMessage


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
