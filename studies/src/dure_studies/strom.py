"""Compares thresholds of Strom's codec: bytes of a step, and accuracy.

Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech 2015: elements of a gradient
beyond a threshold are sent, as a sign and an index, which entropy coding shortens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, learnt

if TYPE_CHECKING:
    from dure.job.job import Job

THRESHOLDS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
CODECS = ("fp32", *(f"strom:threshold={threshold:g}" for threshold in THRESHOLDS))
WORKERS = 4
BATCH = 8
RATE = 0.1


def _settings() -> Mapping[str, Setting]:
    cluster = Cluster.uniform(WORKERS)
    options = {"batch_size": BATCH, "lr": RATE, "exact": False}
    return {codec: Setting(f"bsp collective {codec}", cluster, options=options) for codec in CODECS}


def _measure(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """`nbytes` are those that a worker sends in a step."""
    row = learnt(study, job, setting, rounds, seed)
    return row | {"nbytes": row["megabytes"] * 1e6 / WORKERS / rounds}


def _saves(rows: OfSeed, codec: str, times: float, points: float) -> bool:
    """Whether `codec` sends so many `times` fewer bytes than fp32, and loses at most so many `points` of accuracy."""
    dense, coded = rows["fp32"], rows[codec]
    return bool(dense["nbytes"] >= times * coded["nbytes"] and coded["accuracy"] >= dense["accuracy"] - points / 100)


def _ascending(values: Sequence[float]) -> bool:
    return all(first <= second for first, second in pairwise(values))


STUDY = Study(
    name="strom",
    about=f"mnist-mlp, BSP over collectives, {WORKERS} workers with mini-batches of {BATCH}, learning rate {RATE}.",
    settings=_settings,
    measure=_measure,
    rounds=1000,
    columns=("accuracy", "loss", FigureColumn("nbytes", "bytes per worker and step", "{:,.0f}")),
    x="step",
    statements=(
        Statement(
            "Threshold 0.3: at least 300 times fewer bytes than fp32, at most one point of accuracy less",
            lambda rows: _saves(rows, "strom:threshold=0.3", 300, 1),
        ),
        Statement(
            "Threshold 1: at least 1,000 times fewer bytes than fp32, at most two points less",
            lambda rows: _saves(rows, "strom:threshold=1", 1000, 2),
        ),
        Statement(
            "The larger the threshold, the fewer bytes",
            lambda rows: _ascending([rows[codec]["nbytes"] for codec in CODECS[1:]]),
        ),
    ),
)
