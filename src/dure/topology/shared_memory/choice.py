"""Shared memory as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One machine, whose memory holds the model; every worker reads and writes it where it lies.

    `mode="racy"` writes without locks: what two workers add to a number at the same moment may lose one of the two.
    `"atomic"` loses nothing: each of `locks` equal ranges of the model has a lock of its own, held while it is written
    to; with one, updates are written one after another.
    """

    mode: Literal["racy", "atomic"] = "racy"
    locks: int = 64

    deployed_as: ClassVar[str] = "dure.topology.shared_memory.topology:SharedMemoryTopology"

    def __post_init__(self) -> None:
        if self.mode not in ("racy", "atomic"):
            raise ValueError(f'mode must be "racy" or "atomic", got {self.mode!r}.')
        if self.locks < 1:
            raise ValueError(f"locks counts ranges of the model and must be >= 1, got {self.locks}. Use 1 for one.")
