"""Counts conflicts of concurrent updates of one model in shared memory, and compares locks by their seconds.

Niu et al., "Hogwild!", NeurIPS 2011: where updates are sparse, those of several cores rarely change the same elements,
so that locks are not needed. AsySVRG (Zhao and Li, AAAI 2016) has a variant without locks, with a lock for writes, and
with one for reads and writes.

A conflict is an element of an update that the mini-batch of at least one of the other workers changes too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.job import Job

WORKERS = 8
SPARSE, DENSE = "embedding-text", "mnist-mlp:hidden=512"
BATCHES = (1, 32)
LOCKS = ("none", "write", "readwrite")


def _settings() -> Mapping[str, Setting]:
    cluster, found = Cluster.uniform(WORKERS), {}
    for job in (SPARSE, DENSE):
        for batch in BATCHES:
            found[f"{job}, conflicts, batch {batch}"] = Setting(
                "hogwild shared", cluster, options={"batch_size": batch}, job=job
            )
    for lock in LOCKS:
        found[f"{DENSE}, lock={lock}"] = Setting(f"asysvrg:lock={lock} shared", cluster, job=DENSE)
    return found


def _measure(_study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    if "batch_size" in setting.options:
        return dict(zip(("table", "elements"), conflicts(job, setting.options["batch_size"], seed), strict=True))
    summary = setting.train(job, seed=seed, steps=rounds, timing_only=True).summary()
    return {"speed": summary["samples"] / summary["seconds"]}


def conflicts(job: Job, batch: int, seed: int) -> tuple[float | None, float]:
    """Shares of the elements of an update in conflict: of tables that are read by rows, and of the whole model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randperm(len(job.train), generator=generator)[:batch] for _ in range(WORKERS)]
    reads: list[Mapping[str, Tensor]] = [job.rows(job.train.batch(each)[0]) if job.rows else {} for each in drawn]
    shared, changed, dense = 0, 0, 0
    for name, parameter in job.build().named_parameters():
        if name not in reads[0]:
            dense += parameter.numel()
            continue
        width = math.prod(parameter.shape[1:])
        rows = [torch.unique(read[name]) for read in reads]
        others = torch.cat(rows[1:])
        changed += width * len(rows[0])
        shared += width * int(torch.isin(rows[0], others).sum())
    return (shared / changed if changed else None), (shared + dense) / (changed + dense)


def _share(rows: OfSeed, job: str, batch: int, name: str) -> float:
    return float(rows[f"{job}, conflicts, batch {batch}"][name])


def _speed(rows: OfSeed, lock: str) -> float:
    return float(rows[f"{DENSE}, lock={lock}"]["speed"])


STUDY = Study(
    name="hogwild",
    about=f"{WORKERS} workers of one memory; locks with AsySVRG on the dense model.",
    nature="Conflicts are counted in drawn mini-batches. Seconds are virtual, without tensors.",
    job=SPARSE,
    settings=_settings,
    measure=_measure,
    rounds=100,
    columns=(
        FigureColumn("table", "conflicts, rows of the table", "{:.0%}"),
        FigureColumn("elements", "conflicts, all elements", "{:.0%}"),
        FigureColumn("speed", "samples per second", "{:,.0f}"),
    ),
    statements=(
        Statement(
            "Sparse model, single samples: fewer than half of the elements of an update are in conflict",
            lambda rows: _share(rows, SPARSE, 1, "elements") < 0.5,
        ),
        Statement(
            "Sparse model, single samples: fewer than half of the rows of an update are in conflict",
            lambda rows: _share(rows, SPARSE, 1, "table") < 0.5,
        ),
        Statement(
            "Larger mini-batches have more conflicts on the sparse model's table",
            lambda rows: _share(rows, SPARSE, 32, "table") > _share(rows, SPARSE, 1, "table"),
        ),
        Statement(
            "No lock is the fastest, a lock for reads and writes the slowest",
            lambda rows: _speed(rows, "none") >= _speed(rows, "write") >= _speed(rows, "readwrite"),
        ),
    ),
    quick={"rounds": 10, "seeds": 1},
)
