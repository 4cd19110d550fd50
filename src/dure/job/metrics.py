"""The grade of a model."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Metrics(NamedTuple):
    """Mean loss, and the share of right answers (None if the job defines no accuracy).

    The grade of a job with companions has other figures, by name, and neither.
    """

    loss: float | None
    accuracy: float | None
    figures: Mapping[str, float] = MappingProxyType({})
