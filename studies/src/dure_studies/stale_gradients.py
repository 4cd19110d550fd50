"""Counts the samples that asynchronous SGD needs for an accuracy, by the number of workers, and compares replicas.

A survey of concepts of distributed deep learning (in Korean), sections 3.2 and 3.3: synchronous replicas always stay
equal; with stale gradients, optimisation uses data less efficiently.

Workers are equally fast, so the staleness of a gradient is one less than their number. Each number of workers has its
best learning rate of a grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, learnt

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.sync.worker_state import WorkerState

COUNTS = (1, 2, 4, 8, 16)
RATES = (0.8, 0.4, 0.2, 0.1, 0.05, 0.025)
ASYNC, SYNC = "asynchronous", "synchronous"
STRATEGIES = {ASYNC: "downpour:at_once=true ps", SYNC: "bsp collective"}
EVALUATED = 16
"""Gradients of all workers between two evaluations."""
COMPARED = 20
"""Steps in which replicas are compared."""


def _settings() -> Mapping[str, Setting]:
    return {
        f"{kind}, {count} workers": Setting(
            STRATEGIES[kind],
            Cluster.uniform(count),
            options={"eval_every": max(1, EVALUATED // count)},
            share=1 / count,
            line=kind,
            at=count,
        )
        for kind, count in (*((ASYNC, count) for count in COUNTS), (SYNC, 4))
    }


def _measure(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """The run of the best rate, in which all workers together compute `rounds` gradients; how often replicas agree."""
    rows = [learnt(study, job, setting.at_rate(rate), rounds, seed) | {"rate": rate} for rate in RATES]
    best = min(rows, key=lambda row: (row["samples_to_target"], row["loss"]))
    return best | {"equal": equal_replicas(job, setting, seed)}


def equal_replicas(job: Job, setting: Setting, seed: int) -> float:
    """The share of steps at which all workers compute on the same bits."""
    from dure.run.config import TrainConfig
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.resolve import resolve
    from dure.run.virtual import VirtualRun

    run = {"job": job.name, "strategy": setting.strategy, "on": "virtual", "seed": seed}
    config = TrainConfig.of({**run, "steps": COMPARED, "eval_every": COMPARED, "exact": True})
    seen: dict[int, set[bytes]] = {}
    setup, cluster = resolve(config, Prebuilt(job=job, cluster=setting.cluster))
    assert cluster is not None

    def stepped(worker: WorkerState, _now: float, _sent: Callable[[], int]) -> None:
        seen.setdefault(worker.clock, set()).add(worker.params.numpy().tobytes())

    VirtualRun(setup, cluster, Callbacks(stepped=stepped)).run()
    return sum(len(each) == 1 for each in seen.values()) / len(seen)


def _needs(rows: OfSeed, count: int) -> float:
    """Samples to the target with so many asynchronous workers."""
    return float(rows[f"{ASYNC}, {count} workers"]["samples_to_target"])


STUDY = Study(
    name="stale-gradients",
    about=f"digits-mlp, equal workers; samples of all workers, each row at the best rate of {str(RATES)[1:-1]}.",
    job="digits-mlp",
    settings=_settings,
    measure=_measure,
    rounds=480,
    target=0.95,
    columns=(
        "samples_to_target",
        FigureColumn("rate", "best rate, mean", "{:.3f}"),
        "staleness",
        "accuracy",
        FigureColumn("equal", "steps with equal replicas", "{:.0%}"),
    ),
    x="workers",
    y="samples_to_target",
    statements=(
        Statement(
            "16 asynchronous workers need at least 1.5 times the samples of one",
            lambda rows: math.inf > _needs(rows, 16) >= 1.5 * _needs(rows, 1),
        ),
        Statement(
            "From 2 workers on, more workers need no fewer samples",
            lambda rows: all(math.inf > _needs(rows, more) >= _needs(rows, few) for few, more in pairwise(COUNTS[1:])),
        ),
        Statement(
            "The best rate of 16 workers is smaller than of one",
            lambda rows: rows[f"{ASYNC}, 16 workers"]["rate"] < rows[f"{ASYNC}, 1 workers"]["rate"],
        ),
        Statement(
            "Synchronous replicas are equal at each step, bit for bit",
            lambda rows: rows[f"{SYNC}, 4 workers"]["equal"] == 1.0,
        ),
        Statement(
            "Asynchronous replicas differ at most steps", lambda rows: rows[f"{ASYNC}, 4 workers"]["equal"] < 0.5
        ),
    ),
    quick={"rounds": 160, "seeds": 1},
)
