"""Parameter servers as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from dure.core.catalogue import parameter

Split = Literal["memory", "layer", "keys", "hybrid"]

SPLITS: tuple[Split, ...] = get_args(Split)

BOUND = 1_000_000
"""Elements from which on `hybrid` cuts a layer."""


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Servers hold the model in `shards`; each worker pushes to them and pulls from them.

    `split="memory"` cuts the flat parameters into equal ranges. `"layer"` keeps layers whole and places the largest
    first. `"keys"` gives each server equally many whole layers, in their order. `"hybrid"` cuts layers of `bound`
    elements or more over all servers, and keeps smaller ones whole. `colocated` puts each shard into a helper process
    on a worker's machine instead of its own machine.
    """

    paper: ClassVar[str] = "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014"

    shards: int = parameter(1, "servers, each with a part of the model", range=">= 1", unit="servers")
    split: Split = parameter(
        "memory",
        "memory: equal ranges; layer: whole layers, largest first; keys: whole layers in order; hybrid: large ones cut",
    )
    colocated: bool = parameter(False, "servers run on the workers' machines instead of machines of their own")
    bound: int = parameter(
        BOUND, "split=hybrid: size from which a layer is cut over all servers", range=">= 1", unit="elements"
    )

    offers: ClassVar[frozenset[str]] = frozenset({"servers", "coordinator", "codec", "stages"})
    deployed_as: ClassVar[str] = "dure.topology.parameter_server.topology:ServerTopology"

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ValueError(f"shards counts servers and must be >= 1, got {self.shards}. Use 1 for a single server.")
        if self.bound < 1:
            raise ValueError(f"bound counts elements and must be >= 1, got {self.bound}. Use 1 to cut every layer.")
        if self.bound != BOUND and self.split != "hybrid":
            raise ValueError(f"bound says where hybrid begins to cut, and split is {self.split}. Use split=hybrid.")
