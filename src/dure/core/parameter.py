"""The description of a parameter, beside its default in the class of a member."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def parameter(
    default: Any,
    meaning: str,
    *,
    range: str = "",  # noqa: A002 - the word that readers of a parameter look for
    unit: str = "",
    symbol: str = "",
    shown: bool = True,
) -> Any:
    """A dataclass field with a description, which `dure methods NAME` shows.

    `range` is what numbers may be, as comparisons: ">= 0, < 1"; the right side may be another parameter. The class
    checks it. `symbol` is the paper's, empty where the paper has none. `shown=False` leaves a first parameter that
    has its default out of the member's text.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass(frozen=True, slots=True)
    ... class Leap:
    ...     period: int = parameter(10, "local steps between two averages", range=">= 1", unit="steps", symbol="τ")
    >>> Leap().period, fields(Leap)[0].metadata["symbol"]
    (10, 'τ')
    """
    described = {"meaning": meaning, "range": range, "unit": unit, "symbol": symbol, "shown": shown}
    return field(default=default, metadata=described)
