"""Who is whose neighbor in gossip, and how fast that mixes.

| graph            | neighbors of worker i of K                                  | degree                |
|------------------|-------------------------------------------------------------|-----------------------|
| `ring`           | i - 1 and i + 1                                             | 2                     |
| `exponential`    | those 1, 2, 4, 8, ... away, both ways                       | about 2 log2 K        |
| `random-regular` | as many as `degree`, drawn with `seed`                      | `degree`              |
| `complete`       | everybody                                                   | K - 1                 |
| `0-1/1-2/2-0`    | what it says: pairs of ranks                                |                       |
| a file           | what it says: an edge list, or GraphML if it ends so        |                       |

Where in each exchange a worker drawn uniformly averages with a neighbor drawn uniformly, the disagreement (the sum of
squared distances from the mean) shrinks per exchange by at most the second eigenvalue of the expected mixing matrix: on
average to that fraction in its slowest direction.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.errors import StrategyError
from dure.topology.spec import GRAPHS

if TYPE_CHECKING:
    import networkx as nx
    import numpy.typing as npt

    from dure.topology.spec import Gossip

_PAIRS = re.compile(r"\d+-\d+(/\d+-\d+)*")

DRAWS = 100
"""How often a random graph that is not connected is drawn again."""


def build(topology: Gossip, workers: int) -> nx.Graph:
    """The graph of the ranks 0 .. workers - 1. Raises `StrategyError` if there is none that is connected."""
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
    """How many workers the graph is for; None where it is made for any number. Raises `StrategyError`."""
    return None if topology.graph in GRAPHS else _read(topology.graph).number_of_nodes()


def edges_text(graph: nx.Graph) -> str:
    """A graph as text that `Gossip(graph=...)` reads, its nodes numbered by their order. Raises `StrategyError`.

    >>> import networkx as nx
    >>> edges_text(nx.path_graph(["b", "c", "a"]))
    '0-2/1-2'
    """
    ranked = _whole(_ranked(graph), "that was given")
    return "/".join(f"{one}-{other}" for one, other in sorted(tuple(sorted(edge)) for edge in ranked.edges))


def _whole(graph: nx.Graph, name: str) -> nx.Graph:
    """`graph`, once it is known to be connected."""
    import networkx as nx

    islands = [sorted(island) for island in nx.connected_components(graph)]
    if len(islands) > 1:
        raise StrategyError(
            f"the graph {_short(name)} falls apart into {len(islands)} parts, the first of them {islands[0][:8]}: "
            "what one part learns never reaches the others. Add an edge between them."
        )
    return graph


def _short(name: str) -> str:
    return name if len(name) <= 200 else f"{name[:40]}..."


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


def _ranked(found: nx.Graph) -> nx.Graph:
    """`found` with ranks for nodes, and without directions, weights and loops."""
    import networkx as nx

    order = {node: rank for rank, node in enumerate(sorted(found.nodes, key=_place))}
    graph = nx.empty_graph(len(order))
    graph.add_edges_from((order[one], order[other]) for one, other in found.edges() if one != other)
    return graph


def _place(node: Any) -> tuple[int, str]:
    """Where a node of a file comes in the order of ranks: by its number if it has one (also n7), else by its name."""
    digits = str(node).lstrip("n")
    return (int(digits), "") if digits.isdigit() else (1 << 62, str(node))


def knit(graph: nx.Graph, gone: Collection[int]) -> nx.Graph:
    """`graph` without those who are gone: the neighbors of each are linked in a row, so that it stays connected."""
    import networkx as nx

    knitted = graph.copy()
    for node in sorted(gone):
        if node in knitted:
            around = sorted(knitted.neighbors(node))
            knitted.remove_node(node)
            nx.add_path(knitted, around)
    return knitted


# ---- how fast it mixes


def pairwise_mixing(graph: nx.Graph) -> npt.NDArray[np.float64]:
    """The expected W of an exchange: a worker drawn uniformly, a neighbor of it drawn uniformly, and their mean.

    W is symmetric and a projection, so that it is the expected W'W as well.
    """
    workers = graph.number_of_nodes()
    mixing = np.eye(workers)
    for one in graph:
        for other in graph.neighbors(one):
            chance = 0.5 / (workers * graph.degree(one))
            mixing[[one, other], [one, other]] -= chance
            mixing[[one, other], [other, one]] += chance
    return mixing


def metropolis_mixing(graph: nx.Graph) -> npt.NDArray[np.float64]:
    """The W of a round in which everybody averages with all neighbors, weighted so that the mean stays (Metropolis)."""
    workers = graph.number_of_nodes()
    mixing = np.zeros((workers, workers))
    for one, other in graph.edges:
        mixing[one, other] = mixing[other, one] = 1 / (1 + max(graph.degree(one), graph.degree(other)))
    return mixing + np.diag(1 - mixing.sum(axis=1))


def spectral_gap(mixing: npt.NDArray[np.float64]) -> float:
    """One minus the largest absolute eigenvalue but the first: 0 never mixes, 1 does at once."""
    sizes = np.sort(np.abs(np.linalg.eigvalsh(mixing)))
    return float(1 - sizes[-2]) if len(sizes) > 1 else 1.0


def contraction(graph: nx.Graph) -> float:
    """What an exchange leaves of the disagreement, on average, in the slowest direction."""
    return 1 - spectral_gap(pairwise_mixing(graph))


@dataclass(frozen=True, slots=True)
class Mixing:
    """How fast a graph mixes. A gap is one minus what is left of a disagreement, in the slowest direction.

    `gap` is of an averaging of two (`pairwise_mixing`), and of the sum of squared distances from the mean; `round_gap`
    of a round in which all average with all neighbors (`metropolis_mixing`), and of the distances themselves. The last
    two say how many halve the sum of squares. `neighbors` is how many a worker has: "2", or "1 to 7".
    """

    workers: int
    neighbors: str
    gap: float
    round_gap: float
    averagings_to_halve: int
    rounds_to_halve: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def mixing(graph: nx.Graph) -> Mixing:
    """How fast `graph` mixes. Takes time that grows with the cube of the workers: a second at 1,500."""
    degrees = sorted({degree for _, degree in graph.degree})
    gap, round_gap = spectral_gap(pairwise_mixing(graph)), spectral_gap(metropolis_mixing(graph))
    halving = _times_to_halve(1 - gap), _times_to_halve((1 - round_gap) ** 2)
    neighbors = str(degrees[0]) if len(degrees) == 1 else f"{degrees[0]} to {degrees[-1]}"
    return Mixing(graph.number_of_nodes(), neighbors, gap, round_gap, *halving)


def _times_to_halve(left: float) -> int:
    return 1 if left <= 0.5 else math.ceil(math.log(0.5) / math.log(left) - 1e-9)
