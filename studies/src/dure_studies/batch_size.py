"""Compares sizes of mini-batches at equal samples, and averages each tau mini-batches with tau times the mini-batch.

Yook, Lee and Yoo (2020) state, after Seide et al. 2014 and Smith and Le 2018, that large mini-batches weaken the random
walk of SGD and make learning harder, that gradients of all data suit deep networks badly, and that averages of models
each tau mini-batches are no larger mini-batch. Each setting has its best learning rate of a grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import OfSeed, Setting, Statement, Study, less

SMALLEST, ALL = 8, 1437
SIZES = (SMALLEST, 32, 128, 512, ALL)
RATES = (0.03, 0.1, 0.3, 1.0)
WORKERS, PERIOD = 4, 10


def _settings() -> Mapping[str, Setting]:
    found = {
        f"one worker, batch {'of all data' if size == ALL else size}": Setting(
            "bsp",
            Cluster.uniform(1),
            options={"batch_size": size},
            share=SMALLEST / size,
            panel="one worker",
            line="SGD",
            at=size,
            rates=RATES,
        )
        for size in SIZES
    }
    several = {
        f"BSP, batch {SMALLEST}": ("bsp", 1),
        f"averages each {PERIOD} steps, batch {SMALLEST}": (f"averaging:period={PERIOD}", 1),
        f"BSP, batch {PERIOD * SMALLEST}": ("bsp", PERIOD),
    }
    for name, (strategy, factor) in several.items():
        found[f"{WORKERS} workers: {name}"] = Setting(
            strategy,
            Cluster.uniform(WORKERS),
            options={"batch_size": factor * SMALLEST, "exact": False},
            share=1 / (WORKERS * factor),
            panel=f"{WORKERS} workers",
            line=name,
            at=WORKERS * factor * SMALLEST,
            rates=RATES,
        )
    return found


def _harder(small: int, large: int) -> Statement:
    few, many = (f"one worker, batch {'of all data' if size == ALL else size}" for size in (small, large))
    return less(f"at equal samples, batches of {large} are less accurate than of {small}", "accuracy", many, few)


def _of_several(rows: OfSeed, figure: str) -> tuple[float, float, float]:
    """A figure of BSP, of averages, and of BSP with the large mini-batch."""
    names = (
        f"BSP, batch {SMALLEST}",
        f"averages each {PERIOD} steps, batch {SMALLEST}",
        f"BSP, batch {PERIOD * SMALLEST}",
    )
    small, averages, large = (float(rows[f"{WORKERS} workers: {name}"][figure]) for name in names)
    return small, averages, large


def _as_small(rows: OfSeed) -> bool:
    small, averages, large = _of_several(rows, "loss")
    return abs(averages - small) < abs(averages - large)


def _better_than_large(rows: OfSeed) -> bool:
    _, averages, large = _of_several(rows, "accuracy")
    return averages > large


STUDY = Study(
    name="batch-size",
    about=f"digits-mlp, equal samples for all settings, each at its best rate of {RATES}.",
    settings=_settings,
    columns=("lr", "accuracy", "loss", "samples_to_target"),
    job="digits-mlp",
    rounds=3600,
    target=0.95,
    x="samples of an update",
    statements=(
        *(_harder(small, large) for small, large in pairwise(SIZES)),
        Statement(
            f"averages each {PERIOD} steps are more accurate than BSP with {PERIOD} times the batch", _better_than_large
        ),
        Statement("their loss is nearer to that of BSP with the small batch than with the large one", _as_small),
    ),
)
