"""Short real runs on this machine, from which `dure probe` takes what steps and meetings cost when all workers run.

    run                       gives
      `one-shot`              a worker's whole step: data, gradient, optimizer, loop; beside the other workers
      `averaging:period=8`    an all_reduce of the model
      `bsp`                   an all_reduce of a gradient that leaves during backward

A meeting ends when the slowest worker has arrived and the engine is done. The slowest worker's delay beyond the mean
follows from the spread of steps (`slowest`), and is no part of the meeting's own cost.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dure.planner.probe.measure import Figures
from dure.run.config import TrainConfig
from dure.runtime.launch.fork_server import ForkServer

PERIOD = 8
STEPS = 400
"""Steps of a run whose steps are short; of others, as many as take LONGEST seconds, but FEWEST at least."""

FEWEST, LONGEST = 40, 4.0
WARM = 8
"""Steps of a worker that are not counted."""

DRAWS = 20_000
TAIL = 0.99
"""Share of steps whose spread is described; longer steps count in the mean alone."""


@dataclass(frozen=True, slots=True)
class Steps:
    """A worker's steps, from the beginning of one to the beginning of the next: their mean and log-normal spread."""

    seconds: float
    sigma: float


def short_runs(job: str, data: Path | None, workers: int, step: float) -> Figures:
    """Seconds of `steps` beside others (of every worker), and of an `all_reduce` and a `gradient`'s sum (None alone).

    `step` is what a step takes about, in seconds.
    """
    steps = max(FEWEST, min(STEPS, round(LONGEST / step)))
    shared = {"job": job, "data": data, "workers": workers, "steps": steps, "on": "local"}
    found: Figures = {"all_reduce": None, "gradient": None}
    with ForkServer() as fork_server:
        found["steps"] = [_gaps(each) for each in _begun(shared | {"strategy": "one-shot"}, fork_server)]
        alone = described(found["steps"])
        for name, strategy, period in (("all_reduce", f"averaging:period={PERIOD}", PERIOD), ("gradient", "bsp", 1)):
            if workers == 1:
                break
            begun = _begun(shared | {"strategy": strategy}, fork_server)
            rounds = (len(begun[0]) - 1 - WARM) // period
            cycle = statistics.median((each[WARM + rounds * period] - each[WARM]) / rounds for each in begun)
            found[name] = max(cycle - slowest(alone, workers, period), 0.0)
    return found


def described(steps: Sequence[Sequence[float]]) -> Steps:
    """The mean of all workers' steps, and how their logarithms spread."""
    times = np.sort(np.concatenate([np.asarray(each) for each in steps]))
    usual = times[: max(1, math.ceil(TAIL * len(times)))]
    return Steps(float(times.mean()), float(np.log(usual).std()))


def slowest(steps: Steps, workers: int, period: int) -> float:
    """Mean seconds that the slowest of `workers` takes for `period` steps, by drawing."""
    rng = np.random.default_rng(0)
    draws = DRAWS // (workers * period) + 1
    factors = np.exp(steps.sigma * rng.standard_normal((draws, workers, period)) - steps.sigma**2 / 2)
    return steps.seconds * float(factors.sum(axis=2).max(axis=1).mean())


def _gaps(begun: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(begun[WARM:], begun[WARM + 1 :], strict=False)]


def _begun(options: Mapping[str, Any], fork_server: ForkServer) -> list[list[float]]:
    """When each worker of a real run began each of its steps, in seconds."""
    from dure.run.prebuilt import Prebuilt
    from dure.run.train import run

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run(
            TrainConfig.of({**options, "eval_every": 10**9, "trace": True, "out": out}),
            Prebuilt(fork_server=fork_server),
        )
        events = json.loads((out / "trace.json").read_text())["traceEvents"]
    begun: dict[int, list[float]] = {}
    for event in events:
        if event.get("ph") == "X" and event["name"] == "compute":
            begun.setdefault(event["pid"], []).append(event["ts"] / 1e6)
    return [sorted(each) for each in begun.values()]
