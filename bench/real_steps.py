"""How fast small steps are for real: `digits-mlp` over a parameter server on this machine, strategy by strategy.

    python bench/real_steps.py [--workers 2] [--steps 1000] [--repeats 5] [--strategy S ...] [--json FILE]

A gradient of this job takes a fraction of a millisecond, so a step is mostly round trips. Where there is order, that is
one over one server and three over several (push; word of it, and the next question; pull); Downpour has two (pull,
push), or one. Runs are whole `dure.train(..., on="local")`, in turn; the seconds are those of their records, which
begin when all processes are ready. Medians.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from _script import parse, told

import dure

STRATEGIES = ("ssp:bound=3", "downpour", "bsp ps", "ssp:bound=3 ps:shards=2", "downpour:at_once=true")


def step_seconds(strategy: str, workers: int, steps: int, seed: int) -> float:
    """Mean seconds of a worker's step in one run. It is evaluated only at its end."""
    run = dure.train(
        "digits-mlp", strategy=strategy, on="local", workers=workers, steps=steps, eval_every=steps, seed=seed
    )
    return float(run.summary()["seconds"]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", nargs="+", default=STRATEGIES)
    parser.add_argument("--json", type=Path)
    given = parse(parser, steps=5, repeats=1, strategy=["ssp:bound=3"])
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {strategy: [] for strategy in given.strategy}
    with told("real_steps", given) as facts:
        for repeat in range(given.repeats):
            for strategy, each in seconds.items():
                each.append(step_seconds(strategy, given.workers, given.steps, repeat))
        print(f"{'strategy':>24} {'a step':>10} {'fastest':>10} {'steps/s, all workers':>21}")
        for strategy, each in seconds.items():
            median = statistics.median(each)
            print(f"{strategy:>24} {median * 1e3:7.3f} ms {min(each) * 1e3:7.3f} ms {given.workers / median:21,.0f}")
        facts |= {"workers": given.workers, "steps": given.steps, "repeats": given.repeats}
        facts["step_seconds"] = {strategy: statistics.median(each) for strategy, each in seconds.items()}


if __name__ == "__main__":
    main()
