"""Shared by all scripts: the option `--smoke`, peers that are not installed, ratios, and the line of JSON at the end.

A script ends with one line of JSON, an object that `told` prints. Each comparison is a row of its list `ratios`:

| key        | value                                                                                   |
|------------|-----------------------------------------------------------------------------------------|
| `what`     | the work that is compared                                                               |
| `peer`     | the other side                                                                          |
| `ratio`    | median over the pairs of the peer's seconds over dure's; above 1, dure is faster        |
| `interval` | its 95 % interval                                                                       |
| `pairs`    | the number of alternating pairs                                                         |
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]

PATH = os.pathsep.join(str(ROOT / folder) for folder in ("src", "jobs/src", "studies/src"))
"""PYTHONPATH of processes that use this checkout."""

# ---- the command line


def parse(parser: argparse.ArgumentParser, **smoke: Any) -> argparse.Namespace:
    """Parse the command line. With `--smoke`, the values of `smoke` are the defaults: sizes that end in seconds."""
    text = "the same path with sizes that end in seconds; the figures mean nothing"
    parser.add_argument("--smoke", action="store_true", help=text)
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smoke)
    given = parser.parse_args()
    if given.smoke:
        print("smoke: sizes are small, and the figures mean nothing")
    return given


def absent(module: str, extra: str, package: str | None = None) -> str | None:
    """Return the sentence that says which extra installs a peer; None if it is installed."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"skipped: {package or module} is not installed. Install it with: pip install 'dure[{extra}]'"


def need(module: str, extra: str, package: str | None = None) -> None:
    """End the script with status 0 and a sentence if the peer is not installed."""
    reason = absent(module, extra, package)
    if reason:
        print(reason)
        raise SystemExit(0)


# ---- ratios


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, whatever the distribution: two of the sorted values, by the binomial law."""
    count = len(values)
    outside, below = 0, 0.0  # values left out at each end, and the chance that the median lies beyond them
    while (below := below + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    first = max(outside - 1, 0)
    ordered = sorted(values)
    return ordered[first], ordered[-1 - first]


def ratio_of(what: str, peer: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """A row of `ratios`, from the seconds of both sides in each pair."""
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    low, high = median_interval(ratios)
    return {
        "what": what,
        "peer": peer,
        "ratio": round(statistics.median(ratios), 4),
        "interval": [round(low, 4), round(high, 4)],
        "pairs": len(ratios),
    }


def print_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """A line for each ratio."""
    for row in rows:
        low, high = row["interval"]
        spread = f"95 % interval {low:.3f} to {high:.3f}, {row['pairs']} pairs"
        print(f"{row['what']}: {row['ratio']:.3f} times as fast as {row['peer']} ({spread})")


# ---- the line of JSON


@contextlib.contextmanager
def told(benchmark: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Print what the body puts into the dictionary as one line of JSON, with what it was measured on; write it too."""
    facts: dict[str, Any] = {"benchmark": benchmark, "smoke": getattr(given, "smoke", False)}
    load_before = os.getloadavg()[0]
    yield facts
    facts |= {"machine": machine(), "commit": commit(), "date": datetime.date.today().isoformat()}
    facts |= {"load_before": load_before, "torch": torch.__version__, "python": platform.python_version()}
    text = json.dumps(facts)
    print(text)
    path: Path | None = getattr(given, "json", None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def machine() -> str:
    """The cores of this machine and their kind."""
    return f"{os.cpu_count()} x {processor()}"


def processor() -> str:
    """The model of the cores, as the system names it; their architecture where it does not."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, model = line.partition(":")
            if name.strip() == "model name":
                return model.strip()
    return platform.machine()


def commit() -> str:
    """The commit of this checkout, with a plus where files differ from it; "unknown" without git."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    return "unknown"


def git(*arguments: str) -> str:
    """The output of a command of git in this checkout."""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
