"""Shared memory as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dure.core.catalogue import parameter


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One model in the memory of one machine; every worker reads and writes it in place.

    `mode="racy"` writes without locks: if two workers add to a number at the same moment, one addition may be lost.
    `"atomic"` loses no addition: a worker holds the lock of each of `locks` equal ranges while it writes to that range.
    With one lock, updates are written one after another.
    """

    paper: ClassVar[str] = (
        "Niu, Recht, Re and Wright, Hogwild!: A Lock-Free Approach to Parallelizing SGD, NeurIPS 2011"
    )

    mode: Literal["racy", "atomic"] = parameter(
        "racy", "racy: no locks, simultaneous additions may be lost; atomic: none is lost"
    )
    locks: int = parameter(64, "mode=atomic: equal ranges of the model, each with a lock", range=">= 1", unit="ranges")

    offers: ClassVar[frozenset[str]] = frozenset({"memory"})
    deployed_as: ClassVar[str] = "dure.topology.shared_memory.topology:SharedMemoryTopology"

    def __post_init__(self) -> None:
        if self.locks < 1:
            raise ValueError(f"locks counts ranges of the model and must be >= 1, got {self.locks}. Use 1 for one.")
