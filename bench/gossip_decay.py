"""How fast the models of AD-PSGD come together on a graph, against what the graph's spectral gap says.

    python bench/gossip_decay.py [--workers 16] [--seeds 20] [--json FILE] [--figure docs/images/gossip.svg]

Without gradients to speak of (rate 0), in virtual time, with steps that last exponentially long, so that who comes next
is drawn at random. The models start in the graph's slowest direction, where theory is sharp: per averaging of two, the
expected models keep 1 - gap of their deviation. Hence the root mean square distance from the mean keeps at least that
(Jensen), and at most its square root. "independent" is what the distance keeps in the long run where every averaging is
drawn apart from all others: the largest eigenvalue of the second moments, computed. Rates are in multiples of the gap:
1 is a distance that keeps 1 - gap per averaging.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import torch
from _script import parse, told
from torch import nn

from dure.core.mixing import mixing, pairwise_mixing
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import ShiftedExponential
from dure.topology.gossip.choice import Gossip
from dure.topology.gossip.graph import build

GRAPHS = ("ring", "random-regular", "exponential", "complete")

LEFT = 0.05
"""Of the squared distance, how much is to be left at the end."""


class Still(nn.Module):
    """As many numbers as there are directions to follow, and a loss that leaves them alone."""

    def __init__(self, directions: int) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(directions, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.place


@dataclass(frozen=True)
class From:
    """A method whose workers begin at the rows of `starts`."""

    method: Any
    starts: Any

    @property
    def traits(self) -> Any:
        return self.method.traits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.method, name)

    async def work(self, worker: Any) -> None:
        worker.params.copy_(self.starts[worker.rank])
        await self.method.work(worker)


def run(graph: str, starts: torch.Tensor, steps: int, seed: int) -> list[tuple[float, float]]:
    """After each step of all: averagings so far, and the squared distance from the mean."""
    workers, directions = starts.shape
    data = Data(torch.zeros(workers, directions, dtype=torch.float64), torch.zeros(workers, dtype=torch.float64))
    job = Job(
        partial(Still, directions),
        lambda outputs, targets: outputs.sum(),
        data,
        batch_size=1,
        optimizer=OptimizerSpec(lr=0.0),
        name="still",
    )
    config = TrainConfig(
        job="still", strategy=f"ad-psgd gossip:graph={graph}", on="virtual", steps=steps, eval_every=1, seed=seed
    )
    cluster = Cluster(machines=(Machines(count=workers, compute=ShiftedExponential(seconds=0.01, shift=0.0)),))
    setup, _ = resolve(config, Prebuilt(job=job, cluster=cluster))
    object.__setattr__(setup, "strategy", Strategy(From(setup.sync, starts), setup.strategy.topology))  # type: ignore[arg-type]
    rows: list[tuple[float, float]] = []

    def note(row: dict[str, Any]) -> None:
        rows.append((sum(worker.peer.averaged for worker in segment.workers.values()) / 2, row["consensus"] ** 2))

    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks(row=note)), None)
    segment.run()
    return rows[:steps]


def independent(graph: nx.Graph) -> float:
    """What the sum of squares keeps in the long run, per averaging, if each is drawn apart from all others."""
    workers = graph.number_of_nodes()
    moments = np.zeros((workers**2, workers**2))
    for one in graph:
        for other in graph.neighbors(one):
            exchange = np.eye(workers)
            exchange[np.ix_([one, other], [one, other])] = 0.5
            moments += np.kron(exchange, exchange) / (workers * graph.degree(one))
    apart = np.eye(workers) - 1 / workers
    both = np.kron(apart, apart)
    return float(np.abs(np.linalg.eigvals(both @ moments @ both)).max())


def measure(name: str, workers: int, seeds: int) -> dict[str, Any]:
    graph = build(Gossip(name), workers)
    values, vectors = np.linalg.eigh(pairwise_mixing(graph))
    slowest = vectors[:, np.isclose(values, values[-2])]
    starts = torch.from_numpy(slowest * math.sqrt(workers / slowest.shape[1]))
    gap = mixing(graph).gap
    steps = max(4, round(-math.log(LEFT) / (2 * gap) / (0.6 * workers)))
    runs = np.array([run(name, starts, steps, seed) for seed in range(seeds)])
    averagings, squares = runs.mean(axis=0).T

    def rate(kept: float, over: float) -> float:
        return math.log(kept) / (2 * over * math.log(1 - gap))

    first = len(squares) // 8
    return {
        "graph": name,
        "gap": gap,
        "measured": rate(squares[-1] / squares[first], averagings[-1] - averagings[first]),
        "independent": rate(independent(graph), 1),
        "averagings_per_step": averagings[-1] / steps / workers,
        "curve": [[0.0, 1.0], *np.stack([averagings, np.sqrt(squares)], axis=1).round(5).tolist()],
    }


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """Distance over averagings, per gap: all graphs on one axis, between the two bounds."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gossip"}):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        ends = [-row["curve"][-1][0] * math.log(1 - row["gap"]) for row in found]
        time = np.linspace(0, max(ends), 50)
        axes.fill_between(time, np.exp(-time), np.exp(-time / 2), color="#E4E7EB", label="between the bounds")
        for row, color in zip(found, ("#0072B2", "#D55E00", "#009E73", "#CC79A7"), strict=True):
            averagings, distance = np.array(row["curve"]).T
            label = f"{row['graph']}, gap {row['gap']:.4f}"
            axes.plot(-averagings * math.log(1 - row["gap"]), distance, color=color, marker=".", label=label)
        axes.set(yscale="log", xlabel="averagings, times -ln(1 - gap)", ylabel="distance from the mean (RMS)")
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    given = parse(parser, workers=8, seeds=2)
    torch.set_num_threads(1)
    with told("gossip_decay", given) as facts:
        found = [measure(name, given.workers, given.seeds) for name in GRAPHS]
        print(f"{'graph':15} {'gap':>8} {'measured':>9} {'independent':>12} {'averagings/step':>16}")
        for row in found:
            numbers = f"{row['gap']:8.5f} {row['measured']:9.2f} {row['independent']:12.2f}"
            print(f"{row['graph']:15} {numbers} {row['averagings_per_step']:16.2f}")
        if given.figure is not None:
            draw(found, given.figure)
        facts |= {"workers": given.workers, "seeds": given.seeds, "graphs": found}


if __name__ == "__main__":
    main()
