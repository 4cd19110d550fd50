"""Compares synchronous and asynchronous SGD over one server, and a ring, on even, uneven and slowly linked workers.

Dean et al., "Large Scale Distributed Deep Networks", NeurIPS 2012, for Downpour; Chen et al., "Revisiting Distributed
Synchronous SGD", 2016, for backup workers. Surveys say that asynchronous SGD is faster, as no worker waits, and that
the traffic of servers can become heavy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure_studies.study import OfSeed, Setting, Statement, Study

WORKERS, STEP = 16, 0.01
METHODS = {
    "BSP, one server": ("bsp ps", 0.3),
    "backup workers": ("backup:backups=1 ps", 0.3),
    "Downpour": ("downpour ps", 0.015),
    "BSP, ring": ("bsp collective:algorithm=ring", 0.3),
}
EVEN, SLOW, LINKS = "equal workers", "one five times slower", "100 Mbit/s"


def _settings() -> Mapping[str, Setting]:
    step = Constant(seconds=STEP)
    even = Machines(count=WORKERS, compute=step)
    uneven = (Machines(count=WORKERS - 1, compute=step), Machines(compute=step, speed=0.2))
    clusters = {
        EVEN: Cluster(machines=(even,)),
        SLOW: Cluster(machines=uneven),
        LINKS: Cluster(machines=(even,), link=Link(bandwidth=LINKS)),
    }
    return {
        f"{name}, {where}": Setting(
            strategy, cluster, options={"lr": lr, "exact": False, "eval_every": 5}, panel=where, line=name
        )
        for where, cluster in clusters.items()
        for name, (strategy, lr) in METHODS.items()
    }


def _seconds(rows: OfSeed, name: str, where: str) -> float:
    return float(rows[f"{name}, {where}"]["seconds_to_target"])


def _before(first: str, second: str, where: str) -> Statement:
    return Statement(
        f"{where}: to the target, {first} before {second}",
        lambda rows: _seconds(rows, first, where) < _seconds(rows, second, where),
    )


def _waits_for_the_slow_one(rows: OfSeed) -> bool:
    """Whether each step of BSP takes as much longer as the slow worker's."""
    slow, even = (rows[f"BSP, one server, {where}"] for where in (SLOW, EVEN))
    longer = (slow["seconds"] - even["seconds"]) / even["steps"]
    return bool(abs(longer - 4 * STEP) <= 0.1 * 4 * STEP)


STUDY = Study(
    name="asynchronous",
    about=f"mnist-mlp with {WORKERS} workers, {1000 * STEP:g} ms a step, 10 Gbit/s unless stated.",
    settings=_settings,
    columns=("accuracy", "seconds", "seconds_to_target", "samples_to_target", "megabytes", "staleness"),
    rounds=200,
    target=0.92,
    statements=(
        *(_before("Downpour", "BSP, one server", where) for where in (EVEN, SLOW, LINKS)),
        _before("backup workers", "BSP, one server", SLOW),
        _before("Downpour", "BSP, ring", EVEN),
        _before("Downpour", "BSP, ring", SLOW),
        _before("BSP, ring", "Downpour", LINKS),
        Statement("one five times slower: a step of BSP takes 40 ms longer, to a tenth", _waits_for_the_slow_one),
        Statement(
            "100 Mbit/s: Downpour takes at least 10 times as long as with 10 Gbit/s",
            lambda rows: math.inf > _seconds(rows, "Downpour", LINKS) >= 10 * _seconds(rows, "Downpour", EVEN),
        ),
    ),
)
