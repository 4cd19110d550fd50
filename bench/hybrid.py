"""The hybrid against everything by one way, and each parameter alone on servers, on `embedding-text`, for real.

    sudo python bench/hybrid.py [--workers 4] [--steps 12] [--link "100 Mbit/s"] [--json FILE]

Runs on hosts made of network namespaces of this machine, whose cards are as slow as `--link`: seconds and bytes per
step of BSP over collectives, over as many servers as workers, beside them, and over the hybrid. Seconds per step are
those of a worker between the beginnings of its steps, the first WARM left out. `dure reproduce hybrid` has all sets of
parameters, in virtual time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _script import PATH, parse, told
from virtual_network import seconds_per_step

from dure.core import units
from dure_studies import namespaces
from dure_studies.hybrid import ALL, CHOSEN, COLLECTIVES, NONE, PARAMETERS, SPARSE

RUN_SECONDS = 300.0
ENVIRON = {"PYTHONPATH": PATH, "OMP_NUM_THREADS": "1"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--job", default=SPARSE)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--link", default="100 Mbit/s")
    parser.add_argument("--only", type=int, help="so many of the strategies, from the first on")
    parser.add_argument("--json", type=Path)
    return parse(parser, job="digits-mlp", workers=2, steps=4, only=2)


def strategies(workers: int) -> list[str]:
    """By the hybrid's choice, by one way, and by hand."""
    alone = [f"bsp hybrid:servers={name}" for name in PARAMETERS]
    return [CHOSEN, COLLECTIVES, f"bsp ps:shards={workers},colocated=true", ALL, NONE, *alone]


def for_real(hosts: namespaces.Hosts, strategy: str, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--strategy",
            strategy,
            "--steps",
            str(given.steps),
            "--eval-every",
            "1000000",
            "--trace",
            "--out",
            folder,
        ]
        command = [sys.executable, "-m", "dure", "train", given.job, "--on", "torchrun", *options, "--json"]
        done = hosts.run(command, seconds=RUN_SECONDS, environ=ENVIRON)
        seconds = seconds_per_step(Path(folder) / "trace.json")
    found = row(strategy, seconds, json.loads(done[0].out.splitlines()[-1]), len(hosts.names) * given.steps)
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


def main() -> None:
    given = options()
    if reason := namespaces.missing():
        print(f"skipped: {reason}")
        return
    with told("hybrid", given) as facts:
        with namespaces.hosts(given.workers, bandwidth=units.rate(given.link)) as hosts:
            rows = [for_real(hosts, each, given) for each in strategies(given.workers)[: given.only]]
        print(table(rows))
        facts |= {"job": given.job, "workers": given.workers, "link": given.link, "rows": rows}


if __name__ == "__main__":
    main()
