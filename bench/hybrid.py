"""The hybrid against everything by one way, and against every choice by hand, on `embedding-text`.

    python bench/hybrid.py [--workers 8] [--steps 10] [--compute "20 ms"] [--link "100 Mbit/s"] [--json FILE]
    sudo python bench/hybrid.py --real [--workers 4] [--steps 12] [--link "100 Mbit/s"]

In virtual time: seconds and bytes per step of BSP over collectives, over as many servers as workers, beside them, and
over the hybrid with each of the 2^k sets of the model's k parameters on its servers. The script fails if one of them
is faster, by a thousandth, than what the hybrid chooses itself.

`--real` runs on hosts made of network namespaces of this machine, whose cards are as slow as `--link`, and of the sets
tries no more than each parameter alone. Seconds per step are those of a worker between the beginnings of its steps, the
first WARM left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from virtual_network import ENVIRON, seconds_per_step

import dure
from dure.cli.reproduce import namespaces
from dure.core import units
from dure.job.data.location import data_root
from dure.job.job import Job, load_job
from dure.job.replica import Replica
from dure.runtime.virtual.cluster import Cluster

JOB = "embedding-text"
SLACK = 0.001
"""Less than this share of a step is no difference."""
RUN_SECONDS = 300.0
CHOSEN, NONE, ALL = "bsp hybrid", "bsp hybrid:servers=none", "bsp hybrid:servers=all"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--compute", default="20 ms", help="of a step")
    parser.add_argument("--link", default="100 Mbit/s")
    parser.add_argument("--latency", default="0.1 ms")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def by_one_way(workers: int) -> list[str]:
    return ["bsp collective", f"bsp ps:shards={workers},colocated=true", ALL, CHOSEN]


def by_hand(job: Job, largest: int | None = None) -> Iterator[str]:
    """Every set of parameters on servers, of at most `largest` of them."""
    names = [layer.name for layer in Replica(job.build()).layers]
    for count in range((len(names) if largest is None else largest) + 1):
        for held in itertools.combinations(names, count):
            yield f"bsp hybrid:servers={'/'.join(held)}" if held else NONE


def in_virtual_time(job: Job, cluster: Cluster, workers: int, steps: int, strategy: str) -> dict[str, Any]:
    run = dure.train(job, strategy=strategy, on=cluster, workers=workers, steps=steps, eval_every=10**6)
    figures = run.summary()
    return row(strategy, figures["seconds"] / steps, figures, workers * steps)


def for_real(hosts: namespaces.Hosts, steps: int, strategy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--strategy", strategy, "--steps", str(steps), "--eval-every", "1000000", "--trace", "--out", folder]
        command = [sys.executable, "-m", "dure", "train", JOB, "--on", "torchrun", *options, "--json"]
        done = hosts.run(command, seconds=RUN_SECONDS, environ=ENVIRON)
        seconds = seconds_per_step(Path(folder) / "trace.json")
    found = row(strategy, seconds, json.loads(done[0].out.splitlines()[-1]), len(hosts.names) * steps)
    print(found, file=sys.stderr, flush=True)
    return found


def row(strategy: str, seconds: float, figures: dict[str, Any], steps_of_all: int) -> dict[str, Any]:
    sent, received = (figures[f"bytes_{way}"] / steps_of_all / 1e6 for way in ("sent", "received"))
    return {
        "strategy": strategy,
        "ms": seconds * 1e3,
        "sent": sent,
        "received": received,
        "hybrid": figures.get("hybrid"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| strategy | ms per step | MB sent per worker and step | MB received |", "|---|---:|---:|---:|"]
    for row in rows:
        lines.append(f"| `{row['strategy']}` | {row['ms']:.2f} | {row['sent']:.3f} | {row['received']:.3f} |")
    return "\n".join(lines)


def virtually(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    workers, steps = given.workers or 8, given.steps or 10
    job = load_job(JOB, data_root())
    cluster = Cluster(
        machines=[{"count": workers, "compute": {"seconds": given.compute}}],
        link={"bandwidth": given.link, "latency": given.latency},
    )
    measure = partial(in_virtual_time, job, cluster, workers, steps)
    return list(map(measure, by_one_way(workers))), list(map(measure, by_hand(job)))


def really(given: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    workers, job = given.workers or 4, load_job(JOB, data_root())
    with namespaces.hosts(workers, bandwidth=units.rate(given.link)) as hosts:
        measure = partial(for_real, hosts, given.steps or 12)
        return list(map(measure, by_one_way(workers))), list(map(measure, by_hand(job, largest=1)))


def main() -> None:
    given = options()
    if given.real and namespaces.missing():
        raise SystemExit(f"skipped: {namespaces.missing()}")
    torch.set_num_threads(1)
    rows, tried = really(given) if given.real else virtually(given)
    tried.sort(key=lambda each: float(each["ms"]))
    print(table([*rows, *tried]))
    print(json.dumps(rows[-1]["hybrid"], indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps({"load average": os.getloadavg(), "rows": rows, "by hand": tried}, indent=1))
    faster = [each["strategy"] for each in (*rows, *tried) if each["ms"] < rows[-1]["ms"] * (1 - SLACK)]
    if faster and not given.real:
        raise SystemExit(f"faster than what the hybrid chooses itself: {', '.join(faster)}")


if __name__ == "__main__":
    main()
