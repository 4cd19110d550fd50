"""Whether one bit for each element of a gradient is enough: `mnist-cnn` with and without feeding the error back.

    python bench/one_bit_feedback.py [--job mnist-cnn] [--seeds 3] [--steps 900] [--lr 0.1] [--json FILE]

`bsp` over collectives, 4 workers with mini-batches of 16, in virtual time: seconds play no part here, the gradients are
real. A run's accuracy is the mean of its last three evaluations, 100 steps (`--every`) apart, since one alone jumps by
half a point at a constant rate; the table has the mean over seeds, and the spread of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from _script import parse, told

import dure

CODECS = ("fp32", "1bit", "1bit:feedback=false")
LAST = 3
"""Evaluations that a run's accuracy is the mean of."""


def accuracy(codec: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    run = dure.train(
        given.job,
        strategy=f"bsp collective {codec}",
        on="virtual",
        workers=4,
        batch_size=16,
        steps=given.steps,
        lr=given.lr,
        seed=seed,
        eval_every=given.every,
    )
    found = [row["accuracy"] for row in run.history][-LAST:]
    return {"codec": codec, "seed": seed, "accuracy": statistics.mean(found), "bytes": run.summary()["bytes_sent"]}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, one line per codec."""
    lines = ["| codec | accuracy, % | seeds, % | against fp32, points | bytes |", "|---|---:|---|---:|---:|"]
    of_fp32 = statistics.mean(row["accuracy"] for row in rows if row["codec"] == "fp32")
    for codec in CODECS:
        mine = [row for row in rows if row["codec"] == codec]
        mean = statistics.mean(row["accuracy"] for row in mine)
        seeds = ", ".join(f"{100 * row['accuracy']:.2f}" for row in mine)
        megabytes = statistics.mean(row["bytes"] for row in mine) / 1e6
        lines.append(f"| `{codec}` | {100 * mean:.2f} | {seeds} | {100 * (mean - of_fp32):+.2f} | {megabytes:.0f} MB |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="mnist-cnn")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--json", type=Path)
    given = parse(parser, job="digits-mlp", seeds=1, steps=6, every=2)
    if given.steps < LAST * given.every:
        parser.error(f"--steps must be at least {LAST * given.every}: a run is judged by {LAST} evaluations.")
    torch.set_num_threads(1)
    with told("one_bit_feedback", given) as facts:
        rows = []
        for seed in range(given.seeds):
            for codec in CODECS:
                rows.append(accuracy(codec, seed, given))
                print(json.dumps(rows[-1]), flush=True)
        print(table(rows))
        facts |= {"job": given.job, "steps": given.steps, "lr": given.lr, "rows": rows}


if __name__ == "__main__":
    main()
