"""Speed of this checkout against another one, usually the commit before: the same benchmarks of both, in turn.

    git worktree add --detach /tmp/before COMMIT
    python bench/against_commit.py /tmp/before [--pairs 15] [--only SCRIPT ...] [--json FILE]
    python bench/against_commit.py --smoke          this checkout against itself

Each pair runs one script of both checkouts, one right after the other; the order changes from pair to pair. A figure is
the other checkout's time over this one's time, so that 0.97 means 3 % slower than before. Printed are the
median over the pairs and its 95 % interval, for each figure of each script.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _script import ROOT, median_interval, parse, told

Facts = dict[str, Any]
Seconds = dict[str, float]


def kernel_seconds(facts: Facts) -> Seconds:
    rates = {name: each["dure"] if isinstance(each, dict) else each for name, each in facts.items() if "/s," in name}
    runs = {name: each["cpu"]["dure, microseconds per step"] for name, each in facts.items() if "ssp run" in name}
    return {name: 1.0 / rate for name, rate in rates.items()} | runs


def virtual_run_seconds(facts: Facts) -> Seconds:
    rates = facts["gradients_per_cpu_second"]
    return {name: 1.0 / rate for name, rate in rates.items() if not name.startswith("loop")}


def throughput_seconds(facts: Facts) -> Seconds:
    large = {
        f"{row['workers']} workers, {name}": 1.0 / rate
        for row in facts["rows"]
        for name, rate in row["bytes_per_second"].items()
        if name.startswith("dure")
    }
    return large | {f"1,000 values, {name}": each for name, each in facts["small_seconds"].items() if "dure" in name}


def bsp_seconds(facts: Facts) -> Seconds:
    rates = facts["samples_per_second"]
    return {"dure's BSP": 1.0 / next(rate for name, rate in rates.items() if name.startswith("dure"))}


def step_seconds(facts: Facts) -> Seconds:
    return dict(facts["step_seconds"])


SCRIPTS: dict[str, tuple[list[str], Callable[[Facts], Seconds]]] = {
    "virtual_kernel": (["--repeats", "1", "--events", "100000", "--steps", "10000"], kernel_seconds),
    "virtual_run": (["--repeats", "1", "--steps", "60"], virtual_run_seconds),
    "server_throughput": (["--workers", "1", "2", "--no-ray", "--repeats", "5"], throughput_seconds),
    "bsp_vs_ddp": (["--repeats", "10"], bsp_seconds),
    "real_steps": (["--repeats", "1"], step_seconds),
}


def in_turn(script: str, before: Path, pairs: int, smoke: bool) -> dict[str, list[float]]:
    """For each figure of a script, the ratios of all pairs."""
    arguments, seconds_of = SCRIPTS[script]
    arguments = ["--smoke"] if smoke else arguments
    ratios: dict[str, list[float]] = {}
    for pair in range(pairs):
        found: dict[bool, Seconds] = {}
        for is_before in (True, False) if pair % 2 else (False, True):
            checkout = before if is_before else ROOT
            found[is_before] = seconds_of(output(checkout, f"{script}.py", *arguments))
        for name, seconds in found[False].items():
            ratios.setdefault(name, []).append(found[True][name] / seconds)
    return ratios


def output(checkout: Path, script: str, *arguments: str) -> Facts:
    """The JSON object that a script prints: all of its output, or the last line."""
    command = [sys.executable, str(checkout / "bench" / script), *arguments]
    environ = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    printed = subprocess.run(command, check=True, cwd=checkout, env=environ, stdout=subprocess.PIPE, text=True).stdout
    facts: Facts = json.loads(printed if printed.startswith("{") else printed.splitlines()[-1])
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--only", nargs="+", choices=tuple(SCRIPTS), default=tuple(SCRIPTS))
    parser.add_argument("--json", type=Path)
    given = parse(parser, before=ROOT, pairs=1, only=("real_steps",))
    if given.before is None:
        parser.error("give the folder of the other checkout: git worktree add --detach FOLDER COMMIT makes one")
    with told("against_commit", given) as facts:
        facts["ratios"] = []
        for script in given.only:
            facts[script] = in_turn(script, given.before.resolve(), given.pairs, given.smoke)
            print(f"{script}: times as fast as {given.before}, {given.pairs} pairs")
            for name, each in facts[script].items():
                low, high = median_interval(each)
                print(f"{name:>44} {statistics.median(each):6.3f} ({low:.3f} to {high:.3f})", flush=True)
                row = {"what": f"{script}: {name}", "peer": "the other checkout", "ratio": statistics.median(each)}
                facts["ratios"].append(row | {"interval": [low, high], "pairs": len(each)})


if __name__ == "__main__":
    main()
