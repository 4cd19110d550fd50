"""`mnist-mlp` and `mnist-cnn`: handwritten digits of 28 x 28 pixels."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.job import Job
from dure.job.models.mlp import deep_mlp_maker, top1
from dure.job.optimizer import OptimizerSpec
from dure_jobs.data.mnist import load_mnist


def mnist_mlp(data_root: Path, hidden: int = 32, depth: int = 1) -> Job:
    """A job with 784 pixels, `depth` hidden layers of `hidden` units, and 10 classes.

    With `depth=7, hidden=64`, one worker reaches an accuracy of 0.95 within the 4,000 steps at learning rates from 0.01
    to 0.1, and with a momentum of 0.9 at rates from 0.002 to 0.02 (three seeds each).
    """
    data = load_mnist(data_root)
    return Job(
        name="mnist-mlp",
        model=deep_mlp_maker(784, hidden, depth, 10),
        loss=cross_entropy,
        train=data.train,
        test=data.test,
        batch_size=32,
        optimizer=OptimizerSpec(lr=0.03),  # at 0.1, eight workers without order diverge
        steps=4000,
        accuracy=top1,
        source=data.source,
    )


def mnist_cnn(data_root: Path) -> Job:
    """A job with two convolutions with pooling, then two dense layers: 105,866 parameters, no buffers."""
    data = load_mnist(data_root)
    return Job(
        name="mnist-cnn",
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
    """A convolutional network: inputs (batch, 1, 28, 28), outputs (batch, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
