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

from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, less

if TYPE_CHECKING:
    from dure.job.job import Job

ACT, UPDATE = 1e-3, 2e-3
"""Seconds of a step of an actor and of a gradient."""
SHARED = f"act_seconds={ACT},n_step=3,double=true,dueling=true,episodes=10"
ACTORS = 8
BUNDLES = 4
FEW_TO_MANY = (4, 16, 64, 256)
EVALUATIONS = 20
PANEL, SCALING = "architectures", "actors of Ape-X"


def _settings() -> Mapping[str, Setting]:
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Constant

    def setting(job: str, learners: int, actors: int, strategy: str, panel: str, line: str, share: float) -> Setting:
        """A setting of `learners` and `actors`, which runs for `share` of the seconds."""
        cluster = Cluster.uniform(learners + actors, compute=Constant(seconds=UPDATE))
        facts = {"learners": learners}
        return Setting(
            strategy=strategy, cluster=cluster, job=job, panel=panel, line=line, facts=facts, share=share, options={}
        )

    apex = f"apex:{SHARED},samples_per_insert=0"
    gorila = f"gorila:{SHARED},actors={BUNDLES}"
    found = {
        "dqn": setting(f"dqn:{SHARED}", 1, 1, "bsp collective", PANEL, "dqn", 1),
        "gorila, bsp": setting(gorila, BUNDLES, 0, "bsp ps", PANEL, "gorila, bsp", 1),
        "gorila, downpour": setting(gorila, BUNDLES, 0, "downpour ps", PANEL, "gorila, downpour", 1),
        "apex, uniform": setting(
            f"{apex},actors={ACTORS},alpha=0", 1, ACTORS, "bsp collective", PANEL, "apex, uniform", 1
        ),
        "apex, prioritised": setting(
            f"{apex},actors={ACTORS}", 1, ACTORS, "bsp collective", PANEL, "apex, prioritised", 1
        ),
    }
    for actors in FEW_TO_MANY:
        found[f"{actors} actors"] = setting(
            f"{apex},actors={actors}", 1, actors, "bsp collective", SCALING, f"{actors} actors", 0.25
        )
    return found


def _measure(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """A run of the virtual time of `rounds` gradients; its figures, and its evaluations."""
    from dure.run.train import train

    seconds = rounds * UPDATE * setting.share
    gradients = round(seconds / UPDATE)
    run = train(
        job,
        strategy=setting.strategy,
        on=setting.cluster,
        workers=setting.facts["learners"],
        seconds=seconds,
        seed=seed,
        eval_every=max(1, gradients // EVALUATIONS),
    )
    summary = run.summary()
    experience: dict[str, Any] = summary["experience"]
    returns = [row["mean_return"] for row in run.history]
    return {
        "score": statistics.fmean(returns),
        "best": experience["best_return"],
        "last": experience["mean_return"],
        "frames_per_second": experience["frames_per_second"],
        "updates_per_second": summary["updates_applied"] / summary["seconds"],
        "ratio": experience["replay"]["ratio"],
        "lag": experience["param_lag"]["mean"],
        "seconds": summary["seconds"],
        "why": "",
        "history": [
            {"seconds": row["seconds"], "step": row["step"], "score": row["mean_return"]} for row in run.history
        ],
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
    columns=("score", "best", "last", "frames_per_second", "updates_per_second", "ratio", "lag", "seconds"),
    more_columns={
        "score": FigureColumn("mean return over time", "{:.0f}"),
        "best": FigureColumn("best", "{:.0f}"),
        "last": FigureColumn("last", "{:.0f}"),
        "frames_per_second": FigureColumn("frames/s", "{:,.0f}"),
        "updates_per_second": FigureColumn("updates/s", "{:,.0f}"),
        "ratio": FigureColumn("samples per insert", "{:.2f}"),
        "lag": FigureColumn("parameter lag", "{:,.0f}"),
    },
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
reproduce, table, QUICK = STUDY.reproduce, STUDY.table, STUDY.quick
