"""How long each method takes to 95 % test accuracy on `mnist-mlp`, in four virtual clusters of 16 workers.

    python bench/time_to_accuracy.py [--only NAME ...] [--clusters NAME ...] [--seeds 1] [--real] [--job mnist-mlp]
        [--json FILE]

Every run is the real training; its seconds are modelled (`docs/explanations/virtual-time.md`). A row of `METHODS` is
what the page of the method recommends for this job: where it takes the mean of 16 gradients or models, that includes
a larger rate. A step takes a worker 10 ms, in the mean. The clusters:

- `even`: all alike, with links of 10 Gbit/s;
- `straggler`: the last worker is five times slower for good;
- `heavy tail`: log-normal steps of sigma 1.5, whose longest of 16 is nearly seven times their mean;
- `slow links`: all alike, with links of 100 Mbit/s: the model of 100 kB takes one of them 8 ms.

`--real` trains each method for real instead, with 3 processes on this machine and three times as many steps, and says
how long it takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _script import parse, told

import dure
from dure.core.target import Target
from dure.report.metrics import time_to
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal

WORKERS, TARGET, STEP = 16, 0.95, 0.01
PROCESSES = 3


@dataclass(frozen=True)
class Method:
    """A method as it is used for this job: `options` of a run, and its own `target` where it promises another.

    `few` is what else it takes with few workers, whose gradients are less stale and whose means are of less.
    """

    strategy: str
    steps: int = 1000
    options: Mapping[str, Any] = field(default_factory=dict)
    target: float = TARGET
    few: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "bsp": Method("bsp", options={"lr": 0.3}),
    "one-shot": Method("one-shot", options={"lr": 0.1}, target=0.93),
    "averaging": Method("averaging", options={"lr": 0.3}),
    "easgd": Method("easgd", options={"lr": 0.2}),
    "eamsgd": Method("eamsgd"),
    "bmuf": Method("bmuf", options={"lr": 0.1}),
    "diloco": Method("diloco"),
    "backup": Method("backup", options={"lr": 0.3}),
    "k-sync": Method("k-sync", options={"lr": 0.3}),
    "k-batch-sync": Method("k-batch-sync", options={"lr": 0.3}),
    "k-async": Method("k-async", options={"lr": 0.3}),
    "k-batch-async": Method("k-batch-async", options={"lr": 0.2}),
    "ssp": Method("ssp", options={"lr": 0.015}),
    "downpour": Method("downpour", options={"lr": 0.015}),
    "downpour+momentum-compensation": Method("downpour+momentum-compensation:target=0.5", options={"lr": 0.03}),
    "downpour+dc-asgd": Method("downpour+dc-asgd", options={"lr": 0.015}),
    "downpour+staleness-lr": Method("downpour+staleness-lr", options={"lr": 0.3}, few={"lr": 0.06}),
    "hogwild": Method("hogwild", options={"lr": 0.015}),
    "hogbatch": Method("hogbatch", steps=1500, options={"lr": 0.02}, few={"lr": 0.06}),
    "asysvrg": Method("asysvrg"),
    "ad-psgd": Method("ad-psgd", options={"lr": 0.2}),
    "lbfgs": Method("lbfgs:batch=6000", steps=1600, few={"batch_size": 200}),
}


def cluster(name: str) -> Cluster:
    """One of the four."""
    even = Machines(count=WORKERS, compute=Constant(seconds=STEP))
    if name == "straggler":
        slow = Machines(compute=Constant(seconds=STEP), speed=0.2)
        return Cluster(machines=(Machines(count=WORKERS - 1, compute=Constant(seconds=STEP)), slow))
    if name == "heavy tail":
        return Cluster(machines=(Machines(count=WORKERS, compute=LogNormal(seconds=STEP, sigma=1.5)),))
    if name == "slow links":
        return Cluster(machines=(even,), link=Link(bandwidth=12.5e6))
    return Cluster(machines=(even,))


CLUSTERS = ("even", "straggler", "heavy tail", "slow links")


def virtual(method: Method, on: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run in virtual time: its seconds to the target (None if it never got there) and where it ended."""
    began = time.perf_counter()
    run = dure.train(
        given.job,
        strategy=method.strategy,
        on=cluster(on),
        steps=given.steps or method.steps,
        seed=seed,
        **{"eval_every": 10} | dict(method.options),
    )
    figures = run.summary()
    return {
        "seconds": time_to(run.history, Target(method.target)),
        "accuracy": figures["best_accuracy"],
        "megabytes": figures["bytes_sent"] / 1e6,
        "staleness": figures["staleness"]["mean"],
        "wall": time.perf_counter() - began,
    }


def real(method: Method, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run on processes of this machine; fewer than in virtual time, so each makes more steps."""
    run = dure.train(
        given.job,
        strategy=method.strategy,
        on="local",
        workers=PROCESSES,
        steps=3 * (given.steps or method.steps),
        seed=seed,
        **{**method.options, **method.few},
    )
    figures = run.summary()
    return {"seconds": time_to(run.history, Target(method.target)), "accuracy": figures["best_accuracy"]}


def median(values: Sequence[float | None]) -> float | None:
    """Of several seeds; None if most of them never got there."""
    reached = sorted(float("inf") if value is None else value for value in values)
    middle = statistics.median_low(reached)
    return None if middle == float("inf") else middle


def cell(runs: Sequence[Mapping[str, Any]]) -> str:
    """A table's cell: seconds to the target, or how far it came."""
    seconds = median([run["seconds"] for run in runs])
    return f"{seconds:.2f}" if seconds is not None else f"({statistics.median(r['accuracy'] for r in runs):.3f})"


def table(found: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]], places: Sequence[str], *, few: bool) -> str:
    """In Markdown, one row per method."""
    lines = ["| strategy | options | " + " | ".join(places) + " |", "|---|---|" + "---:|" * len(places)]
    for name, row in found.items():
        method = METHODS[name]
        used = {**method.options, **(method.few if few else {})}
        options = ", ".join(f"{key}={value}" for key, value in used.items()) or "none"
        lines.append(f"| `{method.strategy}` | {options} | " + " | ".join(cell(row[place]) for place in places) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--clusters", nargs="*", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--job", default="mnist-mlp")
    parser.add_argument("--steps", type=int, help="instead of those of each method")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    given = parse(parser, job="digits-mlp", steps=10, only=["bsp", "ssp"], clusters=["even"])
    torch.set_num_threads(1)
    with told("time_to_accuracy", given) as facts:
        facts |= {"job": given.job, "rows": measure(given)}


def measure(given: argparse.Namespace) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Make the runs, and print the table."""
    places = [f"{PROCESSES} processes"] if given.real else given.clusters
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for name in given.only:
        found[name] = {place: [] for place in places}
        for place in places:
            for seed in range(given.seeds):
                method = METHODS[name]
                made = real(method, seed, given) if given.real else virtual(method, place, seed, given)
                found[name][place].append(made)
                print(name, place, json.dumps(found[name][place][-1]), flush=True)
    text = table(found, places, few=given.real)
    print(text)
    if given.markdown is not None:
        given.markdown.write_text(text + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    main()
