"""Description of a member's parameter, next to its default in the class."""

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

    `range` has the bounds of a number as comparisons, such as ">= 0, < 1"; the right side may be another parameter.
    The class itself must check it. `symbol` is the paper's symbol, or empty. A member's text shows its first parameter
    even if it has its default, unless `shown=False`.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass(frozen=True, slots=True)
    ... class Leap:
    ...     period: int = parameter(10, "local steps between two averages", range=">= 1", unit="steps", symbol="τ")
    >>> Leap().period, fields(Leap)[0].metadata["symbol"]
    (10, 'τ')
    """
    described = {"meaning": meaning, "range": range, "unit": unit, "symbol": symbol, "shown": shown}
    return field(default=default, metadata=described)
