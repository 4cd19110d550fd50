"""Compares AD-PSGD with BSP and Downpour by the strength of one slow worker, on slow links.

Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, experiments:
with one worker that is 2 to 100 times slower, synchronous methods slow down as much, and AD-PSGD hardly at all; on slow
links, a server delays asynchronous SGD. There, 16 to 128 GPUs train on CIFAR-10 and ImageNet.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure_studies.study import OfSeed, Setting, Statement, Study, less

WORKERS, STEP, LINK = 8, 0.01, "100 Mbit/s"
FACTORS = (1, 2, 5, 10)
METHODS = {
    "AD-PSGD": ("ad-psgd", 0.2),
    "BSP, ring": ("bsp collective:algorithm=ring", 0.3),
    "Downpour": ("downpour ps", 0.03),
}


def _settings() -> Mapping[str, Setting]:
    def cluster(factor: int) -> Cluster:
        step = Constant(seconds=STEP)
        slow = Machines(compute=step, speed=1 / factor)
        return Cluster(machines=(Machines(count=WORKERS - 1, compute=step), slow), link=Link(bandwidth=LINK))

    return {
        f"{line}, {factor}x": Setting(
            strategy,
            cluster(factor),
            options={"lr": lr, "exact": False, "eval_every": 6},
            panel=f"one worker slower, {LINK}",
            line=line,
            at=factor,
        )
        for factor in FACTORS
        for line, (strategy, lr) in METHODS.items()
    }


def _delay(rows: OfSeed, line: str, factor: int) -> float:
    """Seconds to the target with the slow worker, divided by those without."""
    return float(rows[f"{line}, {factor}x"]["seconds_to_target"] / rows[f"{line}, 1x"]["seconds_to_target"])


def _first(other: str, factor: int) -> Statement:
    slow = "equal workers" if factor == 1 else f"one worker {factor} times slower"
    text = f"{slow}: AD-PSGD reaches the target before {other}"
    return less(text, "seconds_to_target", f"AD-PSGD, {factor}x", f"{other}, {factor}x")


STUDY = Study(
    name="gossip",
    about=f"mnist-mlp with {WORKERS} workers, {1000 * STEP:g} ms a step, links of {LINK}; the last worker is slower.",
    settings=_settings,
    columns=("accuracy", "seconds_to_target", "megabytes", "staleness"),
    rounds=150,
    x="times slower",
    y="seconds_to_target",
    statements=(
        Statement(
            "10 times slower: AD-PSGD takes at most 1.5 times as long", lambda rows: _delay(rows, "AD-PSGD", 10) <= 1.5
        ),
        Statement(
            "10 times slower: BSP takes at least 4 times as long", lambda rows: _delay(rows, "BSP, ring", 10) >= 4
        ),
        *(_first(other, factor) for factor in FACTORS for other in ("BSP, ring", "Downpour")),
    ),
)
