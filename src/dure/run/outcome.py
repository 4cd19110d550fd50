"""The counts of a run and of its stages, its outcome, and the summary of all."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dure.core.mixing import mixing
from dure.core.processors import usable_processors
from dure.errors import DureError
from dure.job.replica import digest
from dure.partition.source import StageSource
from dure.report.metrics import TimeShare, VersionCounts
from dure.run.devices import CPU, in_summary
from dure.run.places import is_here

if TYPE_CHECKING:
    import torch

    from dure.core.meter import Span
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster
    from dure.sync.worker_state import WorkerState


DRAWN = 128
"""Workers up to which the record of a run holds the graph of their gossip."""

COUNTS = ("samples", "bytes_sent", "bytes_received", "messages", "updates_applied", "updates_refused")


@dataclass(slots=True)
class Totals:
    """All counts of a run; they grow over the segments between checkpoints and are saved in each checkpoint.

    `steps` is the highest clock that a worker has reached. `version_skew` counts pulls from several servers only.
    """

    seconds: float = 0.0
    steps: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    staleness: VersionCounts = field(default_factory=VersionCounts)
    version_skew: VersionCounts = field(default_factory=VersionCounts)
    time: dict[str, float] = field(default_factory=lambda: {"compute": 0.0, "communicate": 0.0, "wait": 0.0})
    per_worker: dict[str, dict[str, int]] = field(default_factory=dict)
    per_shard: dict[str, dict[str, int]] = field(default_factory=dict)
    failures_survived: int = 0
    events: int = 0

    def count(self, table: str, node: str, **amounts: int) -> None:
        """Add `amounts` to the counts of `node` in "per_worker" or "per_shard"."""
        row = getattr(self, table).setdefault(node, {})
        for name, amount in amounts.items():
            row[name] = row.get(name, 0) + amount

    def count_updates(self, shards: Sequence[tuple[Mapping[int, int], int, int]]) -> None:
        """Take over the counts of the stalest of `shards`, each of (updates by staleness, applied, refused)."""
        stalest = max(shards, key=lambda shard: VersionCounts(Counter(shard[0])).mean)
        self.staleness.histogram.update(stalest[0])
        self.counts["updates_applied"], self.counts["updates_refused"] = stalest[1:]

    def add_time(self, seconds: Mapping[str, float]) -> None:
        for kind in self.time:
            self.time[kind] += seconds.get(kind, 0.0)

    def state(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "steps": self.steps,
            "counts": self.counts,
            "staleness": self.staleness.as_dict(),
            "version_skew": self.version_skew.as_dict(),
            "time": self.time,
            "per_worker": self.per_worker,
            "per_shard": self.per_shard,
            "failures_survived": self.failures_survived,
            "events": self.events,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Totals:
        counted = {
            name: VersionCounts.from_dict(state[name]) for name in ("staleness", "version_skew") if name in state
        }
        totals = cls(**{**state, **counted})
        totals.counts, totals.time = dict(totals.counts), dict(totals.time)
        return totals


@dataclass(slots=True)
class Outcome:
    """The result of a run: its totals, its rows of history, and the parameters that it delivers (None: timing only)."""

    totals: Totals
    history: list[dict[str, Any]]
    params: torch.Tensor | None
    spans: list[Span] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


def summary(setup: Setup, outcome: Outcome, time: str) -> dict[str, Any]:
    """The JSON object of `dure train`."""
    totals, history = outcome.totals, outcome.history
    last = history[-1] if history else {}
    accuracies = [row["accuracy"] for row in history if row.get("accuracy") is not None]
    share = TimeShare(**totals.time)
    return {
        "job": setup.job.name,
        "strategy": setup.strategy.text(),
        "on": setup.config.on,
        "time": time,
        "workers": setup.workers,
        "steps": totals.steps,
        "lr": setup.job.optimizer.lr,
        **{name: totals.counts[name] for name in ("samples",)},
        "seconds": totals.seconds,
        "loss": last.get("loss"),
        "accuracy": last.get("accuracy"),
        "best_accuracy": max(accuracies, default=None),
        **{name: totals.counts[name] for name in COUNTS if name != "samples"},
        "bytes_per_step": _bytes_per_step(totals),
        "staleness": totals.staleness.as_dict(),
        **({"version_skew": totals.version_skew.as_dict()} if totals.version_skew.histogram else {}),
        "time_share": share.as_dict(),
        "failures_survived": totals.failures_survived,
        "params_sha256": "" if outcome.params is None else digest(outcome.params),
        "seed": setup.config.seeded,
        "per_worker": totals.per_worker,
        "per_shard": totals.per_shard,
        **in_summary(setup.devices),
        **_graph(setup),
        **numerics(setup.devices),
        **outcome.notes,
    }


def machines_of(setup: Setup, cluster: Cluster | None) -> dict[str, Any]:
    """The machines of the run's seconds, in words, and the names of their hosts where these are known.

    For predicted seconds also their basis: assumed values, and how wrong they may be.

    A cluster that was measured on a host describes the same machines as a run there. Launchers that know more of their
    machines add it to the notes of the outcome.
    """
    on = setup.config.on
    if cluster is not None:
        return {
            "machines": cluster.about() if on == "virtual" else f"{on}: {cluster.about()}",
            "hosts": list(cluster.hosts),
            "basis": cluster.basis(),
        }
    workers = f"{setup.workers} worker{'s' if setup.workers != 1 else ''}"
    if not is_here(on):
        return {"machines": f"{workers}, {on}", "hosts": []}
    host, cores = socket.gethostname(), usable_processors()
    return {"machines": f"{workers} on {host}, {cores} core{'s' if cores != 1 else ''}", "hosts": [host]}


def check_applied(totals: Totals) -> None:
    """Raise `DureError` for a run in which no update was applied: its result is the initial model."""
    counts = totals.counts
    if counts["updates_applied"]:
        return
    why = "it ended before the first update. Give it more steps or more seconds"
    if counts["updates_refused"]:
        why = (
            f"{counts['updates_refused']} updates were refused, as are those that hold NaN or infinity, are damaged or "
            "come too late. Try a smaller rate, another codec or fewer workers"
        )
    raise DureError(f"no update was applied, so the model is the one that the run began with: {why}.")


def _bytes_per_step(totals: Totals) -> dict[str, float]:
    """Payload bytes that a worker sends and receives in a step, the mean over workers; nothing without steps."""
    steps = sum(row.get("steps", 0) for row in totals.per_worker.values())
    ways = ("sent", "received")
    return {way: totals.counts[f"bytes_{way}"] / steps for way in ways} if steps else {}


def _graph(setup: Setup) -> dict[str, Any]:
    """The graph of gossip and its rate of mixing; only for a number of workers that can be drawn."""
    if setup.topology.graph is None or not 1 < len(setup.topology.graph) <= DRAWN:
        return {}
    return {
        "graph": {
            **mixing(setup.topology.graph).as_dict(),
            "edges": [list(edge) for edge in setup.topology.graph.edges],
        }
    }


def figures_of(worker: WorkerState) -> dict[str, Any]:
    """The figures of a worker's stage; nothing for a worker with a whole model."""
    return worker.source.figures if isinstance(worker.source, StageSource) and worker.clock else {}


def count_stages(totals: Totals, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all stages, by worker, as the part "pipeline" of a summary; nothing without stages.

    The staleness of a run without servers is that of the updates of all stages.
    """
    stages = {name: dict(figures) for name, figures in found.items() if figures}
    if not stages:
        return {}
    if not totals.per_shard:
        totals.staleness = VersionCounts()
        for figures in stages.values():
            totals.staleness.merge(VersionCounts.of(figures["staleness"]))
    return {"pipeline": stages}


def numerics(devices: Sequence[str]) -> dict[str, Any]:
    """The entry of a run's summary on the numerics of its `devices`; none for a run on the CPU alone.

    `matmul` and `convolution` are PyTorch's precision of float32 under CUDA: "tf32", "ieee", or "none" for the default.
    `deterministic` says whether operations without a deterministic form were refused.
    """
    if not set(devices) - {CPU}:
        return {}
    import torch

    backends = torch.backends
    found = {
        "matmul": backends.cuda.matmul.fp32_precision,
        "convolution": backends.cudnn.conv.fp32_precision,  # type: ignore[attr-defined]
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    return {"numerics": found}
