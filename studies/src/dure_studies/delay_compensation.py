"""Compares DC-ASGD with Downpour and BSP by the number of workers, at equal samples.

Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", ICML 2017, table 1: with 4 and 8
workers on CIFAR-10, Downpour is less accurate than one worker, and the more so the more workers; DC-ASGD is as
accurate as one worker, or more. There as here, all asynchronous methods of a number of workers have one learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping

from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import LogNormal
from dure_studies.study import OfSeed, Setting, Statement, Study, less

GROUPS = (4, 16)
RATES = (0.03, 0.06)
METHODS = {
    "Downpour": "downpour ps",
    "DC-ASGD, constant": "downpour+dc-asgd:lambda=2 ps",
    "DC-ASGD, adaptive": "downpour+dc-asgd:mode=adaptive ps",
}


def _settings() -> Mapping[str, Setting]:
    found = {}
    for workers in GROUPS:
        cluster = Cluster.uniform(workers, compute=LogNormal(seconds=0.01, sigma=0.3))
        share = GROUPS[0] / workers
        for rate in RATES:
            for line, strategy in METHODS.items():
                found[f"{line}, {workers} workers, rate {rate}"] = Setting(
                    strategy,
                    cluster,
                    options={"lr": rate, "exact": False},
                    share=share,
                    panel=f"rate {rate}",
                    line=line,
                    at=workers,
                )
        found[f"BSP, {workers} workers"] = Setting(
            "bsp ps", cluster, options={"lr": 0.3, "exact": False}, share=share, panel="BSP", line="BSP", at=workers
        )
    return found


def _better(mode: str, workers: int, rate: float) -> Statement:
    where, ours = f"{workers} workers, rate {rate}", f"DC-ASGD, {mode}"
    return less(f"{where}: {ours}, has less loss than Downpour", "loss", f"{ours}, {where}", f"Downpour, {where}")


def _ahead_of_bsp(workers: int) -> Statement:
    def holds(rows: OfSeed) -> bool:
        ours = max(rows[f"DC-ASGD, adaptive, {workers} workers, rate {rate}"]["accuracy"] for rate in RATES)
        return bool(ours > rows[f"BSP, {workers} workers"]["accuracy"])

    return Statement(f"{workers} workers: DC-ASGD, adaptive, at its better rate is more accurate than BSP", holds)


STUDY = Study(
    name="delay-compensation",
    about="mnist-mlp, equal samples for all numbers of workers; asynchronous methods at two rates, BSP at 0.3.",
    settings=_settings,
    columns=("accuracy", "loss", "seconds", "staleness"),
    rounds=300,
    x="workers",
    y="accuracy",
    statements=(
        less(
            "rate 0.06: Downpour has more loss with 16 workers than with 4",
            "loss",
            "Downpour, 4 workers, rate 0.06",
            "Downpour, 16 workers, rate 0.06",
        ),
        *(_better(mode, workers, rate) for rate in RATES for workers in GROUPS for mode in ("constant", "adaptive")),
        *(_ahead_of_bsp(workers) for workers in GROUPS),
    ),
)
