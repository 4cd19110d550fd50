"""Compares architectures of reinforcement learning at equal virtual time, and Ape-X by its number of actors.

A survey (section 5): Gorila, with synchronous and asynchronous updates, and Ape-X, whose prioritised replay beats a
uniform one; Ape-X learns best in the same time. Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018:
more actors help; Nair et al., "Massively Parallel Methods for Deep Reinforcement Learning", 2015.

    dqn        one actor and one learner in lockstep
    gorila     bundles of an actor, a replay and a learner, over one server
    apex       actors, one replay, one learner

All learn CartPole-v1 with double dueling Q-learning of 3 steps and the same network. A step of an actor takes 1 ms, a
gradient 2 ms. `score` is the mean of all evaluations of a run: its mean return over the time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Constant
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, less

if TYPE_CHECKING:
    from dure.job.job import Job

ACT, UPDATE = 1e-3, 2e-3
"""Seconds of a step of an actor and of a gradient."""
SHARED = f"act_seconds={ACT},n_step=3,double=true,dueling=true,episodes=10"
ACTORS = 8
BUNDLES = 4
FEW_TO_MANY = (4, 16, 64, 256)
"""Actors of runs of a quarter of the seconds."""
EVALUATIONS = 20


def _settings() -> Mapping[str, Setting]:
    apex, gorila = f"apex:{SHARED},samples_per_insert=0", f"gorila:{SHARED},actors={BUNDLES}"
    runs = {
        "dqn": (f"dqn:{SHARED}", 1, 1, "bsp collective"),
        "gorila, bsp": (gorila, BUNDLES, 0, "bsp ps"),
        "gorila, downpour": (gorila, BUNDLES, 0, "downpour ps"),
        "apex, uniform": (f"{apex},actors={ACTORS},alpha=0", 1, ACTORS, "bsp collective"),
        "apex, prioritised": (f"{apex},actors={ACTORS}", 1, ACTORS, "bsp collective"),
    }
    scaled = {f"{actors} actors": (f"{apex},actors={actors}", 1, actors, "bsp collective") for actors in FEW_TO_MANY}
    return {
        name: Setting(
            strategy,
            Cluster.uniform(learners + actors, compute=Constant(seconds=UPDATE)),
            job=job,
            panel="actors of Ape-X" if name in scaled else "architectures",
            facts={"learners": learners},
            share=0.25 if name in scaled else 1,
        )
        for name, (job, learners, actors, strategy) in (runs | scaled).items()
    }


def _measure(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """A run of the virtual time of `rounds` gradients; its figures, and its evaluations."""
    seconds = rounds * UPDATE * setting.share
    every = max(1, round(seconds / UPDATE) // EVALUATIONS)
    run = setting.train(job, seed=seed, workers=setting.facts["learners"], seconds=seconds, eval_every=every)
    summary = run.summary()
    experience: dict[str, Any] = summary["experience"]
    history = [{"seconds": row["seconds"], "step": row["step"], "score": row["mean_return"]} for row in run.history]
    return {
        "score": statistics.fmean(row["score"] for row in history),
        "best": experience["best_return"],
        "last": experience["mean_return"],
        "frames_per_second": experience["frames_per_second"],
        "updates_per_second": summary["updates_applied"] / summary["seconds"],
        "ratio": experience["replay"]["ratio"],
        "lag": experience["param_lag"]["mean"],
        "seconds": summary["seconds"],
        "why": "",
        "history": history,
    }


def _ahead(first: str, second: str) -> Statement:
    return less(f"{first} has a larger mean return over the time than {second}", "score", second, first)


def _speeds(rows: OfSeed) -> bool:
    """Whether frames per second grow in proportion to the actors, within a fifth."""
    each = [rows[f"{actors} actors"]["frames_per_second"] / actors for actors in FEW_TO_MANY]
    return all(abs(one / each[0] - 1) < 0.2 for one in each)


def _best(rows: OfSeed) -> bool:
    names = ("dqn", "gorila, bsp", "gorila, downpour", "apex, uniform", "apex, prioritised")
    return max(names, key=lambda name: rows[name]["score"]) == "apex, prioritised"


STUDY = Study(
    name="reinforcement",
    about=f"CartPole-v1; {BUNDLES} bundles of Gorila, {ACTORS} actors of Ape-X in the first five rows.",
    settings=_settings,
    measure=_measure,
    rounds=4_000,
    y="score",
    columns=(
        FigureColumn("score", "mean return over time", "{:.0f}"),
        FigureColumn("best", "best", "{:.0f}"),
        FigureColumn("last", "last", "{:.0f}"),
        FigureColumn("frames_per_second", "frames/s", "{:,.0f}"),
        FigureColumn("updates_per_second", "updates/s", "{:,.0f}"),
        FigureColumn("ratio", "samples per insert", "{:.2f}"),
        FigureColumn("lag", "parameter lag", "{:,.0f}"),
        "seconds",
    ),
    statements=(
        _ahead("apex, prioritised", "apex, uniform"),
        _ahead("apex, prioritised", "gorila, downpour"),
        _ahead("gorila, downpour", "gorila, bsp"),
        _ahead("gorila, downpour", "dqn"),
        Statement("Of the five, Ape-X with a prioritised replay has the largest mean return over the time", _best),
        Statement("Frames per second grow with the number of actors, within a fifth", _speeds),
        less(
            "More actors, more return: 256 have a larger mean return over the time than 4",
            "score",
            "4 actors",
            "256 actors",
        ),
    ),
    quick={"rounds": 400, "seeds": 1},
)
