"""A sharing of the layers of `stage_jobs.py`, named in strategy texts: `shared_layers.py:Pairs:ways=2`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from dure.job.job import Job
from dure.partition.shared_layers import SharedLayers
from dure.partition.tensor.linear import Column, Row
from dure.partition.tensor.plan import LayerSplit, SplitPlan

HERE = Path(__file__)


@dataclass(frozen=True)
class Pairs(SharedLayers):
    """Each two linear layers share their units: by outputs, then by inputs."""

    def plan(self, job: Job, module: nn.Module) -> SplitPlan:
        linear = [name for name, each in module.named_modules() if isinstance(each, nn.Linear)]
        splits: list[LayerSplit] = [Column(), Row()]
        return SplitPlan({name: splits[number % 2] for number, name in enumerate(linear)})


def pairs(ways: int) -> str:
    """The text of the sharing."""
    return f"{HERE}:Pairs:ways={ways}"
