"""The topologies as values: what a strategy names, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Collective:
    """The workers among themselves; every operation needs all of them."""


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """`shards` servers hold the model between them.

    `split="memory"` cuts the flat parameters into equal ranges; `"layer"` keeps layers whole.
    `colocated` puts each shard into a helper process on a worker's machine, in place of a machine of its own.
    """

    shards: int = 1
    split: Literal["memory", "layer"] = "memory"
    colocated: bool = False

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"shards counts servers and must be >= 1, got {self.shards}. Use 1 for a single server.")
        if self.split not in ("memory", "layer"):
            raise ValueError(f'split must be "memory" or "layer", got {self.split!r}.')
