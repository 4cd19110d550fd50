"""The sign of every element, a bit each. Bernstein et al., "signSGD", ICML 2018; with a scale, Karimireddy et al. 2019.

    message      ceil(n / 8) bytes: bit i is set if element i is >= 0; with `scaled`, also the mean magnitude (float32)
    decoded      +1 or -1; with `scaled`, the mean magnitude with that sign

The mean of signs is no estimate of the sign of the mean, so unscaled signs are for votes. Scaled signs with error
feedback may be averaged ("Error Feedback Fixes SignSGD", ICML 2019).

Signs for a vote that is weighted by the reliability of each worker: IT-signSGD, also called signSGD-FV.

Park and Lee, "IT-signSGD" (in Korean); Park, Poor and Lee, "SignSGD with Federated Voting", 2024, arXiv 2403.16372.

    | in the paper                                      | here                                                        |
    |---------------------------------------------------|-------------------------------------------------------------|
    | a weight per worker and coordinate, of all rounds | a weight per worker, of about its last ten rounds;          |
    |                                                   | `granularity=coordinate` for the paper's weights            |
    | one bit per element                               | ternary messages, in which zeros abstain;                   |
    |                                                   | `zeros=random` for one bit                                  |
    | p = n / t for n disagreements in t rounds         | p = (n + 1) / (t + 2)                                       |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from dure.codec import bits
from dure.codec.base import Codec, CodecMemory, Vote
from dure.codec.blocks import require_finite, require_in_float32, to_device, viewed
from dure.codec.coder import Coder, DenseCoder, SliceLayout
from dure.codec.ternary import Ternary
from dure.codec.vote import LogLikelihood, Majority
from dure.core.catalogue import parameter
from dure.core.cost import CodecCost
from dure.errors import DamagedMessage

_SCALE = 4  # bytes


@dataclass(frozen=True, slots=True)
class Sign(Codec):
    """The sign of every element, one bit each, for a majority vote; with `scaled`, also the mean magnitude.

    An element that is exactly zero counts as "positive", or has a "random" sign (`zeros`). Where many elements are
    zero, counting them as positive can outvote the workers whose elements are not.
    """

    paper: ClassVar[str] = (
        "Bernstein et al., signSGD with Majority Vote is Communication Efficient and Fault Tolerant, ICLR 2019"
    )
    cost: ClassVar[CodecCost] = CodecCost.measured((24, 0.82), (22, 0.44), (180, 0.047))

    zeros: Literal["positive", "random"] = parameter(
        "positive", "sign of an element that is zero: positive, or drawn at random"
    )
    scaled: bool = parameter(False, "messages have the mean magnitude too, and are averaged instead of voted on")

    def coder(self, layout: SliceLayout, seed: int = 0) -> _SignCoder:
        return _SignCoder(layout.numel, scaled=self.scaled, seed=seed if self.zeros == "random" else None)

    def keeps(self, senders: int) -> CodecMemory:
        return CodecMemory(0, 0)

    def vote(self) -> Vote | None:
        return None if self.scaled else Majority()


class _SignCoder(DenseCoder):
    """Packs the sign of each element into one bit."""

    looks = True

    def __init__(self, numel: int, *, scaled: bool = False, seed: int | None = None) -> None:
        super().__init__(numel)
        self.scaled = scaled
        self._random = None if seed is None else torch.Generator().manual_seed(seed)

    @property
    def most_bytes(self) -> int:
        return bits.nbytes(self.numel) + _SCALE * self.scaled

    def encode_finite(self, values: torch.Tensor) -> torch.Tensor:
        if not self.scaled:
            return self._signs(values, look=True)
        scale = self._mean_magnitude(values)  # which refuses NaN and infinity
        return torch.cat([self._signs(values), scale.reshape(1).view(torch.uint8)])

    def _signs(self, values: torch.Tensor, *, look: bool = False) -> torch.Tensor:
        """Pack the signs, with drawn bits in place of zeros if zeros are random. `look` as in `bits.pack`.

        The CPU draws the bits, the same for every device.
        """
        if self._random is None:
            return bits.pack_signs(values, look=look)
        positive, not_negative = bits.pack(values, (np.greater, np.greater_equal), look=look)  # before bits are drawn
        drawn = torch.randint(256, (bits.nbytes(self.numel),), generator=self._random, dtype=torch.uint8)
        return not_negative & to_device(drawn, values) | positive

    def _mean_magnitude(self, values: torch.Tensor) -> torch.Tensor:
        if not self.numel:
            return values.new_zeros((), dtype=torch.float32)
        mean = values.abs().mean(dtype=torch.float32)
        if mean.isfinite():
            return mean
        require_finite(values)
        require_in_float32(values)
        return values.abs().mean(dtype=torch.float64).float()  # the sum overflowed in float32

    def state(self) -> dict[str, torch.Tensor]:
        return {} if self._random is None else {"random": self._random.get_state()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        if self._random is not None:
            self._random.set_state(state["random"].cpu())

    def packed_signs(self, message: torch.Tensor) -> torch.Tensor | None:
        return None if self.scaled else self._open(message, message)[0]

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed signs and, if `scaled`, their magnitude."""
        packed = message[: bits.nbytes(self.numel)]
        return packed, viewed(message[-_SCALE:], torch.float32)[0] if self.scaled else None

    def _check(self, parts: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        packed, scale = parts
        read = [packed[-1:]] if self.numel % 8 else []
        read += [] if scale is None else [scale.reshape(1).view(torch.uint8)]
        if not read:
            return
        tail = torch.cat(read).cpu()
        if self.numel % 8 and int(tail[0]) >> self.numel % 8:
            raise DamagedMessage("a bit is set that belongs to no element.")
        if scale is not None and not 0 <= (magnitude := tail[-_SCALE:].clone().view(torch.float32).item()) < math.inf:
            raise DamagedMessage(f"a mean magnitude of {magnitude}; it is finite and not negative.")

    def _write(self, parts: tuple[torch.Tensor, torch.Tensor | None], where: slice, out: torch.Tensor) -> None:
        packed, scale = parts
        low, high = (-1.0, 1.0) if scale is None else (-scale, scale)
        bits.unpack_into(packed[where.start // 8 : bits.nbytes(where.stop)], out, low, high)


@dataclass(frozen=True, slots=True)
class ITSign(Codec):
    """The sign of every element, for a vote weighted by how reliable each worker has been.

    The vote is `vote.LogLikelihood`.
    """

    paper: ClassVar[str] = "Park, Poor and Lee, SignSGD with Federated Voting, 2024, arXiv 2403.16372"
    cost: ClassVar[CodecCost] = CodecCost.measured((130, 4.6), (98, 12), (3200, 15))

    granularity: Literal["worker", "coordinate"] = parameter(
        "worker", "one error rate for each worker, or, as in the paper, for each worker and coordinate"
    )
    zeros: Literal["abstain", "random", "positive"] = parameter(
        "abstain", "elements that are zero: abstain (messages are ternary), or have a random or a positive sign"
    )
    start: int | None = parameter(
        None,
        "rounds of a worker before its votes are weighted; none: 10, with coordinates 50",
        range=">= 0",
        unit="rounds",
        symbol="T_in",
    )
    least: float = parameter(
        0.01, "least error rate that is assumed, which limits a worker's weight", range="> 0, < 0.5", unit="fraction"
    )
    forget: float | None = parameter(
        None,
        "factor of the counts after each round; 1: nothing is forgotten; none: 0.9, with coordinates 1",
        range="> 0, <= 1",
    )

    def __post_init__(self) -> None:
        if self.start is not None and self.start < 0:
            raise ValueError(f"start counts rounds and must be >= 0, got {self.start}. Use 10.")
        if not 0 < self.least < 0.5:
            raise ValueError(f"least must be above 0 and below 0.5, got {self.least}. Use 0.01.")
        if self.forget is not None and not 0 < self.forget <= 1:
            raise ValueError(f"forget must be above 0 and at most 1, got {self.forget}. Use 1 to forget nothing.")

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        codec = Ternary() if self.zeros == "abstain" else Sign(zeros=self.zeros)
        return codec.coder(layout, seed)

    def keeps(self, senders: int) -> CodecMemory:
        # The last decision, a byte for each element; or two counts for each sender and coordinate.
        return CodecMemory(0, 0.25 if self.granularity == "worker" else 2 * senders)

    def vote(self) -> Vote:
        return LogLikelihood(self.granularity, start=self.start, least=self.least, forget=self.forget)
