"""Assignment of locally connected layers by minimum cuts: of the words that machines send, by recursive bisection.

The places of all grids are divided in two, each half in two, and so on. A place with its readers is one *net*: it
costs a word for each channel if the readers and the place itself are on both sides, however many there are of them, so
that the cost of all cuts together is the number of words. A minimum cut of nets is a minimum cut of a graph in which
each net has an edge of its own (Lawler, "Cutsets and partitions of hypergraphs", Networks 3, 1973).

A bisection is balanced in each layer: places in order of rows, or of columns, begin on the one side and end on the
other, and only the places around the border between them, a share `slack` of the layer on each side, may change sides.
Without slack the border is straight, which on regular grids saves nearly all words that can be saved.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import networkx as nx
import torch

from dure.partition.neurons.assignment import Assignment, even
from dure.partition.neurons.layers import UnitLayer

SOURCE, SINK = -1, -2
"""The two ends of a graph; places and nets have numbers from 0. Whole numbers alone, so every process finds one cut."""

Place = tuple[int, int]
"""A layer by its number, and a place of its grid."""


class Net(NamedTuple):
    """Places of which each side that has one costs, less one, the words of a sample."""

    words: int
    places: frozenset[Place]


@dataclass(frozen=True, slots=True)
class Bisection:
    """The `left` places of a division in two, and the words of a sample that it costs."""

    words: int
    left: frozenset[Place]


def by_cut(layers: Sequence[UnitLayer], machines: int, slack: float = 0.0) -> Assignment:
    """Grids by minimum cuts. Dense layers are as in `even`, since no cut of them is better than another."""
    grids = {number: layer for number, layer in enumerate(layers) if layer.reads is not None}
    owners = dict(even(layers, machines))
    found: dict[Place, int] = {}
    places = [(number, place) for number, layer in grids.items() for place in range(layer.places)]
    _divide(places, nets_of(layers), grids, range(machines), slack, found)
    for number, layer in grids.items():
        own = [found[number, place] for place in range(layer.places)]
        owners[layer.name] = torch.tensor(own).repeat(layer.grid[0])
    return owners


def nets_of(layers: Sequence[UnitLayer]) -> list[Net]:
    """The net of each place that locally connected layers read."""
    found = []
    for number, (before, after) in enumerate(pairwise(layers)):
        if before.reads is not None and after.reads is not None:
            readers: list[set[Place]] = [{(number, place)} for place in range(before.places)]
            for reader, read in enumerate(after.reads[: after.places] % before.places):
                for place in set(read.tolist()):
                    readers[place].add((number + 1, reader))
            found += [Net(before.grid[0], frozenset(each)) for each in readers]
    return found


def _divide(
    places: Sequence[Place],
    nets: Sequence[Net],
    grids: Mapping[int, UnitLayer],
    machines: range,
    slack: float,
    found: dict[Place, int],
) -> None:
    """Divide `places` among `machines`, a half of them to the left and the others to the right."""
    if len(machines) == 1:
        found.update(dict.fromkeys(places, machines[0]))
        return
    half = len(machines) // 2
    orders = [_ordered(places, grids, rows=rows) for rows in (True, False)]
    tries = [_bisected(order, nets, half / len(machines), moves) for moves, order in product((0.0, slack), orders)]
    best = min(tries, key=lambda each: each.words)  # the first of equal ones: a straight border
    for own, part in ((best.left, machines[:half]), (frozenset(places) - best.left, machines[half:])):
        inside = [Net(net.words, net.places & own) for net in nets]
        held = [place for place in places if place in own]
        _divide(held, [net for net in inside if net.places], grids, part, slack, found)


def _ordered(places: Sequence[Place], grids: Mapping[int, UnitLayer], *, rows: bool) -> list[list[Place]]:
    """The places of each layer, row by row or column by column."""
    found: dict[int, list[Place]] = {}
    for place in places:
        found.setdefault(place[0], []).append(place)
    if not rows:
        for number, own in found.items():
            width = grids[number].grid[2]
            own.sort(key=lambda each: (each[1] % width, each[1] // width))
    return list(found.values())


def _bisected(order: Sequence[Sequence[Place]], nets: Sequence[Net], share: float, slack: float) -> Bisection:
    """The minimum cut with a `share` of each layer to the left, from which it may differ by `slack`."""
    left: set[Place] = set()
    right: set[Place] = set()
    for places in order:
        count = len(places)
        border, moves = round(share * count), int(slack * count)
        left.update(places[: max(border - moves, 0)])
        right.update(places[border + moves :])
    return minimum_cut(nets, left, right)


def minimum_cut(nets: Sequence[Net], left: Collection[Place], right: Collection[Place]) -> Bisection:
    """The division with the fewest words that has `left` and `right` on their sides."""
    free = sorted(set().union(*(net.places for net in nets)) - set(left) - set(right))
    numbers = dict.fromkeys(left, SOURCE) | dict.fromkeys(right, SINK) | {each: at for at, each in enumerate(free)}
    graph, words = nx.DiGraph(), 0
    graph.add_nodes_from([SOURCE, SINK])
    for at, net in enumerate(nets):
        ends = {numbers[each] for each in net.places}
        if {SOURCE, SINK} <= ends:
            words += net.words
        elif len(ends) > 1:
            enters, leaves = len(free) + 2 * at, len(free) + 2 * at + 1
            graph.add_edge(enters, leaves, capacity=net.words)
            graph.add_edges_from((end, enters) for end in ends)
            graph.add_edges_from((leaves, end) for end in ends)
    cut, (reached, _) = nx.minimum_cut(graph, SOURCE, SINK)
    return Bisection(words + cut, frozenset(left) | {each for each in free if numbers[each] in reached})
