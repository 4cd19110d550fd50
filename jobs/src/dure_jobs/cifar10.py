"""`cifar10-cnn`: three convolutions with batch norm on CIFAR-10. Its batch norm has buffers."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.job import Job
from dure.job.models.mlp import top1
from dure.job.optimizer import OptimizerSpec
from dure_jobs.data.cifar10 import load_cifar10


def cifar10_cnn(data_root: Path) -> Job:
    """A job with 33,946 parameters and the running statistics of three batch norms."""
    data = load_cifar10(data_root)
    return Job(
        name="cifar10-cnn",
        model=convnet,
        loss=cross_entropy,
        train=data.train,
        test=data.test,
        batch_size=64,
        optimizer=OptimizerSpec(lr=0.03),
        steps=500,
        accuracy=top1,
        source=data.source,
    )


def convnet() -> nn.Sequential:
    """A convolutional network: inputs (batch, 3, 32, 32), outputs (batch, 10)."""
    return nn.Sequential(
        *_block(3, 16),
        nn.MaxPool2d(2),
        *_block(16, 32),
        nn.MaxPool2d(2),
        *_block(32, 64),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    """A convolution, batch norm and ReLU. The convolution has no bias, because batch norm would cancel it."""
    convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()
