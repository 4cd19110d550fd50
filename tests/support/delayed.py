"""Recursions of pipelines without a flush over the chain of `support.chains`, written from the papers' equations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from support.chains import LR, flat, samples, stage_modules
from torch import Tensor, nn
from torch.nn.functional import mse_loss


def loss_of(stages: Sequence[nn.Module], batch: int) -> Tensor:
    inputs, targets = samples(batch)
    for stage in stages:
        inputs = stage(inputs)
    return mse_loss(inputs, targets)


def step(module: nn.Module, gradients: Sequence[Tensor], lr: float = LR) -> None:
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.add_(gradient, alpha=-lr)


def delayed(delays: Sequence[int], steps: int) -> Tensor:
    """w_k(t + 1) = w_k(t) - lr grad_k f(x(t); w_1(t - d_1), w_2(t - d_2), ...), negative versions the initial ones."""
    versions = [stage_modules(len(delays))]
    for t in range(steps):
        read = [copy.deepcopy(versions[max(0, t - delay)][k]) for k, delay in enumerate(delays)]
        parameters = [each for stage in read for each in stage.parameters()]
        gradients = iter(torch.autograd.grad(loss_of(read, t), parameters))
        after = copy.deepcopy(versions[t])
        for stage in after:
            step(stage, [next(gradients) for _ in stage.parameters()])
        versions.append(after)
    return flat(versions[-1])


def cycles(stages: int, steps: int, *, overwritten: bool = False) -> tuple[Tensor, list[list[Tensor]]]:
    """Pipelined back-propagation in cycles, one forward and one backward of every stage in each; no autograd.

    With `overwritten` a backward reads the activations of the newest forward of its stage.
    Returns the parameters, and the gradients of each stage in the order of its updates.
    """
    now = stage_modules(stages)
    kept: dict[Any, Any] = {}
    found: list[list[Tensor]] = [[] for _ in now]
    for cycle in range(1, steps + 2 * stages):
        before = copy.deepcopy(now)
        for k, module in enumerate(before, start=1):  # t + k - 1 = cycle
            t = cycle - k + 1
            if 1 <= t <= steps:
                value = samples(t - 1)[0] if k == 1 else kept["h", t, k - 1]
                kept["layers", t, k] = layers = []
                for layer in module:
                    layers.append(value)
                    value = layer(value).detach()
                kept["h", t, k] = value
        for k, module in reversed(list(enumerate(before, start=1))):  # t + 2K - 1 - k = cycle
            t = cycle - 2 * stages + 1 + k
            if 1 <= t <= steps:
                outputs, targets = kept["h", t, k], samples(t - 1)[1]
                error = 2 * (outputs - targets) / outputs.numel() if k == stages else kept.pop(("g", t, k))
                read = min(cycle - k + 1, steps) if overwritten else t
                kept["g", t, k - 1], gradients = back(module, kept["layers", read, k], error)
                step(now[k - 1], gradients)
                found[k - 1].append(torch.cat([each.reshape(-1) for each in gradients]))
    return flat(now), found


def back(module: nn.Sequential, inputs: Sequence[Tensor], error: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The gradient of the inputs and those of the parameters, from the inputs of the layers and their weights now."""
    found: list[Tensor] = []
    for layer, value in zip(reversed(module), reversed(inputs), strict=True):
        if isinstance(layer, nn.Linear):
            found = [error.T @ value, error.sum(dim=0), *found]
            error = error @ layer.weight.detach()
        else:
            error = error * (1 - torch.tanh(value) ** 2)
    return error, found


def sgd(steps: int) -> Tensor:
    """One process."""
    return delayed([0], steps)
