"""Gradients of sixteen virtual workers by vmap against one at a time, on one device (check 16).

python bench/gpu/virtual_workers.py [--workers 16] [--pairs 15] [--json FILE]
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from _check import Finding, Setting, exact_arithmetic, in_pairs, main, target
from torch.nn.functional import cross_entropy

from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.models.mlp import mlp

WORKERS, FASTER = 16, 4.0
BATCH, WIDTH = 32, 128


def model() -> torch.nn.Module:
    return mlp(784, WIDTH, 10)


def virtual_workers(setting: Setting) -> Iterator[Finding]:
    exact_arithmetic()
    device = target.of_rank(0)
    job = SimpleNamespace(model=model, loss=cross_entropy)
    together = GradientEngine(job, device=device)
    alone = GradientEngine(job, exact=True, device=device)
    works = make_works(together, device)
    for one, other in zip(
        together.evaluate(works), [each.values.clone() for each in alone.evaluate(works)], strict=True
    ):
        torch.testing.assert_close(one.values, other, rtol=1e-4, atol=1e-5)
    ratio = in_pairs(lambda: alone.evaluate(works), lambda: together.evaluate(works), setting)
    what = f"seconds of {WORKERS} gradients one at a time over those by vmap"
    yield Finding(what, str(ratio), f"at least {FASTER:g}", ratio.median >= FASTER)


def make_works(engine: GradientEngine, device: str) -> list[GradientWork]:
    draw = torch.Generator().manual_seed(1)
    numel = engine.replica.numel
    return [
        GradientWork(
            rank=rank,
            step=0,
            values=(0.05 * torch.randn(numel, generator=draw)).to(device),
            inputs=torch.rand(BATCH, 1, 28, 28, generator=draw).to(device),
            targets=torch.randint(10, (BATCH,), generator=draw).to(device),
            seed=0,
            flops=1.0,
        )
        for rank in range(WORKERS)
    ]


CHECKS = {16: virtual_workers}

if __name__ == "__main__":
    main(__doc__, CHECKS)
