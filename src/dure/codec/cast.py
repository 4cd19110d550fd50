"""Elements of another floating-point type."""

from __future__ import annotations

import torch

from dure.codec.coder import Coder
from dure.errors import DamagedMessage


class CastCoder(Coder):
    """Each element as the nearest of `dtype`; what is too large becomes the largest."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__(numel)
        self.dtype = dtype

    @property
    def most_bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        most = torch.finfo(self.dtype).max
        return values.clamp(-most, most).to(self.dtype).view(torch.uint8)

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        self._check_length(message, self.most_bytes)
        values = message.clone().view(self.dtype)
        if not torch.isfinite(values).all():
            raise DamagedMessage("a value that is no number.")
        out.copy_(values)
