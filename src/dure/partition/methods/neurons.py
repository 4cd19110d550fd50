"""DistBelief's partition: the units of dense and locally connected layers at any of the machines of a model.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 3.

An activation goes to another machine at most once, however many units there read it, and so does the error of an input
back. Weights are with the unit that reads. No parameter has two holders, so asynchronous methods over servers may train
replicas that are split in this way, as Downpour and Sandblaster do in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dure.core.catalogue import parameter
from dure.partition.neurons.assignment import by_cut, by_layers, check_used, even, from_file, shuffled
from dure.partition.neurons.layers import Units, unit_model
from dure.partition.shared_layers import SharedLayers
from dure.partition.tensor.plan import SplitPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from dure.job.job import Job
    from dure.partition.neurons.assignment import Assignment
    from dure.partition.neurons.layers import UnitLayer


@dataclass(frozen=True)
class Neurons(SharedLayers):
    """DistBelief's partition: units of dense and locally connected layers at any machines."""

    paper: ClassVar[str] = "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012, section 3"

    in_pipelines: ClassVar[bool] = False

    assignment: str = parameter("even", "machines of the units: even, random, layers, cut, or a JSON file")
    seed: int = parameter(0, "draw of a random assignment", range=">= 0")
    slack: float = parameter(
        0.0,
        "share of a grid on each side of a cut that may change sides, for fewer words and less balance",
        range=">= 0, <= 0.5",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} draws nothing: write a whole number from 0")
        if not 0 <= self.slack <= 0.5:
            raise ValueError(f"slack={self.slack:g} is a share of a grid: write a number from 0 to 0.5, such as 0.05")

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        layers, inside = unit_model(module)
        return split_plan(layers, self.assigned(layers), inside)

    def assigned(self, layers: Sequence[UnitLayer]) -> Assignment:
        """The machine of each unit of each layer."""
        if self.assignment == "random":
            found = shuffled(layers, self.ways, self.seed)
        elif self.assignment == "cut":
            found = by_cut(layers, self.ways, self.slack)
        elif self.assignment in CHOICES:
            found = CHOICES[self.assignment](layers, self.ways)
        else:
            found = from_file(Path(self.assignment), layers, self.ways)
        check_used(found, self.ways)
        return found


CHOICES = {"even": even, "layers": by_layers}


def split_plan(layers: Sequence[UnitLayer], assignment: Assignment, inside: frozenset[str]) -> SplitPlan:
    """The plan of an assignment; `inside` as in `SplitPlan`."""
    owners = [assignment[layer.name] for layer in layers]
    splits = {
        layer.name: Units(layer, owners[number], owners[number - 1] if number else None, layer is layers[-1])
        for number, layer in enumerate(layers)
    }
    return SplitPlan(splits, inside=inside)
