"""Named values of several parts in one mapping: each part's names start with its prefix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")


def with_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """`named` with `prefix` before each name."""
    return {prefix + name: value for name, value in named.items()}


def under_prefix(prefix: str, named: Mapping[str, T]) -> dict[str, T]:
    """The values whose names start with `prefix`, by the rest of the name.

    >>> under_prefix("owner ", {"owner mean": 1, "own": 2})
    {'mean': 1}
    """
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
