"""Assignments of units to machines: for each layer the machine of each unit.

| `assignment` | units                                                                                        |
|--------------|----------------------------------------------------------------------------------------------|
| `even`       | of each layer as many in a row at each machine; of a grid, rows of places with all channels  |
| `random`     | as `even`, shuffled by a seed                                                                |
| `layers`     | each layer whole at one machine, layers in a row, with as little work as possible at the most |
| `cut`        | of grids, by minimum cuts of the words sent (`cut.py`); of dense layers as `even`            |
| `FILE.json`  | by an object of the layers' names, each with the machine of each of its units                |
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dure.core.ranges import equal_ranges
from dure.core.regular_file import read_regular
from dure.errors import UsageError
from dure.partition.cut import balanced
from dure.partition.neurons.layers import UnitLayer

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
