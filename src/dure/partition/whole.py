"""Data parallel: the model is not split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Whole:
    """Data parallelism: every worker holds the whole model, and its own part of the data."""

    paper: ClassVar[str] = (
        "Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014, section 3"
    )
