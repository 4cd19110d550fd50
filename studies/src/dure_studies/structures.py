"""Compares collectives with parameter servers for several models, by seconds of a step of the same method.

A survey of concepts of distributed deep learning (in Korean), section 4: the structure is chosen apart from the
synchronization, and decides the speed.

BSP, 8 workers with computations of 0.1 s, no tensors: each parameter counts as dense.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.runtime.virtual.cluster import Cluster, Link
from dure.runtime.virtual.compute import Constant
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study

if TYPE_CHECKING:
    from dure.job.job import Job

WORKERS = 8
SECONDS = 0.1
MODELS = {"mnist-mlp": "mnist-mlp", "VGG-16": "cifar10-vgg16:width=1", "embedding-text": "embedding-text"}
STRUCTURES = {
    "collectives": "bsp collective",
    "1 server": "bsp ps",
    "4 servers": "bsp ps:shards=4,split=memory",
    "8 beside workers": f"bsp ps:shards={WORKERS},split=memory,colocated=true",
}
LINKS = ("1 Gbit/s", "10 Gbit/s")


def _settings() -> Mapping[str, Setting]:
    found = {}
    for link in LINKS:
        cluster = Cluster.uniform(WORKERS, compute=Constant(seconds=SECONDS), link=Link(bandwidth=link))
        for model, job in MODELS.items():
            for structure, strategy in STRUCTURES.items():
                found[f"{model}, {link}, {structure}"] = Setting(strategy, cluster, job=job)
    return found


def _measure(_study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    summary = setting.train(job, seed=seed, steps=rounds, timing_only=True).summary()
    sent, received = (summary[f"bytes_{way}"] / WORKERS / rounds / 1e6 for way in ("sent", "received"))
    return {"ms": summary["seconds"] / rounds * 1e3, "sent": sent, "received": received}


def _ms(rows: OfSeed, model: str, link: str, structure: str) -> float:
    return float(rows[f"{model}, {link}, {structure}"]["ms"])


def _each(rows: OfSeed, models: tuple[str, ...], times: float) -> bool:
    """Whether one server takes at least so many times the seconds of collectives, for these models and all links."""
    return all(
        _ms(rows, model, link, "1 server") >= times * _ms(rows, model, link, "collectives")
        for model in models
        for link in LINKS
    )


STUDY = Study(
    name="structures",
    about=f"BSP, {WORKERS} workers, computations of {SECONDS:g} s, dense gradients.",
    nature="Seconds are virtual, without tensors.",
    job="mnist-mlp",
    settings=_settings,
    measure=_measure,
    rounds=10,
    seeds=1,
    columns=(
        FigureColumn("ms", "ms per step", "{:,.1f}"),
        FigureColumn("sent", "MB sent per worker", "{:,.2f}"),
        FigureColumn("received", "MB received", "{:,.2f}"),
    ),
    statements=(
        Statement(
            "VGG-16 and embedding-text: one server takes at least 1.5 times the time of collectives, for both links",
            lambda rows: _each(rows, ("VGG-16", "embedding-text"), 1.5),
        ),
        Statement(
            "mnist-mlp: the structure changes a step by less than a tenth, for both links",
            lambda rows: all(
                abs(_ms(rows, "mnist-mlp", link, structure) / _ms(rows, "mnist-mlp", link, "collectives") - 1) < 0.1
                for link in LINKS
                for structure in STRUCTURES
            ),
        ),
        Statement(
            "A server beside each worker comes within a third of collectives, for all models and links",
            lambda rows: all(
                _ms(rows, model, link, "8 beside workers") <= 4 / 3 * _ms(rows, model, link, "collectives")
                for model in MODELS
                for link in LINKS
            ),
        ),
    ),
    quick={"rounds": 2},
)
