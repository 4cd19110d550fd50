"""Data parallel: the model is not split."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Whole:
    """Every worker holds the whole model, and its own part of the data."""
