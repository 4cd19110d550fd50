"""Compares the four K methods and backup workers by k: seconds of an update against closed forms, and loss over time.

Dutta, Joshi, Ghosh, Dube and Nagpurkar, "Slow and Stale Gradients Can Win the Race", AISTATS 2018: the larger K, the
longer an update takes, and the smaller the error at which SGD with a constant rate stays. Chen et al., "Revisiting
Distributed Synchronous SGD", 2016: an update that needs all but b workers takes less time.

Seconds of an update of P workers, if a computation takes a shift D and an exponential time of mean 1 - D:

    K-sync, backup with b = P - K     D + (1 - D) (H_P - H_(P - K))           the K-th of P order statistics
    K-async                           the same with D = 0, at most that otherwise
    K-batch-async                     K / P
    K-batch-sync                      the same with D = 0, at least that otherwise
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import ShiftedExponential
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 8
METHODS = ("k-sync", "k-batch-sync", "k-async", "k-batch-async")
COUNTS = (1, 2, 4, 8)
BACKUPS = (0, 1, 2, 4)
SHIFTS = {"exponential": 0.0, "shifted": 0.5}
RATE = 0.15
HORIZON = 120.0
"""Mean computations of a run that learns."""
EARLY = 5.0
"""Mean computations after which the next evaluation counts as early."""
LATE = 90.0
"""Mean computations from which on the mean loss counts as that of the end."""
LEARNERS = (("k-sync", 2), ("k-sync", 4), ("k-sync", 8), ("k-async", 1), ("k-async", 4), ("k-batch-async", 4))
TOLERANCE = 0.1
"""The largest error of seconds in one seed that agrees with a closed form."""


def order_statistic(k: int, shift: float) -> float:
    """The mean of the `k`-th of `WORKERS` computations, each of mean 1 with a constant part `shift`.

    >>> round(order_statistic(8, 0.0), 6)
    2.717857
    """
    return shift + (1 - shift) * sum(1 / left for left in range(WORKERS - k + 1, WORKERS + 1))


def expected(method: str, k: int, shift: float) -> float:
    """Seconds of an update by the closed form, or by its bound."""
    return k / WORKERS if "batch" in method else order_statistic(k, shift)


def _settings() -> Mapping[str, Setting]:
    found = {}
    for kind, shift in SHIFTS.items():
        cluster = Cluster.uniform(WORKERS, compute=ShiftedExponential(seconds=1.0, shift=shift))
        runs = [(method, k, f"k={k}") for k in COUNTS for method in METHODS]
        runs += [("backup", WORKERS - backups, f"backups={backups}") for backups in BACKUPS]
        for method, k, given in runs:
            facts = {"expected": expected(method, k, shift), "k": k, "learns": not shift and (method, k) in LEARNERS}
            found[f"{kind}, {method}:{given}"] = Setting(
                f"{method}:{given} ps", cluster, line=f"{method}:{given}", panel=kind, facts=facts
            )
    return found


def _measure(_study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """Seconds of an update over about `rounds` updates, without tensors; of a learner its excess loss over time too."""
    k, expected, learns = (setting.facts[name] for name in ("k", "expected", "learns"))
    timed = setting.train(job, seed=seed, steps=10**6, seconds=rounds * expected, timing_only=True).summary()
    seconds = timed["seconds"] * k / max(1, timed["updates_applied"])
    staleness = timed["staleness"]["mean"]
    row = {"expected": expected, "measured": seconds, "error": seconds / expected - 1, "staleness": staleness}
    if not learns:
        return row
    evaluated = {"eval_every": 1, "eval_samples": len(job.train), "exact": True}
    run = setting.train(job, seed=seed, steps=10**6, seconds=HORIZON, lr=RATE, **evaluated)
    history = [{**point, "excess": point["loss"] - _least(job)} for point in run.history]
    late = [point["excess"] for point in history if point["seconds"] > LATE]
    early = next(point["excess"] for point in history if point["seconds"] >= EARLY)
    return {**row, "early": early, "late": statistics.fmean(late), "history": history}


def _least(job: Job) -> float:
    """The loss at the optimum."""
    assert job.optimum is not None
    inputs, targets = job.train.inputs, job.train.targets
    return float(job.loss(job.optimum.expand(len(inputs), -1), targets))


def _agree(rows: OfSeed, kind: str, *methods: str) -> bool:
    """Whether all seconds of these methods are within `TOLERANCE` of the closed form."""
    wanted = tuple(f"{kind}, {method}:" for method in methods)
    return all(abs(row["error"]) <= TOLERANCE for name, row in rows.items() if name.startswith(wanted))


def _at_most(rows: OfSeed, one: str, other: str) -> bool:
    """Whether `one` is no slower than `other` for each k, with shifted computations and 1 < k < P."""
    pairs = [(rows[f"shifted, {one}:k={k}"], rows[f"shifted, {other}:k={k}"]) for k in COUNTS[:-1]]
    return all(mine["measured"] <= yours["measured"] * (1 + TOLERANCE / 10) for mine, yours in pairs)


def _late(rows: OfSeed, *counts: str) -> bool:
    found = [rows[f"exponential, {each}"]["late"] for each in counts]
    return all(first >= second for first, second in pairwise(found))


STUDY = Study(
    name="k-methods",
    about=f"A quadratic loss with noise, {WORKERS} workers, a computation takes 1 s in the mean, learning rate {RATE}.",
    nature="Seconds are virtual. Those of an update come from runs without tensors; losses are above the least one.",
    job="quadratic:noise=1,conditioning=1",
    settings=_settings,
    measure=_measure,
    rounds=500,
    columns=(
        FigureColumn("expected", "s per update, closed form or bound", "{:.3f}"),
        FigureColumn("measured", "measured", "{:.3f}"),
        FigureColumn("error", "error", "{:+.1%}"),
        "staleness",
        FigureColumn("early", f"excess loss at {EARLY:g} s", "{:.3f}"),
        FigureColumn("late", f"from {LATE:g} s", "{:.4f}"),
    ),
    x="seconds",
    y="excess",
    statements=(
        Statement(
            "K-sync and backup: seconds of an update are the order statistic, within 10 %",
            lambda rows: all(_agree(rows, kind, "k-sync", "backup") for kind in SHIFTS),
        ),
        Statement(
            "K-batch-async: seconds of an update are K / P for both distributions, within 10 %",
            lambda rows: all(_agree(rows, kind, "k-batch-async") for kind in SHIFTS),
        ),
        Statement(
            "Exponential: K-async takes as long as K-sync, K-batch-sync as K-batch-async, within 10 %",
            lambda rows: _agree(rows, "exponential", "k-async", "k-batch-sync"),
        ),
        Statement(
            "Shifted: K-async is no slower than K-sync, and K-batch-async no slower than K-batch-sync",
            lambda rows: _at_most(rows, "k-async", "k-sync") and _at_most(rows, "k-batch-async", "k-batch-sync"),
        ),
        Statement(
            "K-sync: the larger K, the smaller the loss at the end",
            lambda rows: _late(rows, "k-sync:k=2", "k-sync:k=4", "k-sync:k=8"),
        ),
        Statement(
            f"K-async with k=1 has less loss than K-sync with k={WORKERS} after {EARLY:g} s, and more in the end",
            lambda rows: (
                rows["exponential, k-async:k=1"]["early"] < rows[f"exponential, k-sync:k={WORKERS}"]["early"]
                and rows["exponential, k-async:k=1"]["late"] > rows[f"exponential, k-sync:k={WORKERS}"]["late"]
            ),
        ),
        Statement(
            "Two backup workers of eight shorten an update by at least 40 %, exponential",
            lambda rows: (
                rows["exponential, backup:backups=2"]["measured"]
                < 0.6 * rows["exponential, backup:backups=0"]["measured"]
            ),
        ),
    ),
    quick={"rounds": 100, "seeds": 1},
)
