"""Methods of synchronization for BERT-base on the machines of `bert_albert`: virtual seconds, data-parallel.

The paper names two moments of synchronization, each mini-batch and each epoch, and leaves a study of methods to later
work. All workers compute as long as in the rows of `bert_albert`, so that the rows differ by their exchanges alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dure_studies.output import Columns, Row, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from dure.job.initial_model import InitialModel
    from dure.job.job import Job
    from dure.runtime.virtual.cluster import Cluster

REVIEWS, BATCH, TOKENS, WORKERS = 50_000, 48, 128, 6
"""Reviews of an epoch, samples of a step of all workers, and word pieces of each, of the main rows too."""

SERVERS = "ps:shards=6,colocated=true"
"""A server beside each worker."""

METHODS = {
    "bsp collective": 1,
    "bsp collective fp16": 1,
    "bsp collective int8": 1,
    "averaging:period=10 collective": 10,
    "averaging:schedule=epoch collective": math.ceil(REVIEWS / BATCH),
    f"bsp {SERVERS}": 100,
    f"downpour {SERVERS}": None,
}
"""The methods, and the steps of a run; None: workers do not wait for each other.

The steps of a method over collectives are a period. Over servers the first step has one more pull than others.
"""

ASYNCHRONOUS = 40
"""The seconds of an asynchronous run, in steps of the first method."""


def rows(job: Job, clusters: Mapping[float, Cluster]) -> list[Row]:
    """For each method and network the seconds and bytes of a step: of as many samples as a step of all workers has.

    `clusters` are by the speed of each host's card, in Gbit/s. A fast worker of `downpour` makes more steps than a slow
    one.
    """
    from dure.job.initial_model import InitialModel

    model, found = InitialModel(job, 0, timing_only=True), list[Row]()
    for gbits, cluster in clusters.items():
        bsp = 0.0
        for strategy, steps in METHODS.items():
            length = {"seconds": ASYNCHRONOUS * bsp} if steps is None else {"steps": steps}
            row = _row(strategy, cluster, job, model, length)
            bsp = bsp or row["seconds_per_step"]
            found.append({"model": "bert", "gbits": gbits, **row})
    return found


def _row(strategy: str, cluster: Cluster, job: Job, model: InitialModel, length: Mapping[str, Any]) -> Row:
    from dure.run.config import TrainConfig
    from dure.run.outcome import summary
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.resolve import resolve
    from dure.run.virtual import VirtualRun

    config = TrainConfig(job=job.name, strategy=strategy, on="virtual", timing_only=True, **length)
    setup, _ = resolve(config, Prebuilt(job=job, cluster=cluster, model=model))
    run = summary(setup, VirtualRun(setup, cluster, Callbacks()).run(), "virtual")
    done = run["samples"] / BATCH
    return {
        "strategy": strategy,
        "seconds_per_step": run["seconds"] / done,
        "bytes_per_step": run["bytes_sent"] / done,
        "staleness": run["staleness"]["mean"],
        "seconds": math.ceil(REVIEWS / BATCH) * run["seconds"] / done,
    }


def table(found: Sequence[Row]) -> Table:
    """A line for each method: seconds of a step over each network, bytes, and staleness."""
    by_strategy: dict[str, list[Row]] = {}
    for row in sorted(found, key=lambda row: row["gbits"]):
        by_strategy.setdefault(row["strategy"], []).append(row)
    networks = sorted({row["gbits"] for row in found})

    def seconds(place: int) -> Callable[[list[Row]], str]:
        return lambda own: f"{own[place]['seconds_per_step']:.3f}"

    columns: Columns = [
        ("method", lambda own: own[0]["strategy"]),
        *((f"s/step, {gbits:g} Gbit/s", seconds(place)) for place, gbits in enumerate(networks)),
        ("MB/step", lambda own: f"{own[-1]['bytes_per_step'] / 1e6:,.0f}"),
        ("staleness", lambda own: f"{own[-1]['staleness']:.1f}"),
    ]
    caption = (
        f"BERT, data-parallel, steps of {BATCH} x {TOKENS}. Seconds are those of a step; a method may need more steps."
    )
    return table_of(by_strategy.values(), columns, caption, texts=("method",))
