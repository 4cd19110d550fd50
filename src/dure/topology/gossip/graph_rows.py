"""How fast the graphs of gossip mix, as rows of `dure methods gossip`."""

from __future__ import annotations

from typing import Any

from dure.core.mixing import mixing, pairwise_mixing
from dure.errors import StrategyError, UsageError
from dure.topology.gossip.choice import GRAPHS, Gossip
from dure.topology.gossip.graph import build, size

SIZES = (8, 16, 64)
"""Numbers of workers that are shown if none is given."""


def graph_rows(choice: Gossip | None, workers: int | None) -> dict[str, Any]:
    """One row for each graph and each number of workers; all graphs that have a name if `choice` is None.

    The row of one graph at one number of workers has the mixing matrix of an averaging.

    Raises:
        UsageError: `workers` is less than 2.
        StrategyError: the graph that was chosen does not exist for so many workers.
    """
    if workers is not None and workers < 2:
        raise UsageError(f"workers should be 2 or more, got {workers}: nobody gossips alone.")
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
