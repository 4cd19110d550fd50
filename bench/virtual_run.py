"""Gradients per second of whole virtual runs, against a sequential PyTorch loop over as many replicas.

    python bench/virtual_run.py [--workers 64] [--steps 150] [--repeats 5] [--strategy "ssp:bound=3 ps" ...]

One thread, one process, alternating repeats, medians. The model is mnist-mlp (784-32-10, batches of 16), the data are
drawn with MNIST's shapes, compute times are log-normal (sigma 0.3). A run does everything: data, gradients, server or
collective, optimizer, network, admission, counters; it is evaluated once, at its end. The loop has one module per
worker and only makes gradients: per worker it picks a batch from the same data, `zero_grad(set_to_none=True)`,
forward, `cross_entropy`, `backward`; nobody steps. "ready" is the same loop over batches that lie ready.

`work_share` is the part of a run's CPU seconds that is spent on drawing data, computing gradients and applying updates:
the rest is the cost of simulating. It comes from one more run of each strategy, whose calls of these are timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from _script import parse, print_ratios, ratio_of, told
from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import Data
from dure.job.gradient import JobSource
from dure.job.gradient_engine import GradientEngine
from dure.job.job import Job
from dure.job.models.mlp import mlp_maker, top1
from dure.job.optimizer import FlatOptimizer, OptimizerSpec
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import LogNormal

BATCH, HIDDEN, SAMPLES = 16, 32, 6000
STRATEGIES = ("ssp:bound=3 ps:shards=1", "downpour ps:shards=1", "bsp ps:shards=1", "bsp", "averaging:period=8")


def make_job() -> Job:
    """mnist-mlp on data that are no digits."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(SAMPLES, 1, 28, 28, generator=generator)
    targets = torch.randint(10, (SAMPLES,), generator=generator)
    return Job(
        name="mnist-shaped",
        model=mlp_maker(784, HIDDEN, 10),
        loss=cross_entropy,
        train=Data(inputs, targets),
        test=Data(inputs[:100], targets[:100]),
        batch_size=BATCH,
        optimizer=OptimizerSpec(lr=1e-4),
        steps=1,
        accuracy=top1,
    )


def make_run(job: Job, strategy: str, workers: int, steps: int) -> Callable[[], None]:
    """A whole run, ready to be made."""
    cluster = Cluster.uniform(workers, compute=LogNormal(seconds=0.02, sigma=0.3))
    config = TrainConfig(
        job=job.name, strategy=strategy, on="virtual", workers=workers, steps=steps, eval_every=steps, batch_size=BATCH
    )
    setup, _ = resolve(config, Prebuilt(job=job, cluster=cluster))
    setup.prepare()

    def run() -> None:
        VirtualRun(setup, cluster, Callbacks()).run()

    return run


def make_loop(job: Job, workers: int, steps: int, *, ready: bool) -> Callable[[], None]:
    """`steps` gradients of each of `workers` modules, in turn."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [job.model() for _ in range(workers)]
    inputs, targets = job.train.inputs, job.train.targets
    order = torch.randperm(SAMPLES)
    picks = [order[(i * BATCH) % (SAMPLES - BATCH) :][:BATCH] for i in range(workers * steps)]
    batches = [(inputs[pick], targets[pick]) for pick in picks[:workers]]

    def loop() -> None:
        for step in range(steps):
            for rank, module in enumerate(modules):
                pick = picks[step * workers + rank]
                x, y = batches[rank] if ready else (inputs[pick], targets[pick])
                module.zero_grad(set_to_none=True)
                loss = cross_entropy(module(x), y)
                loss.backward()
                loss.item()

    return loop


def seconds_of(contestants: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Per contestant the CPU seconds of each repeat; they take turns, and the first turn does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, action in contestants.items():
            started = time.process_time()
            action()
            if repeat:
                seconds[name].append(time.process_time() - started)
    return seconds


WORK = ((JobSource, "next"), (GradientEngine, "evaluate"), (GradientEngine, "one"), (FlatOptimizer, "apply"))
"""The calls that draw data, compute gradients and apply updates."""


def work_share(run: Callable[[], None]) -> float:
    """The part of a run's CPU seconds that its calls of `WORK` take."""
    spent, depth = 0.0, 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal spent, depth
            depth += 1
            started = time.process_time()
            result = function(*arguments, **named)
            depth -= 1
            if not depth:  # `one` can call `evaluate`
                spent += time.process_time() - started
            return result

        return call

    plain = [getattr(owner, name) for owner, name in WORK]
    try:
        for (owner, name), function in zip(WORK, plain, strict=True):
            setattr(owner, name, timed(function))
        started = time.process_time()
        run()
        return spent / (time.process_time() - started)
    finally:
        for (owner, name), function in zip(WORK, plain, strict=True):
            setattr(owner, name, function)


def measure(strategies: Sequence[str], workers: int, steps: int, repeats: int) -> dict[str, Any]:
    job = make_job()
    contestants = {strategy: make_run(job, strategy, workers, steps) for strategy in strategies}
    contestants["loop"] = make_loop(job, workers, steps, ready=False)
    contestants["loop, ready"] = make_loop(job, workers, steps, ready=True)
    seconds = seconds_of(contestants, repeats)

    def ratio(name: str, loop: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[loop], seconds[name], strict=True)), 2)

    return {
        "workers": workers,
        "steps": steps,
        "repeats": repeats,
        "gradients_per_cpu_second": {
            name: round(workers * steps / statistics.median(each)) for name, each in seconds.items()
        },
        "ratio_to_loop": {name: ratio(name, "loop") for name in strategies},
        "work_share": {name: round(work_share(contestants[name]), 2) for name in strategies},
        "ratio_to_loop_ready": {name: ratio(name, "loop, ready") for name in strategies},
        "ratios": [
            ratio_of(f"virtual run, {name}, {workers} workers", "a loop over modules", seconds[name], seconds["loop"])
            for name in strategies
        ],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--json", type=Path)
    given = parse(parser, workers=4, steps=4, repeats=2, strategy=["ssp:bound=3 ps:shards=1", "bsp"])
    torch.set_num_threads(1)
    with told("virtual_run", given) as facts:
        facts |= measure(given.strategy or STRATEGIES, given.workers, given.steps, given.repeats)
        for name, gradients in facts["gradients_per_cpu_second"].items():
            print(f"{name:>24} {gradients:10,} gradients a second")
        print_ratios(facts["ratios"])


if __name__ == "__main__":
    main()
