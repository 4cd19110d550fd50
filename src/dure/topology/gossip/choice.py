"""Gossip as a value of a strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dure.core.catalogue import parameter

GRAPHS = ("ring", "exponential", "random-regular", "complete")
"""Graphs that gossip knows by name."""


@dataclass(frozen=True, slots=True)
class Gossip:
    """Each worker has its own model, and averages it with one neighbor in a graph at a time.

    `graph` is "ring", "exponential", "random-regular" (of `degree`, drawn with `seed`), "complete", pairs of ranks as
    in "0-1/1-2/2-0", or a file: GraphML if its name ends in `.graphml`, else an edge list (`topology.gossip.graph`). A
    graph of networkx is stored as its pairs.
    """

    paper: ClassVar[str] = "Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018"

    graph: str = parameter(
        "exponential",
        "neighbors of each worker: ring, exponential, random-regular, complete, pairs as in 0-1/1-2, or a file",
    )
    degree: int = parameter(4, "graph=random-regular: neighbors of each worker", range=">= 2", unit="workers")
    seed: int = parameter(0, "graph=random-regular: seed of the graph", range=">= 0")

    offers: ClassVar[frozenset[str]] = frozenset({"peers", "stages"})
    deployed_as: ClassVar[str] = "dure.topology.gossip.topology:GossipTopology"
    more_rows: ClassVar[str] = "dure.topology.gossip.graph:graph_rows"

    def __post_init__(self) -> None:
        if not isinstance(self.graph, str):
            from dure.topology.gossip.edges import edges_text

            object.__setattr__(self, "graph", edges_text(self.graph))
        if self.degree < 2:
            raise ValueError(f"degree counts neighbors and must be >= 2, got {self.degree}. Use 2 for rings.")
        if self.seed < 0:
            raise ValueError(f"seed must be >= 0, got {self.seed}. Use 0 for the default graph.")
