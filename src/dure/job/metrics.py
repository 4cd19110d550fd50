"""The grade of a model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dure.errors import DivergedError


class Metrics(NamedTuple):
    """Mean loss, and the share of right answers (None if the job defines no accuracy).

    The grade of a job with companions has other figures, by name, and neither.
    """

    loss: float | None
    accuracy: float | None
    figures: Mapping[str, float] = MappingProxyType({})


def check_row(row: Mapping[str, Any]) -> None:
    """Raise `DivergedError` for an evaluation whose loss is NaN or infinite."""
    loss = row.get("loss")
    if loss is not None and not math.isfinite(loss):
        raise DivergedError(
            f"the loss of the evaluation at step {row['step']} is {loss}: the training diverged. Try a lower learning "
            "rate, and look at the data of the evaluation."
        )
