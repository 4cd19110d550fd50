"""Seconds of PipeDream's dynamic programme on long models and many workers.

    python bench/pipeline_plan.py [--layers 1000] [--workers 64]

Layers of equal, uniform and heavy-tailed durations, and links that are free, fast and slow. The bound of the search
(`partition/cut.py`) holds more where times are balanced.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

from _script import parse, told

from dure.partition.cut import Level, plan
from dure.partition.profile import BlockProfile, Profile

BANDWIDTHS = (math.inf, 1e8, 1e6)


def profile(kind: str, layers: int) -> Profile:
    rng = random.Random(0)
    durations = {"equal": lambda: 1.0, "uniform": rng.random, "heavy-tailed": lambda: rng.paretovariate(1.1)}
    blocks = (
        BlockProfile(durations[kind](), rng.randint(0, 10**6), rng.randint(1, 10**7), rng.randint(0, 10**6))
        for _ in range(layers)
    )
    return Profile(tuple(blocks))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parse(parser, layers=60, workers=8)
    with told("pipeline_plan", given) as facts:
        facts |= {"layers": given.layers, "workers": given.workers, "rows": []}
        for kind in ("equal", "uniform", "heavy-tailed"):
            for bandwidth in BANDWIDTHS:
                began = time.perf_counter()
                found = plan(profile(kind, given.layers), [Level(given.workers, bandwidth)])
                spent = time.perf_counter() - began
                print(f"{kind:13} {bandwidth:8.0e} bytes/s: {spent:5.1f} s, {len(found.stages):2} stages")
                row = {"times": kind, "bandwidth": f"{bandwidth:g}", "seconds": spent, "stages": len(found.stages)}
                facts["rows"].append(row)


if __name__ == "__main__":
    main()
