"""Compares collectives, servers and their hybrid on a sparse and on a dense model, in virtual time.

A survey of concepts of distributed deep learning (in Korean), section 4.3: collectives are better for dense updates,
servers for sparse ones; a hybrid chooses by the density of each parameter (Kim et al., "Parallax", EuroSys 2019).

Each set of parameters of the sparse model on servers is tried by hand too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, less

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 8
TABLE = "bag.weight"
PARAMETERS = (TABLE, *(f"classifier.{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")))
"""Parameters of `embedding-text`."""
COLLECTIVES, SERVERS = "bsp collective", f"bsp ps:shards={WORKERS},colocated=true"
ONE_SERVER = "bsp ps"
CHOSEN, NONE, ALL = "bsp hybrid", "bsp hybrid:servers=none", "bsp hybrid:servers=all"
SPARSE, DENSE = "embedding-text", "mnist-mlp:hidden=128"
SLACK = 0.001
"""Less than this share of a step is no difference."""


def _by_hand() -> list[str]:
    sets = itertools.chain.from_iterable(itertools.combinations(PARAMETERS, n) for n in range(1, len(PARAMETERS) + 1))
    return [NONE, *(f"bsp hybrid:servers={'/'.join(names)}" for names in sets)]


def _settings() -> Mapping[str, Setting]:
    cluster = Cluster(
        machines=[{"count": WORKERS, "compute": {"seconds": "20 ms"}}],
        link={"bandwidth": "100 Mbit/s", "latency": "0.1 ms"},
    )
    runs = [(SPARSE, each) for each in (COLLECTIVES, SERVERS, ALL, CHOSEN, *_by_hand())]
    runs += [(DENSE, each) for each in (COLLECTIVES, ONE_SERVER, SERVERS, ALL, CHOSEN)]
    return {f"{job}, {each}": Setting(each, cluster, job=job) for job, each in runs}


def _measure(_study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    summary = setting.train(job, seed=seed, steps=rounds, eval_every=10**6).summary()
    megabytes = summary["bytes_sent"] / WORKERS / rounds / 1e6
    return {"ms": summary["seconds"] / rounds * 1e3, "sent": megabytes, "hybrid": summary.get("hybrid")}


def _ms(rows: OfSeed, job: str, strategy: str) -> float:
    return float(rows[f"{job}, {strategy}"]["ms"])


STUDY = Study(
    name="hybrid",
    about=f"BSP, {WORKERS} machines, 100 Mbit/s, 0.1 ms of latency, 20 ms of computing per step.",
    job=SPARSE,
    settings=_settings,
    measure=_measure,
    rounds=10,
    columns=(
        FigureColumn("ms", "ms per step", "{:.2f}"),
        FigureColumn("sent", "MB sent per worker and step", "{:.3f}"),
    ),
    statements=(
        Statement(
            "Sparse model: servers that send only rows that were read take a fifth of the collectives' time or less",
            lambda rows: _ms(rows, SPARSE, ALL) <= _ms(rows, SPARSE, COLLECTIVES) / 5,
        ),
        less("Sparse model: the hybrid is faster than servers alone", "ms", f"{SPARSE}, {CHOSEN}", f"{SPARSE}, {ALL}"),
        Statement(
            "Sparse model: none of the 32 sets of parameters on servers is faster than the hybrid's own choice",
            lambda rows: min(_ms(rows, SPARSE, each) for each in _by_hand()) >= _ms(rows, SPARSE, CHOSEN) * (1 - SLACK),
        ),
        Statement(
            "Dense model: collectives take less than a third of the time of one server",
            lambda rows: _ms(rows, DENSE, COLLECTIVES) < _ms(rows, DENSE, ONE_SERVER) / 3,
        ),
        *(
            less(
                f"Dense model: collectives are faster than {text}", "ms", f"{DENSE}, {COLLECTIVES}", f"{DENSE}, {each}"
            )
            for text, each in (("a server on each machine", SERVERS), ("the hybrid's own servers", ALL))
        ),
        Statement(
            "Dense model: the hybrid chooses collectives, and is as fast",
            lambda rows: abs(_ms(rows, DENSE, CHOSEN) / _ms(rows, DENSE, COLLECTIVES) - 1) < SLACK,
        ),
    ),
    quick={"rounds": 3, "seeds": 1},
)
