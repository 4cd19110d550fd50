"""Mixing of gossip on a graph: mixing matrices and their spectral gaps.

In an exchange, a worker drawn uniformly averages with a neighbor drawn uniformly. On average, an exchange multiplies
the disagreement (the sum of squared distances from the mean) by at most the second eigenvalue of the expected mixing
matrix, and by exactly this factor in the slowest direction.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import networkx as nx
    import numpy.typing as npt


def pairwise_mixing(graph: nx.Graph) -> npt.NDArray[np.float64]:
    """The expected mixing matrix W of an exchange between a random worker and a random neighbor of it.

    The W of an exchange is symmetric and a projection, so this is the expected W'W as well.
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
    """The mixing matrix of a round in which every worker averages with all neighbors, with Metropolis weights."""
    workers = graph.number_of_nodes()
    mixing = np.zeros((workers, workers))
    for one, other in graph.edges:
        mixing[one, other] = mixing[other, one] = 1 / (1 + max(graph.degree(one), graph.degree(other)))
    return mixing + np.diag(1 - mixing.sum(axis=1))


def spectral_gap(mixing: npt.NDArray[np.float64]) -> float:
    """One minus the second largest absolute eigenvalue: 0 never mixes, 1 mixes in one exchange."""
    sizes = np.sort(np.abs(np.linalg.eigvalsh(mixing)))
    return float(1 - sizes[-2]) if len(sizes) > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Mixing:
    """Speed of mixing on a graph.

    `gap` is the spectral gap of an exchange of two workers (`pairwise_mixing`): one minus the factor of the sum of
    squared distances from the mean. `round_gap` is the gap of a round of all workers (`metropolis_mixing`): one minus
    the factor of the distances themselves. `averagings_to_halve` and `rounds_to_halve` count the exchanges and rounds
    that halve the sum of squares. `neighbors` is the number of neighbors of a worker: "2", or "1 to 7".
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
    """The speed of mixing on `graph`. Its computation grows with the cube of the workers: a second for 1,500."""
    degrees = sorted({degree for _, degree in graph.degree})
    gap, round_gap = spectral_gap(pairwise_mixing(graph)), spectral_gap(metropolis_mixing(graph))
    halving = _times_to_halve(1 - gap), _times_to_halve((1 - round_gap) ** 2)
    neighbors = str(degrees[0]) if len(degrees) == 1 else f"{degrees[0]} to {degrees[-1]}"
    return Mixing(graph.number_of_nodes(), neighbors, gap, round_gap, *halving)


def _times_to_halve(left: float) -> int:
    return 1 if left <= 0.5 else math.ceil(math.log(0.5) / math.log(left) - 1e-9)
