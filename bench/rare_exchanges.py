"""How fast replicas learn that exchange rarely: the samples that a plan assumes, against runs with real gradients.

    python bench/rare_exchanges.py [--jobs digits-mlp,mnist-mlp,mnist-cnn] [--rows runs/rare.jsonl] [--table]

Runs are in virtual time: K workers with equal steps of 10 ms, until the delivered model reaches a loss of the test set.
Each strategy runs at several multiples of the job's learning rate, and so does one machine; the best rate of each
counts. The measured gain is the steps of one machine over those of each of K workers. The rule (`planner/ranking.py`)
predicts it from the gain of bsp on as many workers, and from E, the exchanges in the steps of one machine.

RARE and PAIR were fitted to averaging and ad-psgd of the two perceptrons on 2 and 4 workers, BITS to averaging of
mnist-mlp on 4 workers (`fitted`). All other rows check them.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from _script import parse, told

from dure.core.target import Target
from dure.errors import DureError
from dure.job.job import load_job
from dure.partition.memory import MemoryUse
from dure.planner.candidates import Scene
from dure.planner.learning import crossed, run_until
from dure.planner.ranking import assumed_factor
from dure.planner.timing import Timing, config_of, timed
from dure.run.config import TrainConfig
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

STEP, FAST, ADAMW = 0.01, 1000.0, 0.001
"""Seconds of a step, Mbit/s where the link does not matter, and the rate of DiLoCo's AdamW."""

EVALUATIONS = 50
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A job, the loss to reach within so many steps of each worker, and multiples of its learning rate."""

    batch: int
    loss: float
    steps: int
    rates: tuple[float, ...]
    samples: int = 2000
    workers: tuple[int, ...] = (2, 4, 8)


CASES = {
    "digits-mlp": Case(32, 0.1, 400, (4, 8, 16)),
    "mnist-mlp": Case(32, 0.2, 1200, (2, 4, 8, 16)),
    "mnist-cnn": Case(16, 0.35, 500, (2, 4, 8), samples=500, workers=(2, 4)),
}
LINKS = (10.0, 3.0, 1.0, 0.3, 0.1)
PERIODS = (4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Point:
    """A strategy on so many workers, behind links of so many Mbit/s."""

    job: str
    workers: int
    strategy: str
    mbit: float = FAST


NAMES = [field.name for field in fields(Point)]


def points(job: str, case: Case) -> Iterator[Point]:
    """The runs to measure: one machine first, then the strategies on each number of workers."""
    yield Point(job, 1, "bsp")
    for workers in case.workers:
        yield Point(job, workers, "bsp")
        yield from (Point(job, workers, f"averaging:period={period}") for period in PERIODS)
        yield from (Point(job, workers, "ad-psgd", mbit) for mbit in LINKS)
        yield from (Point(job, workers, f"bmuf:period={period}") for period in PERIODS[1:4])
        yield from (Point(job, workers, f"easgd:period={period} ps") for period in (8, 64, 256))
        for codec in ("1bit", "int8", "top-k"):
            yield Point(job, workers, f"bsp {codec}")
            yield from (Point(job, workers, f"averaging:period={period} {codec}") for period in PERIODS[:3])
        yield from (Point(job, workers, f"diloco:period={period}") for period in (10, 30, 100))
        yield from (Point(job, workers, f"diloco:period={period} 1bit") for period in (10, 30, 100))
        yield from (Point(job, workers, f"diloco:period=100 {codec}") for codec in ("int8", "top-k"))
        yield Point(job, workers, "bmuf:period=16 1bit")
        yield from (Point(job, workers, "downpour ps", mbit) for mbit in LINKS[::2])


def rates_of(point: Point, case: Case) -> Sequence[float]:
    """The rates of a strategy: lower ones too where momentum, or one update for each gradient, asks for them.

    Those of DiLoCo are multiples of the rate of its AdamW.
    """
    if point.strategy.startswith("diloco"):
        return (1, 3, 10)
    lower = point.strategy.startswith(("bmuf", "downpour"))
    return (case.rates[0] / 4, case.rates[0] / 2, *case.rates) if lower else case.rates


def scene_of(point: Point, case: Case) -> Scene:
    """The workers of a point."""
    job = replace(load_job(point.job), batch_size=case.batch)
    machines = Machines(count=point.workers, compute=Constant(seconds=STEP))
    cluster = Cluster(machines=(machines,), link=Link(bandwidth=point.mbit * 125e3, latency=1e-3))
    return Scene(job, cluster, point.workers * case.batch)


def measured(point: Point, case: Case, rate: float, seed: int) -> Row:
    """The steps of each worker to the loss; None: not reached."""
    scene, target = scene_of(point, case), Target(case.loss, "loss")
    one = ADAMW if point.strategy.startswith("diloco") else scene.job.optimizer.lr
    options = config_of(scene, point.strategy).plain() | {"lr": rate * one, "seed": seed}
    options |= {"steps": case.steps, "eval_every": max(1, case.steps // EVALUATIONS), "eval_samples": case.samples}
    row: Row = asdict(point) | {"rate": rate, "seed": seed, "steps": None}
    try:
        history = run_until(target, TrainConfig.of(options), scene)
    except DureError:
        return row
    samples = crossed([each | {"seconds": each["samples"]} for each in history], target)
    if samples is not None:
        row["steps"] = samples / point.workers / case.batch
    return row


class Result(NamedTuple):
    """The gain over one machine, measured and predicted, with `exchanges` in the steps of one machine."""

    point: Point
    exchanges: float
    measured: float | None
    predicted: float

    @property
    def error(self) -> float:
        return math.inf if self.measured is None else self.predicted / self.measured - 1

    @property
    def fitted(self) -> bool:
        """Whether a constant was fitted to this row."""
        if self.point.job == "mnist-mlp" and self.point.workers == 4 and self.point.strategy.endswith("1bit"):
            return self.point.strategy.startswith("averaging")
        perceptron = self.point.job in ("digits-mlp", "mnist-mlp") and self.point.workers in (2, 4)
        return perceptron and " " not in self.point.strategy and self.point.strategy.startswith(("averaging", "ad-"))


def best(rows: Sequence[Row]) -> dict[Point, float | None]:
    """The least steps of each point over its rates, means over seeds; None if no rate reaches the loss."""
    found: dict[Point, dict[float, list[float | None]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        found[Point(*(row[name] for name in NAMES))][row["rate"]].append(row["steps"])
    return {
        point: min((statistics.mean(map(float, at)) for at in by_rate.values() if None not in at), default=None)  # type: ignore[arg-type]
        for point, by_rate in found.items()
    }


def results(rows: Sequence[Row]) -> Iterator[Result]:
    """The gains of all strategies but bsp, and the rule's."""
    found = best(rows)
    for point, steps in found.items():
        one, bsp = found.get(Point(point.job, 1, "bsp")), found.get(Point(point.job, point.workers, "bsp"))
        if point.strategy == "bsp" or one is None or bsp is None:
            continue
        in_step = exchanges_in_step(point)
        gain = None if steps is None else one / steps
        yield Result(point, one * in_step, gain, _rule(point, one, one / bsp, in_step))


def exchanges_in_step(point: Point) -> float:
    """The exchanges of a worker in each of its steps; in gossip counted in a run without values."""
    if point.strategy == "ad-psgd":
        return timed(scene_of(point, CASES[point.job]), point.strategy).exchanges
    return 1 / getattr(Strategy.parse(point.strategy).sync, "period", 1)


def _rule(point: Point, one: float, gain: float, in_step: float) -> float:
    """The gain by the rule of a plan, for as many replicas as synchronous SGD has a `gain`."""
    staleness = point.workers - 1.0 if point.strategy.startswith("downpour") else 0.0
    memory, copies = MemoryUse(0, 0, 0, 0, 0), cast("int", gain)
    timing = Timing(STEP, 1.0, 0.0, staleness, {}, memory, 1, copies, point.workers, 0, exchanges=in_step)
    return gain / assumed_factor(Strategy.parse(point.strategy), timing, point.workers, max(1, round(one)))


def table(found: Sequence[Result]) -> Iterator[str]:
    yield "| job | workers | strategy | Mbit/s | exchanges | gain measured | gain by the rule | fitted |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in found:
        mbit = "" if each.point.mbit == FAST else f"{each.point.mbit:g}"
        value = "not reached" if each.measured is None else f"{each.measured:.2f}"
        what = f"| {each.point.job} | {each.point.workers} | `{each.point.strategy}` | {mbit} | {each.exchanges:.1f}"
        yield f"{what} | {value} | {each.predicted:.2f} | {'yes' if each.fitted else ''} |"


def judged(name: str, found: Sequence[Result]) -> str:
    errors = sorted(abs(each.error) for each in found if each.measured is not None)
    if not errors:
        return f"{name}: none."
    ninth = errors[math.ceil(0.9 * len(errors)) - 1]
    missed = sum(each.measured is None for each in found)
    said = f"{name}: {len(errors)} rows, median error {statistics.median(errors):.0%}, 90th percentile {ninth:.0%}"
    return f"{said}; {missed} did not reach the loss."


def judgements(found: Sequence[Result]) -> Iterator[str]:
    rest = [each for each in found if not each.fitted]
    yield judged("Fitted", [each for each in found if each.fitted])
    yield judged("Perceptrons on 8 workers", [each for each in rest if each.point.workers == 8])
    yield judged("mnist-cnn", [each for each in rest if each.point.job == "mnist-cnn"])
    for start in ("bmuf", "diloco", "easgd", "downpour", "averaging"):
        named = [each for each in rest if each.point.strategy.startswith(start)]
        if start == "averaging":
            named, start = [each for each in named if " " in each.point.strategy], "averaging with a codec"
        yield judged(start, named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", default=",".join(CASES))
    parser.add_argument("--rows", type=Path, default=Path("runs/rare.jsonl"), help="file of the kept runs")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--limit", type=int, default=10**9, help="runs at most")
    parser.add_argument("--json", type=Path)
    given = parse(parser, jobs="digits-mlp", rows=Path("runs/rare-smoke.jsonl"), limit=12)
    given.rows.parent.mkdir(parents=True, exist_ok=True)
    given.rows.touch()
    rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    known = {(*(row[name] for name in NAMES), row["rate"], row["seed"]) for row in rows}
    jobs = given.jobs.split(",")
    wanted = [
        (point, rate, seed)
        for job in jobs
        for point in points(job, CASES[job])
        for rate in rates_of(point, CASES[job])
        for seed in range(given.seeds)
        if (*astuple(point), rate, seed) not in known
    ]
    with told("rare_exchanges", given) as facts, given.rows.open("a", encoding="utf-8") as file:
        for point, rate, seed in () if given.table else wanted[: given.limit]:
            rows.append(measured(point, CASES[point.job], rate, seed))
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
        found = [each for each in results(rows) if each.point.job in jobs]
        print(*table(found), "", *judgements(found), sep="\n")
        facts["rows"] = [asdict(each.point) | {"measured": each.measured, "rule": each.predicted} for each in found]


if __name__ == "__main__":
    main()
