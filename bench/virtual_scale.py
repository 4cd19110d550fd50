"""Time per step and memory per worker of timing-only runs, from 64 to 10,000 virtual workers.

    python bench/virtual_scale.py [--workers 64 1000 10000] [--steps 20] [--repeats 3] [--strategy "bsp" ...]

Each pair of strategy and number of workers is measured in processes of its own, `--repeats` times, in turn. A process
first makes a small run, so that imports and first calls are not measured. Then it builds the run and simulates it:

- `us`: seconds of the simulation proper, over workers times steps, in microseconds. Building the workers and
  the services is left out; all that happens in virtual time is in it, the workers' joining and leaving too. A run of
  few workers is repeated and its median taken. `us_cpu` counts the process's CPU seconds in place of the wall's: on a
  machine with other work it is the steadier of the two.
- `kB`: the growth of the process's peak memory from the small run to the end, over the additional workers. It has
  everything that the run builds and makes, on the way and at its end.

What is told are medians over the repeats, and `growth`, the time per step over that of the smallest number of workers.
Needs /proc (Linux).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _script import parse, told

STRATEGIES = ("bsp", "ssp ps:shards=8", "averaging", "ad-psgd gossip:graph=ring")
WORKERS = (64, 1000, 10_000)
JOB = "digits-mlp"
SMALL = 64
"""Workers of the run that comes first in each process, and from which its memory is counted."""
ENOUGH = 1000
"""Workers whose single run is long enough to be timed; fewer run several times."""


def peak_kilobytes() -> int:
    """The most memory that this process has had so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def simulate(strategy: str, workers: int, steps: int) -> tuple[float, float]:
    """Wall and CPU seconds of the simulation proper of one run."""
    from dure.run.config import TrainConfig
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.resolve import resolve
    from dure.run.virtual import VirtualRun, VirtualSegment, collecting_rarely
    from dure.runtime.virtual.cluster import Cluster

    cluster = Cluster.uniform(workers)
    config = TrainConfig(job=JOB, strategy=strategy, on="virtual", workers=workers, steps=steps, timing_only=True)
    setup, _ = resolve(config, Prebuilt(cluster=cluster))
    with collecting_rarely(workers):
        segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
        wall, cpu = time.perf_counter(), time.process_time()
        segment.run()
        return time.perf_counter() - wall, time.process_time() - cpu


def measure(strategy: str, workers: int, steps: int) -> dict[str, float]:
    """Time per step of one number of workers and, above the small run's, memory per worker: in this process."""
    simulate(strategy, SMALL, steps)
    before = peak_kilobytes()
    runs = [simulate(strategy, workers, steps) for _ in range(max(1, ENOUGH // workers))]
    wall, cpu = (statistics.median(seconds) for seconds in zip(*runs, strict=True))
    found = {"us": wall / (workers * steps) * 1e6, "us_cpu": cpu / (workers * steps) * 1e6}
    if workers > SMALL:
        found["kB"] = (peak_kilobytes() - before) * 1.024 / (workers - SMALL)
    return found


def measure_apart(strategy: str, workers: int, steps: int) -> dict[str, float]:
    """As `measure`, in a process of its own."""
    command = [sys.executable, __file__, "--one", "--strategy", strategy, "--workers", str(workers)]
    done = subprocess.run([*command, "--steps", str(steps)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(found: dict[tuple[str, int], list[dict[str, float]]], workers: list[int]) -> dict[str, Any]:
    """The medians of all repeats, by strategy and number of workers."""
    rows: dict[str, Any] = {}
    for (strategy, count), repeats in found.items():
        row = {name: statistics.median(each[name] for each in repeats) for name in repeats[0]}
        rows.setdefault(strategy, {})[count] = row
    for by_count in rows.values():
        least = by_count[min(workers)]
        for row in by_count.values():
            row |= {"growth": row["us"] / least["us"], "growth_cpu": row["us_cpu"] / least["us_cpu"]}
            row |= {name: round(value, 2) for name, value in row.items()}
    return rows


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--strategy", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--steps", type=int, default=20, help="mini-batches of each worker")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="measure one pair in this process")
    parser.add_argument("--json", type=Path)
    given = parse(parser, workers=[500, 1000], strategy=["bsp"], steps=2, repeats=1)
    if given.one:
        print(json.dumps(measure(given.strategy[0], given.workers[0], given.steps)))
        return
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with told("virtual_scale", given) as facts:
        for _ in range(given.repeats):
            for strategy in given.strategy:
                for workers in given.workers:
                    found.setdefault((strategy, workers), []).append(measure_apart(strategy, workers, given.steps))
        rows = table(found, given.workers)
        for strategy, by_count in rows.items():
            for count, row in by_count.items():
                print(f"{strategy:>24} {count:6} workers: {', '.join(f'{name} {each}' for name, each in row.items())}")
        facts |= {"job": JOB, "steps": given.steps, "repeats": given.repeats, "rows": rows}


if __name__ == "__main__":
    main()
