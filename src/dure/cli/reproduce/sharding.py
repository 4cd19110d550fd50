"""Compares parameter sharding by layer and by memory on VGG-16, for 1 to 8 workers with a server for each two.

The paper (in Korean; TensorFlow 1.15 with MPICH, RTX 2080 Ti, 10 Gbit/s Ethernet, ImageNet-1K) reports equal times
with 1 and 2 workers, which have one server; sharding by memory is faster by 20 % with 4 workers and by 66 % with 8. It
does not give the compute time of a step, the order of updates and the machines of the servers. Here updates are
synchronous (BSP), servers have machines of their own, and one compute time for all cluster sizes is fitted to the two
figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dure.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table

    from dure.job.job import Job

PAPER = {1: 1.0, 2: 1.0, 4: 1.20, 8: 1.66}
"""Published ratios: seconds of a step by layer, divided by those by memory, by number of workers."""

STEPS = 10

Row = dict[str, Any]

StepSeconds = Callable[[int, int, str], float]
"""Gives seconds of a step for a number of workers, a number of servers, and the unit of sharding."""


QUICK: dict[str, Any] = {}
"""Flags of the reduced form."""


def reproduce(on: str = "virtual") -> dict[str, Any]:
    """The rows, in virtual time: `layer` and `memory` are seconds per step, `ratio` is the first divided by the second.

    `compute_seconds` is the fitted time of a step; `residual` is the relative error of each ratio to the paper's.
    On "namespaces" the seconds are real, of a small model of the same shape, and nothing is fitted (`sharding_real`).

    Raises `UsageError` for another place, or if the machine cannot make namespaces.
    """
    if on not in ("virtual", "namespaces"):
        raise UsageError(f'sharding is reproduced on "virtual" or "namespaces", got {on!r}.')
    if on == "namespaces":
        from dure.cli.reproduce.sharding_real import COMPUTE, measured

        rows = [_row(workers, measured) for workers in PAPER]
        return {"reproduce": "sharding", "time": "real", "compute_seconds": COMPUTE, "rows": rows}
    from dure.job.models.vgg16 import vgg16_shapes

    job = vgg16_shapes()
    compute = _fit(job)
    rows = [_row(workers, _virtual(job, compute)) for workers in PAPER]
    residual = {str(row["workers"]): row["ratio"] / row["paper"] - 1 for row in rows}
    return {"reproduce": "sharding", "time": "virtual", "compute_seconds": compute, "residual": residual, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """The rows as a table."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", caption=_caption(result), caption_justify="left")
    for name in ("workers", "servers", "by layer", "by memory", "ratio", "paper"):
        shown.add_column(name, justify="right")
    for row in result["rows"]:
        times = (f"{row[by]:.2f} s" for by in ("layer", "memory"))
        shown.add_row(str(row["workers"]), str(row["servers"]), *times, f"{row['ratio']:.2f}", f"{row['paper']:.2f}")
    return shown


def _caption(result: dict[str, Any]) -> str:
    if result["time"] == "real":
        return (
            "seconds per step are real: hosts in network namespaces of this machine, a small model of the same shape. "
            f"A step computes for {result['compute_seconds']:g} s."
        )
    return (
        "seconds per step are virtual: a model of machines and network. "
        f"Fitted to the paper's ratios: a step computes for {result['compute_seconds']:.2f} s."
    )


def _row(workers: int, step_seconds: StepSeconds) -> Row:
    servers = max(1, workers // 2)
    layer, memory = (step_seconds(workers, servers, by) for by in ("layer", "memory"))
    ratio = layer / memory
    return {
        "workers": workers,
        "servers": servers,
        "layer": layer,
        "memory": memory,
        "ratio": ratio,
        "paper": PAPER[workers],
    }


def _fit(job: Job) -> float:
    """The compute time whose ratios fit the paper best: least squares of their logarithms."""
    from scipy.optimize import minimize_scalar

    def distance(compute: float) -> float:
        return sum(math.log(_row(workers, _virtual(job, compute))["ratio"] / PAPER[workers]) ** 2 for workers in (4, 8))

    return float(minimize_scalar(distance, bounds=(0.1, 30.0), method="bounded", options={"xatol": 0.05}).x)


def _virtual(job: Job, compute: float) -> StepSeconds:
    return lambda workers, servers, by: _step_seconds(job, workers, servers, by, compute)


def _step_seconds(job: Job, workers: int, servers: int, by: str, compute: float) -> float:
    """Virtual seconds of a step under BSP over links of 10 Gbit/s."""
    from dure.run.train import train
    from dure.runtime.virtual.cluster import Cluster, Link
    from dure.runtime.virtual.compute import Constant

    cluster = Cluster.uniform(workers, compute=Constant(seconds=compute), link=Link(bandwidth="10 Gbit/s"))
    topology = f"ps:shards={servers},split={by}"
    run = train(job, sync="bsp", topology=topology, on=cluster, steps=STEPS, timing_only=True)
    return float(run.summary()["seconds"]) / STEPS
