"""Versions of the parts of a pulled model, by the number of servers, the cut and the links; and the learning.

Yook, Lee and Yoo, a comparison of parallel training algorithms (in Korean), section 2.2: the parameters of Downpour
SGD are on several servers, with which workers communicate asynchronously and in parallel. So the model of a worker can
be inconsistent, besides its stale gradients. The paper gives no values.

The *version skew* of a pull is the versions from the oldest to the newest part. It is 0 where all servers get the
messages of all workers in one order. The orders differ where the way to one server takes longer than to another:

    cut    layer     a small part has come when a large one is still on the way
           memory    equal parts
    links  equal     all machines have the same link, servers are on machines of their own
           unfair    messages share a network card unequally, by chance (`Cluster.unfairness`)
           beside    servers on the machines of workers; the link of the first machine is a tenth as fast

The skew of `bsp` is 0, since its pulls ask for a version, and so is the skew of a single server.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dure.report.metrics import VersionCounts
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import LogNormal
from dure_studies.flags import ROUNDS, SEEDS, check_counts
from dure_studies.output import Columns, spread, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from dure.report.run import Run

ASYNCHRONOUS = ("downpour", "downpour:at_once=true")
CUTS = ((1, "layer"), *((shards, cut) for shards in (2, 4, 8) for cut in ("layer", "memory")))
"""Numbers of servers, and cuts of the model. A model at one server is not cut."""

SPEEDS = (0.5, 0.7, 0.9, 1.0)
"""Of the workers."""

STEP = 0.010
"""Mean seconds of a gradient at a worker of speed 1."""

LARGE = 3
"""The skew from which on the table has a single column."""


class Links(NamedTuple):
    """The network of a setting: the `unfairness` of cards, and whether servers are `beside` the workers."""

    unfairness: float = 0.0
    beside: bool = False


LINKS: Mapping[str, Links] = {"equal": Links(), "unfair": Links(unfairness=0.5), "beside": Links(beside=True)}


class SkewSetting(NamedTuple):
    """A method, the number of servers, the cut of the model among them, and the name of the links."""

    method: str
    shards: int
    cut: str
    links: str


quick = {"rounds": 30, "seeds": 1}


def reproduce(*, rounds: Annotated[int, ROUNDS] = 100, seeds: Annotated[int, SEEDS] = 3) -> dict[str, Any]:
    """Train `digits-mlp` with three hidden layers in all settings, and return the rows.

    `version_skew` has the pulls of all seeds, and is None for a single server. `staleness`, `accuracy` and `loss` are
    means over seeds, `spread` is the standard deviation of `accuracy`.

    Raises `UsageError` for numbers that are out of range.
    """
    check_counts(rounds=rounds, seeds=seeds)
    rows = [_row(setting, rounds, seeds) for setting in settings()]
    return {"reproduce": "version-skew", "time": "virtual", "rounds": rounds, "seeds": seeds, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """A row for each setting."""
    heads = (*map(str, range(LARGE)), f"{LARGE}+", "mean", "max")
    columns: Columns = [
        *((name, f"{{{name}}}") for name in SkewSetting._fields),
        *((head, f"{{skew[{place}]}}") for place, head in enumerate(heads)),
        ("staleness", "{staleness:.2f}"),
        ("accuracy", "{accuracy:.1%} ± {spread:.1%}"),
        ("loss", "{loss:.3f}"),
    ]
    caption = (
        f"share of the pulls of {len(SPEEDS)} workers by the versions from the oldest to the newest part, and the test "
        f"accuracy of digits-mlp after {result['rounds']} steps of each worker; {result['seeds']} seeds. Machines and "
        "links are virtual, gradients real."
    )
    rows = [{**row, "skew": _shares(row["version_skew"])} for row in result["rows"]]
    return table_of(rows, columns, caption, texts=SkewSetting._fields)


def settings() -> list[SkewSetting]:
    """All rows: asynchronous methods in each cut, and for comparison `bsp` over four servers."""
    asynchronous = [SkewSetting(method, *cut, links) for method in ASYNCHRONOUS for cut in CUTS for links in LINKS]
    return [SkewSetting("bsp", 4, cut, links) for cut in ("layer", "memory") for links in LINKS] + asynchronous


def trained(setting: SkewSetting, *, rounds: int, seed: int = 0) -> Run:
    """One run of a setting."""
    from dure.run.train import train

    links = LINKS[setting.links]
    servers = f"shards={setting.shards},split={setting.cut},colocated={str(links.beside).lower()}"
    options = {"steps": rounds, "eval_every": rounds, "lr": 0.1, "seed": seed, "exact": True}
    return train("digits-mlp:depth=3", strategy=f"{setting.method} ps:{servers}", on=cluster(links), **options)


def cluster(links: Links) -> Cluster:
    """Machines at 100 Mbit/s whose steps vary in time; the first is the slowest."""
    link = Link(bandwidth=12.5e6, latency=2e-4)
    slow = Link(bandwidth=link.bandwidth / 10, latency=link.latency)
    compute = LogNormal(seconds=STEP, sigma=0.3)
    machines = tuple(
        Machines(compute=compute, speed=speed, link=slow if links.beside and number == 0 else link)
        for number, speed in enumerate(SPEEDS)
    )
    return Cluster(machines=machines, link=link, unfairness=links.unfairness)


def _row(setting: SkewSetting, rounds: int, seeds: int) -> dict[str, Any]:
    found = [trained(setting, rounds=rounds, seed=seed).summary() for seed in range(seeds)]
    skew = VersionCounts()
    for summary in found:
        if setting.shards > 1:
            skew.merge(VersionCounts.from_dict(summary["version_skew"]))
    accuracies = [summary["accuracy"] for summary in found]
    return {
        **setting._asdict(),
        "version_skew": skew.as_dict() if setting.shards > 1 else None,
        "staleness": statistics.fmean(summary["staleness"]["mean"] for summary in found),
        "accuracy": statistics.fmean(accuracies),
        "spread": spread(accuracies),
        "loss": statistics.fmean(summary["loss"] for summary in found),
    }


def _shares(skew: Mapping[str, Any] | None) -> list[str]:
    """The share of pulls in each column of the table, the mean and the maximum; dashes for a single server."""
    if skew is None:
        return ["-"] * (LARGE + 3)
    columns = [0] * (LARGE + 1)
    for versions, pulls in skew["histogram"].items():
        columns[min(int(versions), LARGE)] += pulls
    return [*(f"{pulls / sum(columns):.1%}" for pulls in columns), f"{skew['mean']:.2f}", str(skew["max"])]
