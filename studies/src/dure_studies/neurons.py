"""Compares assignments of units to machines, by words and seconds that are computed from the assignments alone.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, section 3 and figure 3: a model is divided over
machines, and locally connected layers gain more from machines than dense ones, since they communicate less.

A locally connected network has three layers of 7 x 7 patches, 8 channels on a 64 x 64 grid; a dense one four layers of
2048 units. A word has four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study

if TYPE_CHECKING:
    from torch import nn

MACHINES = (2, 4, 8, 16)
BATCH = 32
FLOPS = 20e9
BACKWARD = 2 / 3
"""The share of a step that goes backward."""

CHOICES: Mapping[str, Mapping[str, Any]] = {
    "random": {},
    "layers": {},
    "even": {},
    "cut": {},
    "cut,slack=0.1": {"slack": 0.1},
}
SLACK = "local", 16
"""The model and the machines for which cuts have slack too, since these take minutes."""
MOST_LAYERS = 4
"""The most machines that whole layers of both models can use."""


def local(side: int = 64, channels: int = 8, kernel: int = 7, depth: int = 3) -> nn.Sequential:
    """A network of locally connected layers, with a dense layer at the end."""
    from torch import nn

    from dure.job.models.local import LocallyConnected2d

    shape, layers = (1, side, side), list[nn.Module]()
    for _ in range(depth):
        layer = LocallyConnected2d(shape, channels, kernel)
        layers += [layer, nn.Tanh()]
        shape = layer.outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), 10))


def dense(width: int = 2048) -> nn.Sequential:
    """A network of dense layers."""
    from torch import nn

    hidden = [nn.Linear(width, width) for _ in range(3)]
    return nn.Sequential(nn.Linear(784, width), *hidden, nn.Linear(width, 10))


MODELS: Mapping[str, Callable[[], nn.Sequential]] = {"local": local, "dense": dense}


def _settings() -> Mapping[str, Setting]:
    found = {}
    for model, build in MODELS.items():
        facts = {"model": build()}
        for machines in MACHINES:
            for choice in CHOICES:
                if (choice == "layers" and machines > MOST_LAYERS) or (
                    "slack" in choice and (model, machines) != SLACK
                ):
                    continue
                found[f"{model}, {machines} machines, {choice}"] = Setting(
                    choice, Cluster.uniform(machines), panel=model, line=choice, at=machines, facts=facts
                )
    return found


def _measure(_study: Study, _job: None, setting: Setting, _rounds: int, seed: int) -> Row:
    from dure.partition.methods.neurons import Neurons
    from dure.partition.neurons.assignment import forecast, traffic, words_sent
    from dure.partition.neurons.layers import unit_model

    machines, name = setting.cluster.workers, setting.strategy
    layers, _ = unit_model(setting.facts["model"])
    chosen = Neurons(machines, name.partition(",")[0], seed=seed, **CHOICES[name])
    found = traffic(layers, chosen.assigned(layers), machines)
    alone = 6 * BATCH * sum(int(each.work.sum()) for each in found) / FLOPS
    step = forecast(found, alone, setting.cluster.link.bandwidth / 4 / BATCH, BACKWARD)
    forward, backward = words_sent(found)
    return {"forward": forward, "backward": backward, "speedup": alone / step.seconds, "idle": step.idle}


def _fastest(rows: OfSeed, model: str, machines: int, *choices: str) -> list[float]:
    return [rows[f"{model}, {machines} machines, {choice}"]["speedup"] for choice in choices]


def _are_ends(speeds: list[float]) -> bool:
    """Whether the first speed is the least and the last the largest."""
    return speeds[0] == min(speeds) and speeds[-1] == max(speeds)


STUDY = Study(
    name="neurons",
    about=f"Units at machines of {FLOPS / 1e9:g} Gflop/s, with links of 10 Gbit/s, mini-batches of {BATCH}.",
    nature="Computed from the assignment; idle time includes communication.",
    job="",
    settings=_settings,
    measure=_measure,
    rounds=1,
    seeds=1,
    columns=(
        FigureColumn("forward", "words per sample, forward", "{:,.0f}"),
        FigureColumn("backward", "backward", "{:,.0f}"),
        FigureColumn("speedup", "times as fast as one", "{:.2f}"),
        FigureColumn("idle", "idle", "{:.0%}"),
    ),
    x="machines",
    y="speedup",
    statements=(
        Statement(
            "Local layers on 16 machines: cuts send less than a third of the words of random places",
            lambda rows: rows["local, 16 machines, cut"]["forward"] < rows["local, 16 machines, random"]["forward"] / 3,
        ),
        Statement(
            "Local layers on 16 machines: cuts are the fastest, random places the slowest",
            lambda rows: _are_ends(_fastest(rows, "local", 16, "random", "cut,slack=0.1", "even", "cut")),
        ),
        Statement(
            "Whole layers at machines are no faster than one machine: one works at a time",
            lambda rows: all(row["speedup"] <= 1 for name, row in rows.items() if name.endswith("layers")),
        ),
        Statement(
            "Dense layers: no assignment is better than places in a row",
            lambda rows: all(
                row["speedup"] <= rows[f"{name.rpartition(', ')[0]}, even"]["speedup"] * 1.01
                for name, row in rows.items()
                if name.startswith("dense")
            ),
        ),
        Statement(
            "16 machines: local layers gain more than dense ones",
            lambda rows: rows["local, 16 machines, cut"]["speedup"] > rows["dense, 16 machines, even"]["speedup"],
        ),
    ),
    quick={},
)
