"""Assigns the units of each layer to machines, and forecasts the words and the seconds of an assignment.

| `assignment` | units                                                                                        |
|--------------|----------------------------------------------------------------------------------------------|
| `even`       | of each layer as many in a row at each machine; of a grid, rows of places with all channels  |
| `random`     | as `even`, shuffled by a seed                                                                |
| `layers`     | each layer whole at one machine, layers in a row, with as little work as possible at the most |
| `cut`        | of grids, by minimum cuts of the words sent; of dense layers as `even`                       |
| `FILE.json`  | by an object of the layers' names, each with the machine of each of its units                |

`cut` makes minimum cuts of the words that machines send, by recursive bisection.
The places of all grids are divided in two, each half in two, and so on. A place with its readers is one *net*: it
costs a word for each channel if the readers and the place itself are on both sides, however many there are of them, so
that the cost of all cuts together is the number of words. A minimum cut of nets is a minimum cut of a graph in which
each net has an edge of its own (Lawler, "Cutsets and partitions of hypergraphs", Networks 3, 1973).

A bisection is balanced in each layer: places in order of rows, or of columns, begin on the one side and end on the
other, and only the places around the border between them, a share `slack` of the layer on each side, may change sides.
Without slack the border is straight, which on regular grids saves nearly all words that can be saved.

`traffic` has the words sent and the work for a sample, computed from the assignment alone.
An activation goes to each other machine with a unit that reads it, once. Its error comes back as one word of each of
these machines. All machines get the outputs of the last layer, and no error of them. A dense layer that is read by a
dense layer sends n (D - 1) words if all D machines have units of the next.

    t_l = max_d(work_d) + comm_l        every machine waits for the slowest in each layer, forward and backward

The backward of a layer has twice the work of its forward, that of the first layer as much: no input needs an error.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import torch
from torch import Tensor

from dure.core.regular_file import read_regular
from dure.core.vectors import equal_ranges
from dure.errors import UsageError
from dure.partition.cut import balanced
from dure.partition.neurons.layers import UnitLayer, units_at

Assignment = Mapping[str, Tensor]
"""The machine of each unit of each layer, by the layer's name."""


def even(layers: Sequence[UnitLayer], machines: int) -> Assignment:
    """Ranges of places of each layer, as even as whole places allow."""
    return {layer.name: even_places(layer.places, machines).repeat(layer.grid[0]) for layer in layers}


def even_places(places: int, machines: int) -> Tensor:
    """The machine of each of so many places in a row."""
    sizes = torch.tensor([stop - start for start, stop in equal_ranges(places, machines)])
    return torch.arange(machines).repeat_interleave(sizes)


def shuffled(layers: Sequence[UnitLayer], machines: int, seed: int) -> Assignment:
    """The units of each layer at random machines, as many at each as in `even`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        layer.name: even_places(layer.units, machines)[torch.randperm(layer.units, generator=generator)]
        for layer in layers
    }


def by_layers(layers: Sequence[UnitLayer], machines: int) -> Assignment:
    """Whole layers in a row at each machine, so that the most work of a machine is the least."""
    if len(layers) < machines:
        raise UsageError(
            f"assignment=layers puts whole layers at {machines} machines, and this model has {len(layers)}: write "
            f"ways={len(layers)} or less, or assignment=even."
        )
    work = [layer.units * layer.fan_in for layer in layers]
    starts = balanced(work, [True] * len(layers), machines)
    owners = [sum(number >= start for start in starts) for number in range(len(layers))]
    return {layer.name: torch.full((layer.units,), owner) for layer, owner in zip(layers, owners, strict=True)}


def from_file(path: Path, layers: Sequence[UnitLayer], machines: int) -> Assignment:
    """The assignment in a file. Raises `UsageError` for one that does not fit the model."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(
            f"assignment={path} is no assignment: {error}. Write even, random, layers, cut, or a JSON file of "
            'the form {"0": [0, 1, 1]}: for each layer the machine of each unit.'
        ) from error
    names = [layer.name for layer in layers]
    if not isinstance(found, dict) or sorted(found) != sorted(names):
        raise UsageError(f"{path} must assign the units of the layers {', '.join(names)}, each by its name.")
    for layer in layers:
        owners = found[layer.name]
        right = isinstance(owners, list) and all(type(each) is int and 0 <= each < machines for each in owners)
        if not right or len(owners) != layer.units:
            raise UsageError(
                f"{path} must give each of the {layer.units} units of layer {layer.name} a machine from 0 to "
                f"{machines - 1}."
            )
    return {name: torch.tensor(found[name]) for name in names}


def check_used(assignment: Assignment, machines: int) -> None:
    """Raise `UsageError` for a machine without units: it would have no parameters."""
    used = set(torch.cat([*assignment.values()]).tolist())
    for machine in range(machines):
        if machine not in used:
            raise UsageError(f"machine {machine} of {machines} has no unit: use fewer ways, or another assignment.")


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


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """A layer of units for one sample: its `work` at each machine, in multiplications, and words between machines.

    `forward[d, e]` are the activations that machine d sends to e before the layer, `backward[e, d]` the errors back.
    The outputs of the model are a layer of their own, without work.
    """

    name: str
    work: Tensor
    forward: Tensor
    backward: Tensor

    @property
    def idle(self) -> float:
        """The share of the machines' time that they wait for the slowest, of work alone."""
        slowest = int(self.work.max())
        return 1 - float(self.work.sum()) / (slowest * len(self.work)) if slowest else 0.0

    @property
    def words(self) -> tuple[int, int]:
        """The most words that one machine sends or receives, forward and backward: its link carries them in turn."""
        most = [int(torch.maximum(each.sum(0), each.sum(1)).max()) for each in (self.forward, self.backward)]
        return most[0], most[1]


class Forecast(NamedTuple):
    """Seconds of a mini-batch in which machines compute or communicate, and the share of it that they are idle."""

    compute: float
    communicate: float
    idle: float

    @property
    def seconds(self) -> float:
        """Seconds of the mini-batch."""
        return self.compute + self.communicate


def traffic(layers: Sequence[UnitLayer], assignment: Assignment, machines: int) -> list[LayerTraffic]:
    """The traffic of each layer, and of the outputs."""
    found, sources = [], None
    for layer in layers:
        owned = units_at(assignment[layer.name], machines)
        words = torch.zeros(machines, machines, dtype=torch.long)
        if sources is not None:
            needed = [layer.inputs_of(units) for units in owned]
            pairs = [[int(torch.isin(each, read).sum()) for read in needed] for each in sources]
            words = torch.tensor(pairs).fill_diagonal_(0)
        work = torch.tensor([units.numel() * layer.fan_in for units in owned])
        found.append(LayerTraffic(layer.name, work, words, words.T))
        sources = owned
    assert sources is not None
    outputs = torch.tensor([[units.numel()] * machines for units in sources]).fill_diagonal_(0)
    nothing = torch.zeros_like(outputs)
    return [*found, LayerTraffic("outputs", nothing[0], outputs, nothing)]


def words_sent(found: Sequence[LayerTraffic]) -> tuple[int, int]:
    """The words of a sample that all machines send, forward and backward."""
    return sum(int(each.forward.sum()) for each in found), sum(int(each.backward.sum()) for each in found)


def forecast(found: Sequence[LayerTraffic], seconds: float, words_per_second: float, backward: float) -> Forecast:
    """The forecast of a mini-batch that takes one machine so many `seconds`, in which `backward` is the share of that.

    Each machine sends and receives `words_per_second` of each sample of the mini-batch at the same time. Every two
    machines are supposed to exchange something before each layer, so that all wait for the slowest. If some have their
    inputs before others, the mini-batch takes less.
    """
    machines = len(found[0].work)
    work = torch.stack([each.work for each in found]).double()
    times = torch.tensor([1.0, *[2.0] * (len(found) - 1)], dtype=torch.float64)[:, None] * work
    own = work.sum(0)
    passes = (1 - backward) * work / own.sum(), backward * times / times.sum(0) * own / own.sum()
    compute = seconds * sum(float(each.amax(1).sum()) for each in passes)
    communicate = sum(sum(each.words) for each in found) / words_per_second
    return Forecast(compute, communicate, 1 - seconds / (machines * (compute + communicate)))
