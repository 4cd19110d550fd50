"""A job with parameter groups and a schedule, and the same training in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import called
from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

KINDS = {
    "sgd": OptimizerSpec("sgd", lr=0.2),
    "momentum": OptimizerSpec("momentum", lr=0.1, momentum=0.8, weight_decay=0.01),
    "adam": OptimizerSpec("adam", lr=0.01, weight_decay=0.01),
    "adamw": OptimizerSpec("adamw", lr=0.01, weight_decay=0.1),
    "adagrad": OptimizerSpec("adagrad", lr=0.1),
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 9), nn.ReLU(), nn.Linear(9, 10))


def differing(name: str, parameter: nn.Parameter) -> dict[str, float]:
    """Biases without decay, the last layer's weight at a rate of its own: neighbors in three groups."""
    if parameter.dim() == 1:
        return {"weight_decay": 0.0}
    return {"lr": 0.03} if name == "2.weight" else {}


def falling(step: int) -> float:
    return 1 / (1 + 0.3 * step)


def made(kind: str = "momentum", *, groups: Any = differing, schedule: Any = falling) -> Job:
    data = load_digits()
    job = Job(
        model, cross_entropy, data.train, data.test, batch_size=8, optimizer=KINDS[kind], steps=12, split="striped",
        groups=groups, schedule=schedule, name="given",
    )  # fmt: skip
    return job.to(torch.float64)


def momentum() -> Job:
    return made("momentum")


def adam() -> Job:
    return made("adam")


def plain_sgd() -> Job:
    return made("sgd")


def adamw() -> Job:
    return made("adamw")


def pytorch(job: Job, steps: int, batches: Sequence[int], seed: int = 0) -> Tensor:
    """Flat parameters after `steps` of PyTorch's optimizer with parameter groups and LambdaLR on the whole batch."""
    (sampler,) = job.samplers([sum(batches)], seed=seed)
    module = job.build(seed)
    optimizer = optimizer_of(job, module)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job.schedule or (lambda step: 1.0))
    for _ in range(steps):
        inputs, targets = job.train.batch(sampler.next())
        optimizer.zero_grad()
        job.loss(called(module, inputs), targets).backward()
        for parameter in module.parameters():
            parameter.grad = parameter.grad.to_dense()
        optimizer.step()
        schedule.step()
    return torch.cat([each.detach().reshape(-1) for each in module.parameters()])


def optimizer_of(job: Job, module: nn.Module) -> torch.optim.Optimizer:
    spec, groups = job.optimizer, []
    for name, parameter in module.named_parameters():
        own = {"lr": spec.lr, "weight_decay": spec.weight_decay}
        own |= job.groups(name, parameter) if job.groups else {}
        groups.append({"params": [parameter], **own})
    if spec.name in ("sgd", "momentum"):
        return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum)
    if spec.name == "adagrad":
        return torch.optim.Adagrad(groups, lr=spec.lr, eps=spec.eps)
    kind = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
    return kind(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps)
