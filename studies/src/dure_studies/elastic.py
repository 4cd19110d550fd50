"""Compares EASGD with Downpour SGD by the steps between two exchanges, and measures how far local models go.

Zhang, Choromanska and LeCun, "Deep learning with Elastic Averaging SGD", NeurIPS 2015, figures 1 to 4: with the periods
1, 4, 16 and 64, Downpour becomes slower and unstable, and EASGD stays fast. There, 4 workers train on CIFAR-10, and
each method has its best learning rate of a grid. Both exchange a model's change of `period` steps; Downpour's workers
step alone between two exchanges (`local_lr`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster, Link
from dure_studies.study import FigureColumn, Row, Setting, Statement, Study, learnt, less

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 4
PERIODS = (1, 4, 16, 64)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3)
ELASTICITIES = (0.01, 0.05, 0.225, 0.5)


def _settings() -> Mapping[str, Setting]:
    shared = Setting("", Cluster.uniform(WORKERS, link=Link(bandwidth="1 Gbit/s")))
    shared = replace(shared, options={"exact": False, "eval_every": 16}, panel="best rate of each", rates=RATES)
    found = {}
    for period in PERIODS:
        easgd = f"easgd:period={period} ps"
        downpour = f"downpour:n_push={period},n_fetch={period},local_lr={{lr}} ps"
        for line, strategy in (("EASGD", easgd), ("Downpour", downpour)):
            found[f"{line}, period {period}"] = replace(shared, strategy=strategy, line=line, at=period)
    for elasticity in ELASTICITIES:
        strategy = f"easgd:period=4,elasticity={elasticity} ps"
        found[f"EASGD, elasticity {elasticity}"] = replace(
            shared, strategy=strategy, line="EASGD", panel="elasticity, period 4", at=elasticity, rates=(0.1,)
        )
    return found


def with_distance(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """The figures of `learnt`, and the distance of the workers' models from the master's in the middle of the run."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        options = {**setting.options, "out": place, "checkpoint_every": -(-rounds // 2)}
        found = learnt(study, job, replace(setting, options=options), rounds, seed)
        return found | {"distance": _distance(place) if not found["why"] and rounds > 1 else math.nan}


def _distance(place: Path) -> float:
    """Mean distance of the workers' models from the server's in the last checkpoint, divided by the latter's norm."""
    from dure.core.regular_file import CHECKPOINTS
    from dure.run import checkpoint

    parts = checkpoint.load(place / CHECKPOINTS).parts
    master = parts["shard-0"].tensors["values"]
    models = [part.tensors["params"] for name, part in parts.items() if name.startswith("worker-")]
    return float(sum((model - master).norm() for model in models) / len(models) / master.norm())


def _further(near: float, far: float) -> Statement:
    text = f"an elasticity of {far} lets local models go further than {near}"
    return less(text, "distance", f"EASGD, elasticity {near}", f"EASGD, elasticity {far}")


def _fails(period: int) -> Statement:
    return Statement(
        f"Downpour fails at a period of {period}: less than 80 %",
        lambda row: row[f"Downpour, period {period}"]["accuracy"] < 0.8,
    )


def _sooner(period: int) -> Statement:
    text = f"period {period}: EASGD reaches the target before Downpour"
    return less(text, "seconds_to_target", f"EASGD, period {period}", f"Downpour, period {period}")


STUDY = Study(
    name="elastic",
    about=f"mnist-mlp with {WORKERS} workers over one server of 1 Gbit/s, each setting at its best rate of {RATES}.",
    settings=_settings,
    columns=(
        "lr",
        "accuracy",
        "seconds_to_target",
        "megabytes",
        FigureColumn("distance", "distance from master", "{:.4f}"),
    ),
    rounds=256,
    measure=with_distance,
    x="steps between two exchanges, or elasticity",
    statements=(
        Statement(
            "EASGD keeps at least 90 % at a period of 64", lambda row: row["EASGD, period 64"]["accuracy"] >= 0.9
        ),
        Statement(
            "EASGD's accuracies at the periods 1 to 64 differ by at most 3 points",
            lambda row: (
                max(row[f"EASGD, period {period}"]["accuracy"] for period in PERIODS)
                - min(row[f"EASGD, period {period}"]["accuracy"] for period in PERIODS)
                <= 0.03
            ),
        ),
        *(_fails(period) for period in (16, 64)),
        *(_sooner(period) for period in PERIODS),
        *(_further(near, far) for far, near in pairwise(ELASTICITIES)),
    ),
)
