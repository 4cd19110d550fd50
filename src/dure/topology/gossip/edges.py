"""Graphs as text: pairs of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dure.errors import StrategyError

if TYPE_CHECKING:
    import networkx as nx


def edges_text(graph: nx.Graph) -> str:
    """A graph as text that `Gossip(graph=...)` reads, its nodes numbered by their order. Raises `StrategyError`.

    >>> import networkx as nx
    >>> edges_text(nx.path_graph(["b", "c", "a"]))
    '0-2/1-2'
    """
    ranked = _whole(_ranked(graph), "that was given")
    return "/".join(f"{one}-{other}" for one, other in sorted(tuple(sorted(edge)) for edge in ranked.edges))


def _whole(graph: nx.Graph, name: str) -> nx.Graph:
    """Return `graph` if it is connected; raises `StrategyError` if it is not."""
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


def _ranked(found: nx.Graph) -> nx.Graph:
    """`found` with ranks for nodes, and without directions, weights and loops."""
    import networkx as nx

    order = {node: rank for rank, node in enumerate(sorted(found.nodes, key=_place))}
    graph = nx.empty_graph(len(order))
    graph.add_edges_from((order[one], order[other]) for one, other in found.edges() if one != other)
    return graph


def _place(node: Any) -> tuple[int, str]:
    """The sort key that makes ranks of the nodes of a file: the number, if a node has one (also n7), else the name."""
    digits = str(node).lstrip("n")
    return (int(digits), "") if digits.isdigit() else (1 << 62, str(node))
