"""How fast gossip on a graph mixes: its mixing matrices and their spectral gaps.

If in each exchange a worker drawn uniformly averages with a neighbor drawn uniformly, the disagreement (the sum of
squared distances from the mean) shrinks per exchange by at most the second eigenvalue of the expected mixing matrix: on
average to that fraction in its slowest direction.
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
