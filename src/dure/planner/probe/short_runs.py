"""Short real runs on this machine: `dure probe` measures the cost of steps and all_reduces while all workers run.

    run                       measures
      `one-shot`              a worker's whole step (data, gradient, optimizer, loop) while the other workers run
      `averaging:period=8`    an all_reduce of the model
      `bsp`                   an all_reduce of a gradient that is sent during backward

An all_reduce ends when the slowest worker has arrived and the engine is done. The slowest worker's delay beyond the
mean follows from the spread of steps (`slowest`), and is not part of the cost of the all_reduce. The cycles of the
second run are compared with its own steps without an all_reduce: the speed of a machine can change between two runs.

`StandIn` is a model that sleeps instead of computing, for measurements of the network alone. Forward sleeps a third of
the seconds. Backward sleeps the rest, distributed over the layers by their size: the last layer's gradient is complete
first, as in a real backward pass. Gradients are constant.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.planner.probe.measure import Figures
from dure.run.config import TrainConfig
from dure.runtime.launch.fork_server import ForkServer

PERIOD = 8
STEPS = 400
"""Steps of a run with short steps. A run with longer steps has as many as take LONGEST seconds, at least FEWEST."""

FEWEST, LONGEST = 40, 4.0
WARM = 8
"""Steps of warm-up of each worker; they are not counted."""

DRAWS = 20_000
SLOW = 1.25
"""Mean step of a straggler, as a multiple of the median worker's, at least."""

TAIL = 0.99
"""Share of steps that determine the spread; the longest steps count only in the mean."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Mean and log-normal spread of a worker's steps, from the beginning of one to the beginning of the next."""

    seconds: float
    sigma: float


def short_runs(job: str, data: Path | None, workers: int, step: float) -> Figures:
    """Measure seconds of each worker's `steps`, of an `all_reduce`, and of the all_reduce of a `gradient`.

    The last two are None for one worker. `step` is an estimate of a step in seconds.
    """
    steps = max(FEWEST, min(STEPS, round(LONGEST / step)))
    shared = {"job": job, "data": data, "workers": workers, "steps": steps, "on": "local"}
    found: Figures = {"all_reduce": None, "gradient": None}
    with ForkServer() as fork_server:
        found["steps"] = [_gaps(each) for each in _begun(shared | {"strategy": "one-shot"}, fork_server)]
        if workers > 1:
            begun = _begun(shared | {"strategy": f"averaging:period={PERIOD}"}, fork_server)
            plain = [_plain_gaps(each) for each in begun]
            found["all_reduce"] = _beyond(begun, described(plain), PERIOD)
            begun = _begun(shared | {"strategy": "bsp"}, fork_server)
            found["gradient"] = _beyond(begun, described([*found["steps"], *plain]), 1)
    return found


def _beyond(begun: Sequence[Sequence[float]], steps: Steps, period: int) -> float:
    """Mean seconds of a period beyond those that its slowest worker computes."""
    rounds = (len(begun[0]) - 1 - WARM) // period
    cycle = statistics.median((each[WARM + rounds * period] - each[WARM]) / rounds for each in begun)
    return max(cycle - slowest(steps, len(begun), period), 0.0)


def described(steps: Sequence[Sequence[float]]) -> Steps:
    """Mean of all workers' steps, and the standard deviation of their logarithms."""
    times = np.sort(np.concatenate([np.asarray(each) for each in steps]))
    usual = times[: max(1, math.ceil(TAIL * len(times)))]
    return Steps(float(times.mean()), float(np.log(usual).std()))


def slow_among(seconds: Sequence[float]) -> dict[int, float]:
    """The places of `seconds` that are SLOW times the median or more, with their factors, the slowest first.

    Of an even number, the median is the lower of the two in the middle: one of two workers can be slow.

    >>> slow_among([0.1, 0.1, 0.25, 0.11])
    {2: 2.5}
    """
    usual = statistics.median_low(seconds)
    factors = {place: each / usual for place, each in enumerate(seconds) if each >= SLOW * usual}
    return dict(sorted(factors.items(), key=lambda pair: -pair[1]))


def slowest(steps: Steps, workers: int, period: int) -> float:
    """Mean seconds that the slowest of `workers` takes for `period` steps, estimated from random draws."""
    rng = np.random.default_rng(0)
    draws = DRAWS // (workers * period) + 1
    factors = np.exp(steps.sigma * rng.standard_normal((draws, workers, period)) - steps.sigma**2 / 2)
    return steps.seconds * float(factors.sum(axis=2).max(axis=1).mean())


def _gaps(begun: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in zip(begun[WARM:], begun[WARM + 1 :], strict=False)]


def _plain_gaps(begun: Sequence[float]) -> list[float]:
    """The steps of a run of averages without those that end in an all_reduce: of the same minutes as its cycles."""
    return [gap for number, gap in enumerate(_gaps(begun), start=WARM + 1) if number % PERIOD]


def _begun(options: Mapping[str, Any], fork_server: ForkServer) -> list[list[float]]:
    """Start a real run, and return the times, in seconds, at which each worker began its steps."""
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


SLOPE = 1e-3


def synthetic_job(layers: Sequence[int], seconds: float) -> Job:
    """A job whose model has a layer for each number of parameters in `layers`, and whose steps take `seconds`."""
    return Job(
        model=lambda: StandIn(layers, seconds),
        loss=lambda outputs, targets: outputs,
        train=Data(torch.zeros(64, 1), torch.zeros(64)),
        test=Data(torch.zeros(1, 1), torch.zeros(1)),
        batch_size=1,
        optimizer=OptimizerSpec(lr=1e-3),
        split="whole",
        name="stand-in",
    )


def job_file(layers: Sequence[int], seconds: float) -> str:
    """The text of a job file whose function `job` returns `synthetic_job(layers, seconds)`."""
    head = "from dure.planner.probe.short_runs import synthetic_job"
    return f"{head}\n\n\ndef job():\n    return synthetic_job({[*layers]}, {seconds})\n"


class StandIn(nn.Module):
    """A layer for each number of parameters in `layers`; forward and backward together take `seconds`."""

    def __init__(self, layers: Sequence[int], seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in layers)

    def forward(self, inputs: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return inputs.mean()  # evaluations take no time
        time.sleep(self.seconds / 3)
        total = sum(layer.numel() for layer in self.layers)
        carried = inputs.mean()
        for layer in self.layers:
            seconds = self.seconds * 2 / 3 * layer.numel() / total
            carried = _Layer.apply(carried, layer, seconds)  # type: ignore[no-untyped-call]
        return carried


class _Layer(torch.autograd.Function):
    """The identity; its backward pass takes `seconds`."""

    @staticmethod
    def forward(ctx: Any, carried: Tensor, layer: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.shape = seconds, layer.shape
        return carried.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], torch.full(ctx.shape, SLOPE), None
