"""How well virtual time predicts a run on one machine: time to a target and time per step, predicted against measured.

    python bench/one_machine.py                         measure the missing rows, then print the table
    python bench/one_machine.py --only ssp --jobs mnist-mlp
    python bench/one_machine.py --stage real            one stage of "real", "virtual", "table"

`dure probe JOB --workers 2` measures this machine and writes a cluster file per job. Each method then trains with two
workers for real (`--on local`) and in virtual time (on that file), with SEEDS seeds each. Every run is a row of
`--rows`, which is kept: a call that is interrupted continues where it stopped. The options of a method, its number of
steps and its target are those of `METHODS`.

The data is MNIST's: `DURE_DATA` names a folder with the published files; without it they are downloaded to the user's
cache on first use. Leave the machine idle.

Time to the target is interpolated between the two evaluations around it. Evaluation itself runs in the launcher's
process at the lowest priority, and its seconds are part of neither time: a row carries the time at which the model
existed. Time per step is the seconds of the run over its steps. It does not depend on where the accuracy crosses the
target, so its error is the error of the model of time; the rest of the error of the time to the target is statistics.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _script import parse, told

from dure.job.job import load_job
from dure.planner.probe.probe import probe
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.train import run
from dure.runtime.launch.fork_server import ForkServer

WORKERS, SEEDS = 2, 3
STAGES = ("real", "virtual", "table")

Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A strategy, its steps for each job, and its options of a run."""

    strategy: str
    steps: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Goal:
    """The test accuracy whose time is compared; evaluations come every `every` steps."""

    target: float
    every: int


GOALS = {"mnist-mlp": Goal(0.93, 25), "mnist-cnn": Goal(0.80, 5)}
REHEARSED = {"digits-mlp": Goal(0.2, 2)}
"""The job of `--smoke`."""
REHEARSED_STEPS = 10


def _steps(mlp: int, cnn: int) -> dict[str, int]:
    return {"mnist-mlp": mlp, "mnist-cnn": cnn}


METHODS = {
    "bsp": Method("bsp", _steps(700, 100), {"lr": 0.1}),
    "bsp ps": Method("bsp ps", _steps(700, 100), {"lr": 0.1}),
    "averaging": Method("averaging:period=8", _steps(700, 100), {"lr": 0.1}),
    "bmuf": Method("bmuf:period=8", _steps(900, 100), {"lr": 0.1}),
    "easgd": Method("easgd:period=8", _steps(700, 100), {"lr": 0.1}),
    "ssp": Method("ssp:bound=3", _steps(700, 100), {"lr": 0.05}),
    "downpour": Method("downpour", _steps(700, 100), {"lr": 0.05}),
    "ad-psgd": Method("ad-psgd", _steps(700, 100), {"lr": 0.1}),
    "hogwild": Method("hogwild", _steps(700, 100), {"lr": 0.05}),
    "k-async": Method("k-async:k=2", _steps(700, 100), {"lr": 0.1}),
    "k-sync": Method("k-sync:k=1", _steps(900, 100), {"lr": 0.1}),
    "diloco": Method("diloco:period=8", _steps(900, 100)),
    "gpipe": Method("bsp gpipe:stages=2,micro=4", _steps(900, 100), {"lr": 0.1}),
    "1f1b": Method("bsp 1f1b:stages=2,micro=4", _steps(900, 100), {"lr": 0.1}),
    "pipedream": Method("bsp pipedream:stages=2", _steps(900, 100), {"lr": 0.1}),
}


def crossed(history: Iterable[Mapping[str, Any]], target: float) -> float | None:
    """Seconds at which the accuracy crosses `target`, on the line between two evaluations; None if it never does."""
    before: Mapping[str, Any] | None = None
    for row in history:
        if row["accuracy"] >= target:
            if before is None:
                return float(row["seconds"])
            share = (target - before["accuracy"]) / (row["accuracy"] - before["accuracy"])
            return float(before["seconds"] + share * (row["seconds"] - before["seconds"]))
        before = row
    return None


def trained(job: str, method: Method, seed: int, on: str, fork_server: ForkServer | None) -> Row:
    """One run: its seconds to the target, and per step."""
    goal, steps = (GOALS | REHEARSED)[job], method.steps.get(job, REHEARSED_STEPS)
    options = {"job": job, "strategy": method.strategy, "on": on, "workers": WORKERS, "steps": steps, "seed": seed}
    made = run(
        TrainConfig.of({**options, "eval_every": goal.every, **method.options}), Prebuilt(fork_server=fork_server)
    )
    figures = made.summary()
    return {
        "to_target": crossed(made.history, goal.target),
        "history": [[row["step"], row["seconds"], row["accuracy"]] for row in made.history],
        "ms_per_step": 1e3 * figures["seconds"] / steps,
        "seconds": figures["seconds"],
        "accuracy": figures["best_accuracy"],
    }


def probed(job: str, seed: int, folder: Path) -> str:
    """The cluster file of `job` on this machine, written on the first call for this `seed`."""
    path = folder / f"one_machine.{job}.{seed}.yaml"
    if not path.exists():
        found = probe(load_job(job), workers=WORKERS, name=job)
        assert found is not None
        path.write_text(found.pop("cluster").to_yaml(), encoding="utf-8")
        path.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
    return str(path)


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fill(given: argparse.Namespace, place: str) -> None:
    """Make the runs of `place` that have no row. Each seed has a probe of its own, just before its real runs."""
    with ForkServer() if place == "real" else nullcontext() as fork_server:
        for seed, job in product(range(given.seeds), given.jobs):
            file = probed(job, seed, given.rows.parent)
            for name in given.only:
                key = {"place": place, "job": job, "method": name, "seed": seed}
                if any(key.items() <= row.items() for row in read(given.rows)):
                    continue
                row = key | trained(job, METHODS[name], seed, file if place == "virtual" else "local", fork_server)
                print(json.dumps({**row, "history": len(row["history"])}), flush=True)
                with given.rows.open("a") as rows:
                    rows.write(json.dumps(row) + "\n")


def summed(rows: Sequence[Row], figure: str) -> tuple[float, float] | None:
    """The median of `figure` over seeds, and the spread: half of the range over the median."""
    values = [row[figure] for row in rows if row[figure] is not None]
    if len(values) <= len(rows) / 2:
        return None
    middle = statistics.median(values)
    return middle, (max(values) - min(values)) / 2 / middle


def cells(real: Sequence[Row], virtual: Sequence[Row], figure: str, digits: str) -> str:
    measured, predicted = summed(real, figure), summed(virtual, figure)
    if measured is None or predicted is None:
        return "- | - | -"
    shown = [f"{value:{digits}} ±{spread:.0%}" for value, spread in (measured, predicted)]
    return f"{shown[0]} | {shown[1]} | {predicted[0] / measured[0]:.2f}"


def table(rows: Sequence[Row], jobs: Sequence[str], names: Sequence[str]) -> str:
    """In Markdown: real, virtual and virtual / real, for the time to the target and the time per step."""
    lines = []
    for job in jobs:
        head = f"`{job}` | seconds to {(GOALS | REHEARSED)[job].target:.0%}, real | virtual | ratio"
        lines += [f"| {head} | ms per step, real | virtual | ratio |", "|---|" + "---:|" * 6]
        for name in names:
            real, virtual = (
                [row for row in rows if (row["place"], row["job"], row["method"]) == (place, job, name)]
                for place in ("real", "virtual")
            )
            if real and virtual:
                parts = [cells(real, virtual, "to_target", ".3g"), cells(real, virtual, "ms_per_step", ".3g")]
                lines.append(f"| `{METHODS[name].strategy}` | {' | '.join(parts)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--jobs", nargs="*", choices=GOALS | REHEARSED, default=list(GOALS))
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--rows", type=Path, default=Path("one_machine.jsonl"))
    parser.add_argument("--json", type=Path)
    rows = Path("runs/one-machine-smoke/rows.jsonl")
    given = parse(parser, only=["bsp"], jobs=[*REHEARSED], seeds=1, rows=rows)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    if given.smoke:
        given.rows.unlink(missing_ok=True)
    torch.set_num_threads(1)
    for place in ("real", "virtual"):
        if place in given.stage:
            fill(given, place)
    if "table" in given.stage:
        with told("one_machine", given) as facts:
            print(table(read(given.rows), given.jobs, given.only))
            facts["rows"] = [{**row, "history": len(row["history"])} for row in read(given.rows)]


if __name__ == "__main__":
    main()
