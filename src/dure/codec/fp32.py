"""fp32: no compression. Tensors are sent as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.codec.base import Codec, CodecMemory

if TYPE_CHECKING:
    from dure.codec.coder import Coder, SliceLayout


@dataclass(frozen=True, slots=True)
class Float32(Codec):
    """Every element in single precision, without compression: 4 bytes each."""

    paper: ClassVar[str] = "IEEE Standard for Floating-Point Arithmetic, IEEE 754-2019"

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        import torch

        from dure.codec.coder import CastCoder

        return CastCoder(layout.numel, torch.float32)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)
