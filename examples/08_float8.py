"""Add a codec: eight-bit floating-point numbers (E4M3), which dure does not contain, as one class in its own file.

Micikevicius et al., "FP8 Formats for Deep Learning", 2022: a byte holds a sign, four bits of exponent and three of
mantissa. A slice is scaled so that its largest element becomes the largest number of the format.

    message = max |v|  as float32,  then each  v / max |v| * 448  as E4M3
"""

from dataclasses import dataclass

import torch

import dure
from dure.codec.blocks import require_finite
from dure.errors import DamagedMessage

LARGEST, MOST = 448.0, torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class Float8(dure.Codec):
    """Each element as an eight-bit floating-point number (E4M3), relative to the largest of the slice."""

    def coder(self, layout, seed=0):
        return Float8Coder(layout.numel)


class Float8Coder(dure.Coder):
    """Encodes and decodes one slice."""

    looks = True  # encode_finite itself refuses NaN and infinity, also on a GPU

    @property
    def most_bytes(self):
        return 4 + self.numel

    def encode_finite(self, values):
        require_finite(values)
        values = values.float().clamp(-MOST, MOST)  # of float64
        most = torch.cat([values.abs(), values.new_full((1,), 1e-30)]).amax()
        scaled = (values / most * LARGEST).to(torch.float8_e4m3fn)
        return torch.cat([most.reshape(1).view(torch.uint8), scaled.view(torch.uint8)])

    def decode(self, message, out):
        self.check_length(message, self.most_bytes)
        most, scaled = message[:4].clone().view(torch.float32), message[4:].view(torch.float8_e4m3fn).float()
        if not (0 < most.item() < float("inf") and scaled.isfinite().all()):
            raise DamagedMessage("a value that is not finite.")
        out.copy_(scaled / LARGEST * most)


if __name__ == "__main__":
    print(f"{'codec':22}{'accuracy':>9}{'megabytes':>11}")
    for codec in ("fp32", "int8", f"{__file__}:Float8"):
        run = dure.train("digits-mlp", sync="bsp", codec=codec, on="virtual", workers=4, steps=150, lr=0.4)
        figures = run.summary()
        name = codec.rpartition("/")[2]
        print(f"{name:22}{figures['accuracy']:9.3f}{figures['bytes_sent'] / 1e6:11.1f}")
