"""What a threshold costs and saves: `strom` on `mnist-mlp`, bytes and accuracy.

    python bench/strom_tradeoff.py [--seeds 3] [--steps 1000] [--lr 0.1] [--report FILE.html] [--json FILE]

`bsp` over collectives, 4 workers with mini-batches of 8, in virtual time: seconds play no part here, gradients and
messages are real. Accuracy is the mean over seeds, at the end; bytes are those that a worker sends in a step.
`--report` draws accuracy over bytes of the first seed's runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import dure
from dure.report import Run, write_report

THRESHOLDS = (30.0, 10.0, 3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003)
CODECS = ("fp32", *(f"strom:threshold={threshold:g}" for threshold in THRESHOLDS))
WORKERS = 4


def trained(codec: str, *, seed: int, steps: int, lr: float) -> Run:
    return dure.train(
        "mnist-mlp",
        strategy=f"bsp collective {codec}",
        on="virtual",
        workers=WORKERS,
        batch_size=8,
        steps=steps,
        lr=lr,
        seed=seed,
    )


def row_of(run: Run, codec: str, seed: int, steps: int) -> dict[str, Any]:
    """Bytes are a worker's in a step."""
    figures = run.summary()
    nbytes = figures["bytes_sent"] / WORKERS / steps
    return {"codec": codec, "seed": seed, "accuracy": figures["accuracy"], "loss": figures["loss"], "bytes": nbytes}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """In Markdown, one line per codec."""
    lines = ["| codec | accuracy, % | seeds, % | bytes per step | fp32's over these |", "|---|---:|---|---:|---:|"]
    dense = statistics.mean(row["bytes"] for row in rows if row["codec"] == "fp32")
    for codec in CODECS:
        mine = [row for row in rows if row["codec"] == codec]
        mean, nbytes = (statistics.mean(row[name] for row in mine) for name in ("accuracy", "bytes"))
        seeds = ", ".join(f"{100 * row['accuracy']:.1f}" for row in mine)
        lines.append(f"| `{codec}` | {100 * mean:.2f} | {seeds} | {nbytes:,.0f} | {dense / nbytes:,.1f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--report", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows, first = [], []
    for seed in range(given.seeds):
        for codec in CODECS:
            run = trained(codec, seed=seed, steps=given.steps, lr=given.lr)
            rows.append(row_of(run, codec, seed, given.steps))
            first += [run] if seed == 0 else []
            print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if given.report is not None:
        write_report(given.report, first, title="Strom: threshold against bytes and accuracy")
    if given.json is not None:
        given.json.write_text(json.dumps({"steps": given.steps, "lr": given.lr, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
