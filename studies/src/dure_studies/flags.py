"""Flags that several studies take: their help, and their values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tyro.conf import arg

from dure.core.spec_text import names
from dure.errors import UsageError

ROUNDS = arg(help="Steps of each run.")
SEEDS = arg(help="Number of seeds.")
DATA = arg(help="Folder of data sets; else DURE_DATA, else the user's cache.")
OUT = arg(help="Where to draw the curves, as SVG.")


def check_counts(**counts: int) -> None:
    """Raise `UsageError` for a count below 1."""
    for name, value in counts.items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")


def listed(name: str, text: str, known: Sequence[str]) -> list[str]:
    """The names in `text`, each once. Raises `UsageError` for one that is not `known`."""
    found = [each.strip() for each in text.split(",")]
    for each in found:
        if each not in known:
            raise UsageError(f"{name} is {names(known)}, or several of them with commas between, got {each!r}.")
    return list(dict.fromkeys(found))


def numbers(name: str, text: str, kind: type[int | float], example: str) -> list[Any]:
    """The numbers in `text`. Raises `UsageError` for one that is not positive and finite."""
    try:
        found = [kind(each) for each in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < each < math.inf for each in found):
        whole = "whole " if kind is int else ""
        raise UsageError(f"{name} are positive {whole}numbers with commas between, got {text!r}. Write {example}.")
    return found
