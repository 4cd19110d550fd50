"""Compares Hogwild!, HogBatch and AsySVRG, which train one model in shared memory.

Niu et al., "Hogwild!", NeurIPS 2011; Sallinen et al. (HogBatch), IPDPS 2016; Zhao and Li, "Fast Asynchronous Parallel
Stochastic Gradient Descent", AAAI 2016, figure 1: on logistic regression, AsySVRG's loss
approaches the optimum linearly and to high precision at a constant rate, unlike the loss of Hogwild!.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, Row, Setting, Statement, Study, learnt, less

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 8
CONVEX = "softmax-regression"
CONVEX_RATE = 0.1
MNIST_RATE = 0.03
METHODS = {"Hogwild!": "hogwild", "HogBatch": "hogbatch", "AsySVRG": "asysvrg"}


def least_loss(job: Job) -> float:
    """The least loss of a convex job on its training data, by L-BFGS."""
    import torch

    model = job.build()
    inputs, targets = job.train.batch(torch.arange(len(job.train)))
    descent = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-12, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        descent.zero_grad()
        found = job.loss(model(inputs), targets)
        found.backward()  # type: ignore[no-untyped-call]
        return found

    descent.step(loss)  # type: ignore[no-untyped-call]
    return float(loss().detach())


def above_optimum(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """The figures of `learnt`; on the convex job also the loss above the optimum, at the end and at half-time."""
    found = learnt(study, job, setting, rounds, seed)
    if not setting.job:
        return found
    if found["why"]:
        return found | {"excess": math.inf, "halfway": math.inf}
    least = least_loss(job)
    for row in found["history"]:
        row["excess"] = max(row["loss"] - least, 1e-16)
    halfway = found["history"][len(found["history"]) // 2]["excess"]
    return found | {"excess": found["history"][-1]["excess"], "halfway": halfway}


def _settings() -> Mapping[str, Setting]:
    jobs = {"convex": (CONVEX, CONVEX_RATE, 2.0), "mnist-mlp": ("", MNIST_RATE, 1.0)}
    return {
        f"{where}, {name}": Setting(
            method, Cluster.uniform(WORKERS), options={"lr": rate}, job=job, panel=job or where, line=name, share=share
        )
        for where, (job, rate, share) in jobs.items()
        for name, method in METHODS.items()
    }


def _sooner(one: str, other: str) -> Statement:
    text = f"mnist-mlp: {one} reaches the target before {other}"
    return less(text, "seconds_to_target", f"mnist-mlp, {one}", f"mnist-mlp, {other}")


STUDY = Study(
    name="shared-memory",
    about=f"{WORKERS} workers on one model; softmax regression at a rate of {CONVEX_RATE}, mnist-mlp at {MNIST_RATE}.",
    settings=_settings,
    columns=(
        "lr",
        "accuracy",
        "seconds",
        "seconds_to_target",
        FigureColumn("halfway", "at half-time", "{:.1e}"),
        FigureColumn("excess", "loss above optimum", "{:.1e}"),
    ),
    rounds=200,
    target=0.85,
    measure=above_optimum,
    statements=(
        Statement(
            "convex: AsySVRG ends within 1e-6 of the optimum", lambda row: row["convex, AsySVRG"]["excess"] < 1e-6
        ),
        Statement(
            "convex: AsySVRG is at least 100 times closer at the end than at half-time",
            lambda row: row["convex, AsySVRG"]["excess"] < row["convex, AsySVRG"]["halfway"] / 100,
        ),
        Statement("convex: Hogwild! stays above 1e-4", lambda row: row["convex, Hogwild!"]["excess"] > 1e-4),
        Statement("convex: HogBatch stays above 1e-4", lambda row: row["convex, HogBatch"]["excess"] > 1e-4),
        _sooner("AsySVRG", "Hogwild!"),
        _sooner("HogBatch", "Hogwild!"),
        less(
            "mnist-mlp: AsySVRG ends more accurate than Hogwild!",
            "accuracy",
            "mnist-mlp, Hogwild!",
            "mnist-mlp, AsySVRG",
        ),
    ),
)
