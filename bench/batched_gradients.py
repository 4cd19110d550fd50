"""Gradients of mnist-mlp (784-32-10, batches of 16) for many workers: dure against a loop over as many modules.

    python bench/batched_gradients.py [--workers 64] [--repeats 60] [--json FILE]

One thread, one process, alternating repeats, medians. The loop is plain PyTorch: per worker its own module,
`zero_grad(set_to_none=True)`, forward, `cross_entropy`, `backward`. Both get the same values and batches, drawn with
MNIST's shapes, and must agree before anything is timed. Everything is warmed up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _script import parse, ratio_of, told
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.models.mlp import mlp
from dure.job.replica import Replica

BATCH, HIDDEN = 16, 32
WARM_UP = 10


def make_replicas(workers: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [mlp(784, HIDDEN, 10) for _ in range(workers)]


def make_works(modules: list[nn.Module]) -> list[GradientWork]:
    generator = torch.Generator().manual_seed(1)
    return [
        GradientWork(
            rank=rank,
            step=0,
            values=torch.cat([each.detach().flatten() for each in module.parameters()]),
            inputs=torch.rand(BATCH, 1, 28, 28, generator=generator),
            targets=torch.randint(10, (BATCH,), generator=generator),
            seed=0,
            flops=1.0,
        )
        for rank, module in enumerate(modules)
    ]


def loop(modules: list[nn.Module], works: list[GradientWork]) -> list[float]:
    losses = []
    for module, work in zip(modules, works, strict=True):
        module.zero_grad(set_to_none=True)
        loss = cross_entropy(module(work.inputs), work.targets)
        loss.backward()
        losses.append(loss.item())
    return losses


def gradient_of(module: nn.Module) -> Tensor:
    return torch.cat([each.grad.flatten() for each in module.parameters()])


def seconds_of(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Per contestant the seconds of each repeat; they take turns."""
    warm_up = min(repeats, WARM_UP)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + warm_up):
        for name, run in contestants.items():
            started = time.perf_counter()
            run()
            if repeat >= warm_up:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def measure(workers: int, repeats: int) -> dict[str, Any]:
    modules = make_replicas(workers)
    works = make_works(modules)
    job = SimpleNamespace(model=lambda: mlp(784, HIDDEN, 10), loss=cross_entropy)
    gradient_engine, exact = GradientEngine(job), GradientEngine(job, exact=True)
    loop(modules, works)
    for module, gradient in zip(modules, gradient_engine.evaluate(works), strict=True):
        torch.testing.assert_close(gradient.values, gradient_of(module), rtol=1e-5, atol=1e-6)
    contestants = {
        "loop": lambda: loop(modules, works),
        "dure": lambda: gradient_engine.evaluate(works),
        "dure, exact": lambda: exact.evaluate(works),
    }
    seconds = seconds_of(contestants, repeats)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "workers": workers,
        "ratios": [
            ratio_of(f"{name}, {workers} workers", "a loop over modules", each, seconds["loop"])
            for name, each in seconds.items()
            if name != "loop"
        ],
        "gradients_per_second": {name: round(workers / median) for name, median in medians.items()},
        "ratio_to_loop": {name: round(medians["loop"] / median, 2) for name, median in medians.items()},
        "parameters": Replica(modules[0]).numel,
        "batch": BATCH,
        "rule": gradient_engine.rule,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[64])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parse(parser, repeats=5)
    torch.set_num_threads(1)
    with told("batched_gradients", given) as facts:
        results = [measure(workers, given.repeats) for workers in given.workers]
        print(f"{'workers':>8}  {'how':<12}  {'gradients/s':>11}  {'to the loop':>11}")
        for result in results:
            for name, rate in result["gradients_per_second"].items():
                print(f"{result['workers']:>8}  {name:<12}  {rate:>11,}  {result['ratio_to_loop'][name]:>10.2f}x")
        facts |= {"repeats": given.repeats, "ratios": [row for result in results for row in result.pop("ratios")]}
        facts["rows"] = results


if __name__ == "__main__":
    main()
