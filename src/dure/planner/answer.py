"""The answer of a plan: a ranking of strategies with reasons and prices, as an object and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure import __version__
from dure.core.target import Target
from dure.planner.candidates import PLAIN, Scene, placed
from dure.planner.commands import Command
from dure.planner.fact_ranges import FactRanges
from dure.planner.learning import LearningCurve
from dure.planner.ranking import Ranked
from dure.planner.search import Found
from dure.planner.sweeps import Sweep

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster


def cost_per_hour(cluster: Cluster, server_machines: int) -> float | None:
    """The price of an hour of all machines of workers and so many of servers; None if the file has no prices."""
    prices = [kind.price for kind in cluster.machines]
    if not all(price is not None for price in prices):
        return None
    total = sum(kind.count * price for kind, price in zip(cluster.machines, prices, strict=True) if price is not None)
    return total + server_machines * (cluster.servers.price or 0.0)


SPANS = ("compute", "communicate", "wait")
STEPS_SHOWN = 4
"""Steps of the winner in the timeline."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """The answer of a plan: strategies in the order of their rank, with reasons. All seconds are virtual.

    `open` has the range of the answer over the facts that the cluster leaves open; None without such facts.
    """

    scene: Scene
    on: str
    found: Found
    bottlenecks: Mapping[str, str]
    why: Sequence[str]
    would_change: Sequence[str]
    sweeps: Mapping[str, Sweep]
    curves: Mapping[str, LearningCurve]
    commands: Mapping[str, Command]
    open: FactRanges | None = None
    target: Target | None = None
    spans: Sequence[Any] = field(default_factory=tuple)
    ddp_script: str | None = None

    @property
    def rows(self) -> Sequence[Ranked]:
        """The timed strategies, the best first."""
        return self.found.rows

    @property
    def best(self) -> Ranked:
        """The strategy of the first rank."""
        return self.found.rows[0]

    @property
    def strategy(self) -> str:
        """The text of the best strategy."""
        return self.best.strategy

    @property
    def command(self) -> str:
        """The command that runs the best strategy."""
        return self.commands[self.best.strategy].line

    def values(self) -> dict[str, Any]:
        """The plan as values of JSON, which the page of a plan reads."""
        return _values(self)

    def _repr_html_(self) -> str | None:
        """The ranking and a curve, which a notebook shows."""
        from dure.report.plan_page import display_plan

        return display_plan(self.values())


def _values(plan: Ranking) -> dict[str, Any]:
    best, scene = plan.best, plan.scene
    return {
        "job": scene.job.name,
        "cluster": plan.on,
        "machines": scene.cluster.about(),
        "basis": scene.cluster.basis(),
        "workers": scene.workers,
        "parameters": scene.model.replica.numel,
        "optimizer": scene.job.optimizer.name,
        "batch": scene.batch,
        "time": "virtual",
        "version": __version__,
        "target": None if plan.target is None else plan.target.value,
        "target_measure": None if plan.target is None else plan.target.measure,
        "answer": {
            "strategy": best.strategy,
            "command": plan.command,
            "why": list(plan.why),
            "would_change": list(plan.would_change),
            "plain_ddp": best.strategy == PLAIN,
            "ddp_script": plan.ddp_script,
        },
        "rows": [_row(plan, rank, row) for rank, row in enumerate(plan.rows, start=1)],
        "refused": [{"strategy": name, "reason": reason} for name, reason in plan.found.refused.items()],
        "open": None if plan.open is None else plan.open.values(plan.on),
        "left": [{"strategy": name, "least_seconds": least} for name, least in plan.found.left.items()],
        "sweeps": {name: sweep.values() for name, sweep in plan.sweeps.items() if len(sweep.at) > 1},
        "timeline": _timeline(plan),
        "curves": [
            {"strategy": name, "seconds": curve.seconds, "loss": curve.loss, "scale_lr": curve.scaled}
            for name, curve in plan.curves.items()
        ],
    }


def _row(plan: Ranking, rank: int, row: Ranked) -> dict[str, Any]:
    timing, (scene, _) = row.timing, placed(plan.scene, row.strategy)
    limits = [limit for limit in map(scene.cluster.memory_of, range(scene.workers)) if limit is not None]
    return {
        "rank": rank,
        "strategy": row.strategy,
        "batch": timing.batch_size,
        "seconds_per_step": timing.seconds,
        "samples_per_second": timing.samples_per_second,
        "factor": row.factor,
        "seconds_to_target": row.seconds_to_target,
        "memory": timing.memory._asdict(),
        "memory_limit": min(limits, default=None),
        "bytes_per_step": timing.bytes_per_step,
        "staleness": timing.staleness,
        "servers": timing.server_machines,
        "cost_per_hour": cost_per_hour(scene.cluster, timing.server_machines),
        "bottleneck": plan.bottlenecks.get(row.strategy, ""),
        "command": plan.commands[row.strategy].line,
    }


def _timeline(plan: Ranking) -> dict[str, Any]:
    """The spans of the winner in its last steps."""
    spans = [span for span in plan.spans if span.kind in SPANS]
    end = max((span.end for span in spans), default=0.0)
    start = max(0.0, end - STEPS_SHOWN * plan.best.timing.seconds)
    return {
        "strategy": plan.best.strategy,
        "seconds": end - start,
        "spans": [
            {
                "worker": span.rank_name,
                "kind": span.kind,
                "start": max(span.start - start, 0.0),
                "end": span.end - start,
                "name": span.detail,
            }
            for span in spans
            if span.end > start
        ],
    }
