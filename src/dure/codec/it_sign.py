"""Signs for a vote that is weighted by the reliability of each worker: IT-signSGD, also called signSGD-FV.

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

from dataclasses import dataclass
from typing import ClassVar, Literal

from dure.codec.base import Codec, Vote
from dure.codec.coder import Coder, SliceLayout
from dure.codec.sign import Sign
from dure.codec.ternary import Ternary
from dure.codec.vote import LogLikelihood
from dure.core.cost import CodecCost
from dure.core.parameter import parameter


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
        if self.granularity not in ("worker", "coordinate"):
            raise ValueError(f'granularity must be "worker" or "coordinate", got {self.granularity!r}.')
        if self.zeros not in ("abstain", "random", "positive"):
            raise ValueError(f'zeros must be "abstain", "random" or "positive", got {self.zeros!r}.')
        if self.start is not None and self.start < 0:
            raise ValueError(f"start counts rounds and must be >= 0, got {self.start}. Use 10.")
        if not 0 < self.least < 0.5:
            raise ValueError(f"least must be above 0 and below 0.5, got {self.least}. Use 0.01.")
        if self.forget is not None and not 0 < self.forget <= 1:
            raise ValueError(f"forget must be above 0 and at most 1, got {self.forget}. Use 1 to forget nothing.")

    def coder(self, layout: SliceLayout, seed: int = 0) -> Coder:
        codec = Ternary() if self.zeros == "abstain" else Sign(zeros=self.zeros)
        return codec.coder(layout, seed)

    def vote(self) -> Vote:
        return LogLikelihood(self.granularity, start=self.start, least=self.least, forget=self.forget)
