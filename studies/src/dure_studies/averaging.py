"""Compares the ways to choose the period and the weights of averages, on fast and on slow links.

Zinkevich et al. 2010 average once at the end (`one-shot`). Su, Chen and Xu, "Experiments on Parallel Training of Deep
Neural Network using Model Averaging", 2015, average each tau mini-batches; Wang and Joshi (AdaComm, 2018) choose tau by
the loss. Chen and Huo (BMUF, 2016) give the change of the mean model a momentum. `sync/local_sgd.py` has the
schedules and the weights.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant
from dure_studies.study import OfSeed, Setting, Statement, Study, less

WORKERS, STEP = 8, 0.01
STRATEGIES = {
    "one-shot": "one-shot",
    "period 1": "averaging:period=1",
    "period 10": "averaging:period=10",
    "period 100": "averaging:period=100",
    "adaptive": "averaging:schedule=adaptive,period=20,interval=50",
    "overhead": "averaging:schedule=overhead",
    "epoch": "averaging:schedule=epoch",
    "weights=loss": "averaging:period=10,weights=loss",
    "weights=fisher": "averaging:period=10,weights=fisher",
    "BMUF": "bmuf:period=10",
}
LINKS = ("10 Gbit/s", "100 Mbit/s")


def _settings() -> Mapping[str, Setting]:
    return {
        f"{name}, {link}": Setting(
            strategy,
            Cluster.uniform(WORKERS, compute=Constant(seconds=STEP), link=Link(bandwidth=link)),
            options={"lr": 0.1 if name == "BMUF" else 0.3, "exact": False, "eval_every": 10},
            panel=link,
            line=name,
        )
        for link in LINKS
        for name, strategy in STRATEGIES.items()
    }


def _sooner(one: str, other: str, link: str) -> Statement:
    text = f"{link}: {one} reaches the target before {other}"
    return less(text, "seconds_to_target", f"{one}, {link}", f"{other}, {link}")


def _points(one: str, other: str, within: float) -> Statement:
    def holds(rows: OfSeed) -> bool:
        ours, theirs = (rows[f"{name}, {LINKS[0]}"]["accuracy"] for name in (one, other))
        return bool(abs(ours - theirs) <= within)

    return Statement(f"{one} and {other} end within {100 * within:g} points", holds)


STUDY = Study(
    name="averaging",
    about=f"mnist-mlp with {WORKERS} workers, {1000 * STEP:g} ms a step; rate 0.3, BMUF's 0.1.",
    settings=_settings,
    columns=("lr", "accuracy", "seconds", "seconds_to_target", "megabytes"),
    rounds=240,
    target=0.93,
    statements=(
        less(
            "one average at the end is less accurate than averages each 10 steps",
            "accuracy",
            f"one-shot, {LINKS[0]}",
            f"period 10, {LINKS[0]}",
        ),
        _sooner("period 10", "period 1", "100 Mbit/s"),
        _sooner("period 10", "period 100", "100 Mbit/s"),
        _sooner("overhead", "period 1", "100 Mbit/s"),
        _sooner("adaptive", "period 10", "100 Mbit/s"),
        _sooner("period 1", "period 100", "10 Gbit/s"),
        _sooner("BMUF", "period 10", "10 Gbit/s"),
        _sooner("BMUF", "period 10", "100 Mbit/s"),
        _points("weights=loss", "period 10", 0.01),
        _points("weights=fisher", "period 10", 0.01),
    ),
)
