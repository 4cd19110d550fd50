"""Graphs of the neighbors in gossip, and how fast averaging along them mixes.

| graph            | neighbors of worker i of K                                  | degree                |
|------------------|-------------------------------------------------------------|-----------------------|
| `ring`           | i - 1 and i + 1                                             | 2                     |
| `exponential`    | those 1, 2, 4, 8, ... away, both ways                       | about 2 log2 K        |
| `random-regular` | as many as `degree`, drawn with `seed`                      | `degree`              |
| `complete`       | all others                                                  | K - 1                 |
| `0-1/1-2/2-0`    | as written, in pairs of ranks                               |                       |
| a file           | as in the file: an edge list, or GraphML if it ends so      |                       |
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.mixing import mixing, pairwise_mixing
from dure.errors import StrategyError, UsageError
from dure.topology.gossip.choice import GRAPHS, Gossip
from dure.topology.gossip.edges import _ranked, _short, _whole

if TYPE_CHECKING:
    import networkx as nx


_PAIRS = re.compile(r"\d+-\d+(/\d+-\d+)*")

DRAWS = 100
"""Most draws of a random graph until one is connected."""


def build(topology: Gossip, workers: int) -> nx.Graph:
    """The graph of the ranks 0 .. workers - 1. Raises `StrategyError` if it does not exist or is not connected."""
    import networkx as nx

    graph = _named(topology, workers) if topology.graph in GRAPHS else _read(topology.graph)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    if graph.number_of_nodes() != workers:
        raise StrategyError(
            f"the graph {_short(topology.graph)} has {graph.number_of_nodes()} nodes, and the run {workers} workers: "
            "give one node for each."
        )
    return _whole(graph, topology.graph)


def size(topology: Gossip) -> int | None:
    """The number of workers that the graph is for; None if it is made for any number. Raises `StrategyError`."""
    return None if topology.graph in GRAPHS else _read(topology.graph).number_of_nodes()


def _named(topology: Gossip, workers: int) -> nx.Graph:
    import networkx as nx

    if topology.graph == "complete":
        return nx.complete_graph(workers)
    if topology.graph == "random-regular":
        return _random_regular(topology.degree, workers, topology.seed)
    powers = [2**power for power in range(workers.bit_length()) if 2**power < workers]
    return nx.circulant_graph(workers, [1] if topology.graph == "ring" else powers or [1])


def _random_regular(degree: int, workers: int, seed: int) -> nx.Graph:
    import networkx as nx

    if degree >= workers or degree * workers % 2:
        reason = f"more than {degree} workers" if degree >= workers else "an even number of workers"
        raise StrategyError(
            f"a random-regular graph with degree={degree} needs {reason}, got {workers}: "
            "choose another degree, or graph=complete."
        )
    for draw in range(DRAWS):
        graph = nx.random_regular_graph(degree, workers, seed=seed + draw)
        if nx.is_connected(graph):
            break
    return graph


def _read(name: str) -> nx.Graph:
    import networkx as nx

    if _PAIRS.fullmatch(name):
        return _ranked(nx.Graph([pair.split("-") for pair in name.split("/")]))
    try:
        found = nx.read_graphml(name) if Path(name).suffix == ".graphml" else nx.read_edgelist(name)
    except (OSError, ValueError, TypeError, nx.NetworkXException, SyntaxError) as error:
        known = ", ".join(GRAPHS)
        raise StrategyError(
            f'the graph "{name}" is none of {known}, no pairs of ranks as in 0-1/1-2/2-0, and no file that can be read '
            f"as one ({error})."
        ) from None
    return _ranked(found)


def reconnect(graph: nx.Graph, gone: Collection[int]) -> nx.Graph:
    """`graph` without the ranks in `gone`. The neighbors of each are linked in a row, so that it stays connected."""
    import networkx as nx

    reconnected = graph.copy()
    # In the order of ranks, so that workers that know of the same losses derive the same graph.
    for node in sorted(gone):
        if node in reconnected:
            around = sorted(reconnected.neighbors(node))
            reconnected.remove_node(node)
            nx.add_path(reconnected, around)
    return reconnected


# ---- how fast it mixes


SIZES = (8, 16, 64)
"""Numbers of workers that are shown by default."""


def graph_rows(choice: Gossip | None, workers: int | None) -> dict[str, Any]:
    """One row for each graph and each number of workers; all graphs that have a name if `choice` is None.

    The row of one graph at one number of workers has the mixing matrix of an averaging.

    Raises:
        UsageError: `workers` is less than 2.
        StrategyError: the graph that was chosen does not exist for so many workers.
    """
    if workers is not None and workers < 2:
        raise UsageError(f"workers must be 2 or more, got {workers}: gossip needs a neighbor.")
    if choice is None:
        rows = [_row(Gossip(name), count) for name in GRAPHS for count in ((workers,) if workers else SIZES)]
    else:
        count = workers or size(choice)
        rows = [_row(choice, count, matrix=True)] if count else [_row(choice, each) for each in SIZES]
    return {"graphs": rows}


def _row(choice: Gossip, workers: int, *, matrix: bool = False) -> dict[str, Any]:
    name = choice.graph
    if name == "random-regular":
        name += f", degree={choice.degree}"
    try:
        graph = build(choice, workers)
    except StrategyError as error:
        if matrix:
            raise
        return {"graph": name, "workers": workers, "impossible": str(error)}
    row = {"graph": name, **mixing(graph).as_dict()}
    return {**row, "mixing": pairwise_mixing(graph).tolist()} if matrix else row
