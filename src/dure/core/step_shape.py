"""The shape of a step: its parts as shares of its time, and the times at which backward completes the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class GradientTensor(NamedTuple):
    """A tensor of the gradient: its parameter by number, its elements, and the share of backward when it is done."""

    number: int
    numel: int
    done: float


@dataclass(frozen=True)
class StepShape:
    """Shares of `backward` and of the optimizer's `update` in a step; the tensors in the order of their completion."""

    backward: float
    update: float
    tensors: Sequence[GradientTensor]
