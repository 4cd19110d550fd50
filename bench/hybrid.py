"""The hybrid against everything by one way, and against every choice by hand, on `embedding-text`.

    python bench/hybrid.py [--workers 8] [--steps 10] [--compute "20 ms"] [--link "100 Mbit/s"] [--json FILE]
    python bench/hybrid.py --real [--workers 2] [--steps 60]

In virtual time: seconds and bytes per step of BSP over collectives, over as many servers as workers, beside them, and
over the hybrid with each of the 2^k sets of the model's k parameters on its servers. The script fails if one of them
is faster, by a thousandth, than what the hybrid chooses itself.

`--real` leaves the sets out and takes processes of this machine, whose loopback is as fast as it is: seconds per step
are those of the whole run after its start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dure
from dure.data.location import data_root
from dure.job import Job, load_job
from dure.replica import Replica
from dure.runtime.cluster import Cluster

JOB = "embedding-text"
SLACK = 0.001
"""Less than this share of a step is no difference."""
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


def by_hand(job: Job) -> Iterator[str]:
    """Every set of parameters on servers."""
    names = [layer.name for layer in Replica(job.build()).layers]
    for count in range(len(names) + 1):
        for held in itertools.combinations(names, count):
            yield f"bsp hybrid:servers={'/'.join(held)}" if held else NONE


def measured(job: Job | str, strategy: str, workers: int, steps: int, on: Cluster | str) -> dict[str, Any]:
    run = dure.train(job, strategy=strategy, on=on, workers=workers, steps=steps, eval_every=10**6)
    figures = run.summary()
    return {
        "strategy": strategy,
        "ms": figures["seconds"] / steps * 1e3,
        "sent": figures["bytes_sent"] / workers / steps / 1e6,
        "received": figures["bytes_received"] / workers / steps / 1e6,
        "hybrid": figures.get("hybrid"),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| strategy | ms per step | MB sent per worker and step | MB received |", "|---|---:|---:|---:|"]
    for row in rows:
        lines.append(f"| `{row['strategy']}` | {row['ms']:.2f} | {row['sent']:.3f} | {row['received']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    given = options()
    torch.set_num_threads(1)
    workers, steps = given.workers or (2 if given.real else 8), given.steps or (60 if given.real else 10)
    if given.real:
        rows = [measured(JOB, strategy, workers, steps, "local") for strategy in by_one_way(workers)]
        tried = []
    else:
        job = load_job(JOB, data_root())
        cluster = Cluster(
            machines=[{"count": workers, "compute": {"seconds": given.compute}}],
            link={"bandwidth": given.link, "latency": given.latency},
        )
        rows = [measured(job, strategy, workers, steps, cluster) for strategy in by_one_way(workers)]
        tried = [measured(job, strategy, workers, steps, cluster) for strategy in by_hand(job)]
    tried.sort(key=lambda row: row["ms"])
    print(table([*rows, *tried]))
    print(json.dumps(rows[-1]["hybrid"], indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps({"load average": os.getloadavg(), "rows": rows, "by hand": tried}, indent=1))
    faster = [row["strategy"] for row in (*rows, *tried) if row["ms"] < rows[-1]["ms"] * (1 - SLACK)]
    if faster and not given.real:
        raise SystemExit(f"faster than what the hybrid chooses itself: {', '.join(faster)}")


if __name__ == "__main__":
    main()
