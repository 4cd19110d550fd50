"""The topologies as values: what a strategy names, before anything is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dure.topology.sharding import BOUND, SPLITS, Split

GRAPHS = ("ring", "exponential", "random-regular", "complete")
"""Graphs that gossip knows by name."""

ALGORITHMS = ("engine", "ring", "tree", "halving-doubling", "hierarchical")
"""Collectives by name."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The workers among themselves; every operation needs all of them.

    `algorithm="engine"` is that of `torch.distributed` (in virtual time, its closed form); the others are written from
    sends (`topology.collective`). `per_host`, for "hierarchical": ranks in a row that are on one host.
    """

    algorithm: Literal["engine", "ring", "tree", "halving-doubling", "hierarchical"] = field(
        default="engine", metadata={"shown": False}
    )
    per_host: int | None = None

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}.")
        if self.algorithm == "hierarchical" and (self.per_host is None or self.per_host < 1):
            raise ValueError(
                f"hierarchical needs per_host, the workers on each host, of at least 1, got {self.per_host}. Write "
                "collective:algorithm=hierarchical,per_host=2."
            )
        if self.algorithm != "hierarchical" and self.per_host is not None:
            raise ValueError(
                f"per_host={self.per_host} is for hierarchical, and algorithm is {self.algorithm}: drop one."
            )


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """`shards` servers hold the model between them.

    `split="memory"` cuts the flat parameters into equal ranges; `"layer"` keeps layers whole, the largest placed
    first; `"keys"` gives each server as many whole layers, in their order; `"hybrid"` cuts layers of `bound` elements
    or more over all servers and keeps smaller ones whole.
    `colocated` puts each shard into a helper process on a worker's machine, in place of a machine of its own.
    """

    shards: int = 1
    split: Split = "memory"
    colocated: bool = False
    bound: int = BOUND

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"shards counts servers and must be >= 1, got {self.shards}. Use 1 for a single server.")
        if self.split not in SPLITS:
            raise ValueError(f"split must be {', '.join(SPLITS[:-1])} or {SPLITS[-1]}, got {self.split!r}.")
        if self.bound < 1:
            raise ValueError(f"bound counts elements and must be >= 1, got {self.bound}. Use 1 to cut every layer.")
        if self.bound != BOUND and self.split != "hybrid":
            raise ValueError(f"bound says where hybrid begins to cut, and split is {self.split}. Use split=hybrid.")


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Dense gradients among the workers, those of rows (embeddings) through servers that hold the rows.

    `servers` says which parameters servers hold: "auto" those of which a step reads so few rows that this moves fewer
    bytes (`topology.hybrid`), "none", "all", or names, as in `servers=bag.weight/out.bias`. There are `shards` servers,
    as many as workers unless said; `colocated` puts them on the workers' machines.
    """

    servers: tuple[str, ...] = ("auto",)
    shards: int | None = None
    colocated: bool = True

    def __post_init__(self) -> None:
        if self.shards is not None and self.shards < 1:
            raise ValueError(f"shards counts servers and must be >= 1, got {self.shards}. Use servers=none for none.")
        if isinstance(self.servers, str) or not self.servers:
            raise ValueError(f'servers must be a tuple of names, got {self.servers!r}. Use ("auto",), or leave it out.')
        for word in ("auto", "none", "all"):
            if word in self.servers and len(self.servers) > 1:
                raise ValueError(f"servers={word} stands alone, got {'/'.join(self.servers)}. Use names only.")


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """One machine, whose memory holds the model; every worker reads and writes it where it lies.

    `mode="racy"` writes without locks: what two workers add to a number at the same moment may lose one of the two.
    `"atomic"` loses nothing: each of `locks` equal ranges of the model has a lock of its own, held while it is written
    to; with one, updates are written one after another.
    """

    mode: Literal["racy", "atomic"] = "racy"
    locks: int = 64

    def __post_init__(self) -> None:
        if self.mode not in ("racy", "atomic"):
            raise ValueError(f'mode must be "racy" or "atomic", got {self.mode!r}.')
        if self.locks < 1:
            raise ValueError(f"locks counts ranges of the model and must be >= 1, got {self.locks}. Use 1 for one.")


@dataclass(frozen=True, slots=True)
class Gossip:
    """Every worker has a model of its own and talks to its neighbors in `graph`, one at a time.

    `graph` is "ring", "exponential", "random-regular" (of `degree`, drawn with `seed`), "complete", pairs of ranks as
    in "0-1/1-2/2-0", or a file: an edge list, or GraphML if its name ends so (`topology.graph`). A networkx graph is
    kept as its pairs.
    """

    graph: str = "exponential"
    degree: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.graph, str):
            from dure.topology.graph import edges_text

            object.__setattr__(self, "graph", edges_text(self.graph))
        if self.degree < 2:
            raise ValueError(f"degree counts neighbors and must be >= 2, got {self.degree}. Use 2 for rings.")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}. Use 0 for the usual one.")
