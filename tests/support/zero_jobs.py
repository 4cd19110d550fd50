"""Jobs whose models have blocks, for runs with sharded parameters. Named in job texts by their file."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec

WIDTH, BLOCKS = 64, 8

LOOKED_AT = 6
"""Forwards of a block before those whose memory is looked at."""


def job_text(name: str) -> str:
    """The text that names a job of this file."""
    return f"{__file__}:{name}"


def _data(samples: int = 64, width: int = WIDTH) -> Data:
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples, width, generator=draw)
    return Data(inputs, torch.randint(0, 4, (samples,), generator=draw))


def job(model: object, data: Data | None = None) -> Job:
    data = _data() if data is None else data
    return Job(
        model=model,  # type: ignore[arg-type]
        loss=nn.functional.cross_entropy,
        train=data,
        test=data,
        batch_size=8,
        optimizer=OptimizerSpec("momentum", lr=0.05),
        split="striped",
    )


def _mlp() -> nn.Sequential:
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS - 1)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def mlp() -> Job:
    """Seven equal blocks and a small one."""
    return job(_mlp)


class ZeroBetween(nn.Module):
    """A layer whose second weight reaches the loss in no sample."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(self.used(inputs))


def unused() -> Job:
    """A block with parameters that no sample reaches, and one whose weight is frozen."""

    def model() -> nn.Sequential:
        frozen = nn.Linear(WIDTH, WIDTH)
        frozen.weight.requires_grad_(False)
        return nn.Sequential(ZeroBetween(), frozen, nn.Tanh(), nn.Linear(WIDTH, 4))

    return job(model)


def cnn() -> Job:
    """Convolutions with batch norm."""

    def model() -> nn.Sequential:
        def block(before: int, after: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

        return nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), block(1, 6), block(6, 8), block(8, 8), nn.Flatten(), nn.Linear(8 * 64, 4)
        )

    return job(model)


def dropped() -> Job:
    """Dropout in several blocks, and in blocks without parameters."""

    def model() -> nn.Sequential:
        first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3))
        return nn.Sequential(first, nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 4))

    return job(model)


class Changing(nn.Module):
    """A layer that changes its weight before it reads it, in one of the ways in which PyTorch allows that."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, inputs: Tensor) -> Tensor:
        weight = self.inner.weight
        match self.change:
            case "in_place":
                with torch.no_grad():
                    weight.clamp_(-0.01, 0.01)
            case "of_data":
                weight.data.clamp_(-0.01, 0.01)
            case "to_other_memory":
                weight.data = weight.data.clamp(-0.01, 0.01)
            case "to_float64":
                self.inner.to(torch.float64)
        outputs: Tensor = self.inner(inputs.to(weight.dtype)).to(inputs.dtype)
        return outputs


def changing(change: str) -> Job:
    """The second of three blocks changes its weight in forward."""
    return job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Changing(change), nn.Linear(WIDTH, 4)))


class Spoiled(nn.Module):
    """A layer whose loss is finite and whose gradient has a NaN for samples that begin with a large value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        sound = (inputs[:, :1].abs() < 5).to(inputs.dtype)
        outputs: Tensor = self.inner(inputs)
        return outputs + 0 * torch.sqrt(sound * (1 + self.inner.weight[0, 0].square()))


def one_nan() -> Job:
    """The gradient of the third mini-batch of the second of two workers is not finite."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Identity(), Spoiled()))

    data = _data()
    data.inputs[2 * 16 + 1, :] = -100.0
    return job(model, data)


def steep(slope: float) -> Job:
    """A loss whose gradient has about the norm `slope`, of 1.0 at least, so that it is clipped to 0.5."""

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    return replace(job(model), loss=lambda outputs, _: outputs.sum(1).mean() * slope)


def limited() -> Job:
    """A block whose forward limits its weight in place."""

    class Limited(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return super().forward(inputs)

    return job(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Limited(WIDTH, 4)))


class Reading(nn.Linear):
    """A layer that computes with the weight of another, too, which it does not hold."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__(WIDTH, WIDTH)
        self.others = [other]

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + nn.functional.linear(inputs, self.others[0].weight)


def reading() -> Job:
    """A block that reads a parameter of the next."""

    def model() -> nn.Sequential:
        last = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(Reading(last), last, nn.Linear(WIDTH, 4))

    return job(model)


# ---- the memory of a worker


class Watched(nn.Module):
    """A block that writes down the bytes of all tensors, in its forward and in its backward, after some steps."""

    def __init__(self, block: nn.Module, folder: Path) -> None:
        super().__init__()
        self.block, self.folder, self.forwards = block, folder, 0

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.block(inputs)
        self.forwards += torch.is_grad_enabled() and self.training
        if self.forwards > LOOKED_AT:
            self._write("forward")
            outputs.register_hook(lambda _: self._write("backward"))
        return outputs

    def _write(self, when: str) -> None:
        with (self.folder / f"bytes {os.getpid()}").open("a") as file:
            file.write(f"{when} {tensor_nbytes()}\n")


def tensor_nbytes() -> int:
    """The bytes of the storages of all tensors that Python has, but small ones."""
    storages = [each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes() > 1024}.values())


def watched(data_root: Path) -> Job:
    """As `mlp`, and each block writes down the bytes of all tensors in the process."""

    def model() -> nn.Sequential:
        return nn.Sequential(*(Watched(block, data_root) for block in _mlp()))

    return job(model)
