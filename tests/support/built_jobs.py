"""A check of every named job: it is whole, and its model learns."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from dure.job.job import Job, load_job

RULES = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "adamw": torch.optim.AdamW,
}


def trained(job: Job, steps: int, seed: int = 0) -> nn.Module:
    """The job's model after `steps` of its optimizer."""
    module = job.build(seed)
    (sampler,) = job.samplers([job.batch_size], seed=seed)
    torch.manual_seed(seed)  # for dropout
    optimizer = RULES[job.optimizer.name](module.parameters(), lr=job.optimizer.lr)
    for _ in range(steps):
        inputs, targets = job.train.batch(sampler.next())
        optimizer.zero_grad()
        job.loss(module(inputs), targets).backward()
        for parameter in module.parameters():
            parameter.grad = parameter.grad.to_dense()
        optimizer.step()
    return module.eval()


def loss_of(job: Job, module: nn.Module) -> float:
    with torch.no_grad():
        inputs, targets = job.train.batch(torch.arange(500))
        return float(job.loss(module(inputs), targets))


def is_whole_and_learns(name: str, optimizer: str, steps: int = 40) -> None:
    job = load_job(name)
    assert job.name == name
    assert job.source
    assert job.optimizer.name == optimizer
    before = loss_of(job, job.build().eval())
    after = loss_of(job, trained(load_job(name, batch_size=min(job.batch_size, 32)), steps))
    assert after < 0.9 * before
