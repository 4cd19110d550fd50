"""Figures of the stages of a pipeline in the record of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.partition.source import StageSource
from dure.report.metrics import VersionCounts

if TYPE_CHECKING:
    from dure.run.outcome import Totals
    from dure.sync.worker import Worker


def figures_of(worker: Worker) -> dict[str, Any]:
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
