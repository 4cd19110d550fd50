"""The hybrid of collectives and servers as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.core.catalogue import parameter


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Dense gradients travel by all_reduce, rows of embeddings through servers that hold the rows.

    `servers` selects the parameters that servers hold: "none", "all", names as in `servers=bag.weight/out.bias`, or
    "auto": those of which a step reads so few rows that servers move fewer bytes (`topology.hybrid`). `shards` is the
    number of servers, by default that of workers; `colocated` puts them on the workers' machines.
    """

    paper: ClassVar[str] = (
        "Kim et al., Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks, EuroSys 2019"
    )

    servers: tuple[str, ...] = parameter(
        ("auto",), "parameters on servers: auto (where that moves fewer bytes), none, all, or names joined by /"
    )
    shards: int | None = parameter(None, "servers; none: as many as workers", range=">= 1", unit="servers")
    colocated: bool = parameter(True, "servers run on the workers' machines instead of machines of their own")

    offers: ClassVar[frozenset[str]] = frozenset({"mean gradient"})
    deployed_as: ClassVar[str] = "dure.topology.hybrid.topology:HybridTopology"

    def __post_init__(self) -> None:
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards counts servers and must be >= 1, got {self.shards}. Use servers=none for none.")
        if isinstance(self.servers, str) or not self.servers:
            raise ValueError(f'servers must be a tuple of names, got {self.servers!r}. Use ("auto",), or leave it out.')
        for word in ("auto", "none", "all"):
            if word in self.servers and len(self.servers) > 1:
                raise ValueError(f"servers={word} stands alone, got {'/'.join(self.servers)}. Use names only.")
