"""Compares SSP by its bound, with stragglers that pass and with one that lasts.

Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS 2013: a worker
that leads the slowest by the bound waits. Workers wait less the larger the bound, and staleness stays bounded.

    passing    log-normal times of all workers: the slowest changes from step to step
    lasting    one worker is five times slower, always: in the end the others wait for it, whatever the bound
"""

from __future__ import annotations

import json
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, figures

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 8
STEP = 0.01
"""Mean seconds of a computation."""
SLOW = 0.2
RATE = 0.02
"""Of each gradient that SSP adds up; BSP has the rate times the workers for their mean."""
BOUNDS = ("0", "1", "3", "10", "inf")
PASSING, LASTING = "passing", "lasting"
NEAR = 0.2
"""The largest difference of samples that counts as equal: a start of `bound` steps is free."""


def _settings() -> Mapping[str, Setting]:
    kinds = {
        PASSING: (Machines(count=WORKERS, compute=LogNormal(seconds=STEP, sigma=1.0)),),
        LASTING: (
            Machines(count=WORKERS - 1, compute=Constant(seconds=STEP)),
            Machines(count=1, compute=Constant(seconds=STEP), speed=SLOW),
        ),
    }
    found = {}
    for kind, machines in kinds.items():
        cluster = Cluster(machines=machines)
        found[f"{kind}, bsp"] = Setting("bsp ps", cluster, options={"lr": RATE * WORKERS}, panel=kind, line="bsp")
        for bound in BOUNDS:
            strategy, line = f"ssp:bound={bound} ps", f"bound {bound}"
            found[f"{kind}, {line}"] = Setting(strategy, cluster, options={"lr": RATE}, panel=kind, line=line)
    return found


def _measure(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """A run of `rounds` mean computations. `waiting` is the share of time in which workers do not compute."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        length = {"steps": 10**6, "seconds": rounds * STEP}
        run = setting.train(job, seed=seed, **length, eval_every=4, exact=True, trace=True, out=place)
        lead = largest_lead(json.loads((place / "trace.json").read_text(encoding="utf-8"))["traceEvents"])
    summary = run.summary()
    waiting = 1 - summary["time_share"]["compute"]
    return figures(run, study.target) | {"waiting": waiting, "lead": lead, "samples": summary["samples"]}


def largest_lead(events: list[Row]) -> int:
    """The most steps that a worker has begun a computation ahead of the slowest, from the events of a trace."""
    ends: dict[int, list[float]] = {}
    begins: list[tuple[float, int]] = []
    for event in events:
        if event.get("cat") == "compute":
            own = ends.setdefault(event["pid"], [])
            begins.append((event["ts"], len(own)))
            own.append(event["ts"] + event["dur"])
    return max(done - min(bisect_right(own, now) for own in ends.values()) for now, done in begins)


def _bounded(rows: OfSeed) -> bool:
    return all(
        rows[f"{kind}, bound {bound}"]["lead"] <= float(bound) for kind in (PASSING, LASTING) for bound in BOUNDS
    )


def _samples(rows: OfSeed, kind: str, method: str) -> float:
    """Samples over those of BSP in the same seconds."""
    return float(rows[f"{kind}, {method}"]["samples"] / rows[f"{kind}, bsp"]["samples"])


STUDY = Study(
    name="ssp",
    about=f"digits-mlp, {WORKERS} workers over one server, computations of {STEP * 1e3:g} ms in the mean.",
    job="digits-mlp",
    settings=_settings,
    measure=_measure,
    rounds=200,
    target=0.95,
    columns=(
        FigureColumn("samples", "samples", "{:,.0f}"),
        FigureColumn("waiting", "not computing", "{:.0%}"),
        FigureColumn("lead", "largest lead", "{:.1f}"),
        "staleness",
        "accuracy",
        "seconds_to_target",
    ),
    statements=(
        Statement("No worker begins a computation with a lead above the bound", _bounded),
        Statement(
            "Passing: the larger the bound, the less workers wait",
            lambda rows: (
                (waits := [rows[f"{PASSING}, bound {bound}"]["waiting"] for bound in BOUNDS])
                == sorted(waits, reverse=True)
            ),
        ),
        Statement(
            "Passing: a bound of 3 processes at least 1.5 times BSP's samples in the same time",
            lambda rows: _samples(rows, PASSING, "bound 3") >= 1.5,
        ),
        Statement(
            "Lasting: bounds of 0, 1 and 3 process as many samples as BSP, within a fifth",
            lambda rows: all(abs(_samples(rows, LASTING, f"bound {bound}") - 1) <= NEAR for bound in ("0", "1", "3")),
        ),
        Statement(
            "Lasting: without a bound workers process at least 3 times BSP's samples",
            lambda rows: _samples(rows, LASTING, "bound inf") >= 3,
        ),
        Statement(
            "Each bound ends within two points of BSP's accuracy, or above",
            lambda rows: all(
                rows[f"{kind}, bound {bound}"]["accuracy"] >= rows[f"{kind}, bsp"]["accuracy"] - 0.02
                for kind in (PASSING, LASTING)
                for bound in BOUNDS
            ),
        ),
    ),
    quick={"rounds": 60, "seeds": 1},
)
