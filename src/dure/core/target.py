"""The target of a comparison: a test accuracy or a loss, and the time to reach it is compared."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dure.errors import UsageError

NEAR = 0.95
"""Ratio of two speeds, or of two times, from which on their order counts as open."""


@dataclass(frozen=True, slots=True)
class Target:
    """A target: a test accuracy of at least `value` (a fraction), or a loss of at most `value`.

    >>> str(Target(0.95)), str(Target(0.3, "loss"))
    ('95 % test accuracy', 'loss 0.3')
    """

    value: float = 0.95
    measure: Literal["accuracy", "loss"] = "accuracy"

    def __post_init__(self) -> None:
        if self.measure == "loss" and not math.isfinite(self.value):
            raise UsageError(f"target_loss is a finite number, got {self.value}.")
        if self.measure == "accuracy" and not 0 < self.value <= 1:
            raise UsageError(
                f"target is a test accuracy above 0 and at most 1, got {self.value}. For 95 % write 0.95; "
                "for a loss write target_loss."
            )

    def __str__(self) -> str:
        return f"{self.short} test accuracy" if self.measure == "accuracy" else self.short

    @property
    def short(self) -> str:
        """The text for the head of a column: "95 %" or "loss 0.3"."""
        return f"{100 * self.value:g} %" if self.measure == "accuracy" else f"loss {self.value:g}"
