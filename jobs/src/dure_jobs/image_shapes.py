"""Networks on images as jobs of shapes without values, for runs in virtual time without gradients (`timing_only`).

    | job                   | model                                              | pixels | parameters | operations |
    |-----------------------|----------------------------------------------------|--------|------------|------------|
    | `resnet101_shapes`    | He et al., Deep Residual Learning, CVPR 2016       | 224    | 44,549,160 | 7.8 G      |
    | `inception_v3_shapes` | Szegedy et al., Rethinking the Inception           | 299    | 23,834,568 | 5.7 G      |
    |                       | Architecture for Computer Vision, CVPR 2016        |        |            |            |

Operations are multiply-adds of the forward of a sample of 3 x pixels x pixels, with 1,000 classes. Each model is an
`nn.Sequential`: a convolution of the stem, a residual unit, an inception module and a dense layer each are a child.
`vgg16.vgg16_shapes` is of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import Data
from dure.job.job import Job

CLASSES, SAMPLES = 1000, 1000

UNITS = ((64, 3, 1), (128, 4, 2), (256, 23, 2), (512, 3, 2))
"""Channels inside a residual unit, number of units, and stride of the first one, of the four groups of ResNet-101."""


def resnet101_shapes(batch_size: int = 32) -> Job:
    """ResNet-101 without values, for images of 3 x 224 x 224.

    Its bottlenecks are those of version 1.5: the 3 x 3 convolution has the stride. In the paper the first 1 x 1 has it,
    with 7.6 G operations.
    """
    return _job("resnet101", resnet101, 224, batch_size)


def inception_v3_shapes(batch_size: int = 32) -> Job:
    """Inception V3 without values and without the auxiliary classifier, for images of 3 x 299 x 299."""
    return _job("inception-v3", inception_v3, 299, batch_size)


def _job(name: str, network: Callable[[], nn.Module], size: int, batch_size: int) -> Job:
    images = torch.empty(SAMPLES, 3, size, size, device="meta")
    labels = torch.empty(SAMPLES, dtype=torch.int64, device="meta")
    model, train = partial(_on_meta, network), Data(images, labels)
    return Job(name=name, model=model, loss=cross_entropy, train=train, batch_size=batch_size, steps=10)


def _on_meta(network: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return network()


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | tuple[int, int] | str = 0
) -> nn.Sequential:
    """A convolution without bias, batch norm and ReLU."""
    convolved = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return nn.Sequential(convolved, nn.BatchNorm2d(outputs), nn.ReLU())


# ---- ResNet


def resnet101() -> nn.Sequential:
    """The network: inputs (batch, 3, 224, 224), outputs (batch, 1000)."""
    blocks: list[nn.Module] = [convolution(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for channels, units, stride in UNITS:
        for number in range(units):
            blocks.append(Bottleneck(inputs, channels, stride if number == 0 else 1))
            inputs = 4 * channels
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Bottleneck(nn.Module):
    """A residual unit: convolutions of 1 x 1, 3 x 3 with the stride, and 1 x 1, added to the inputs.

    Inputs of another shape than the outputs, of 4 times `channels`, are convolved by 1 x 1 before the sum.
    """

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * channels
        self.residual = nn.Sequential(
            convolution(inputs, channels, 1),
            convolution(channels, channels, 3, stride, 1),
            nn.Conv2d(channels, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            projected = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projected, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, inputs, height, width), outputs (batch, 4 channels, height / stride, width / stride)."""
        return torch.relu(self.residual(inputs) + self.shortcut(inputs))


# ---- Inception


class Branches(nn.Module):
    """Modules with the same inputs, whose outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the branches in order, along dimension 1."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def inception_v3() -> nn.Sequential:
    """The network: inputs (batch, 3, 299, 299), outputs (batch, 1000)."""
    return nn.Sequential(
        convolution(3, 32, 3, 2),
        convolution(32, 32, 3),
        convolution(32, 64, 3, padding=1),
        nn.MaxPool2d(3, 2),
        convolution(64, 80, 1),
        convolution(80, 192, 3),
        nn.MaxPool2d(3, 2),
        *(_at_35(inputs, pooled) for inputs, pooled in ((192, 32), (256, 64), (288, 64))),
        _to_17(288),
        *(_at_17(channels) for channels in (128, 160, 160, 192)),
        _to_8(768),
        *(_at_8(inputs) for inputs in (1280, 2048)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(2048, CLASSES),
    )


def _at_35(inputs: int, pooled: int) -> Branches:
    """A module on 35 x 35 pixels: figure 5 of the paper, with one 5 x 5."""
    return Branches(
        convolution(inputs, 64, 1),
        nn.Sequential(convolution(inputs, 48, 1), convolution(48, 64, 5, padding=2)),
        nn.Sequential(convolution(inputs, 64, 1), convolution(64, 96, 3, padding=1), convolution(96, 96, 3, padding=1)),
        _pooled(inputs, pooled),
    )


def _to_17(inputs: int) -> Branches:
    """From 35 x 35 to 17 x 17 pixels: figure 10."""
    return Branches(
        convolution(inputs, 384, 3, 2),
        nn.Sequential(convolution(inputs, 64, 1), convolution(64, 96, 3, padding=1), convolution(96, 96, 3, 2)),
        nn.MaxPool2d(3, 2),
    )


def _at_17(channels: int, inputs: int = 768) -> Branches:
    """A module on 17 x 17 pixels: figure 6, with convolutions of 1 x 7 and 7 x 1."""
    row, column = partial(_along, (1, 7)), partial(_along, (7, 1))
    return Branches(
        convolution(inputs, 192, 1),
        nn.Sequential(convolution(inputs, channels, 1), row(channels, channels), column(channels, 192)),
        nn.Sequential(
            convolution(inputs, channels, 1),
            column(channels, channels),
            row(channels, channels),
            column(channels, channels),
            row(channels, 192),
        ),
        _pooled(inputs, 192),
    )


def _to_8(inputs: int) -> Branches:
    """From 17 x 17 to 8 x 8 pixels."""
    factorized = nn.Sequential(
        convolution(inputs, 192, 1), _along((1, 7), 192, 192), _along((7, 1), 192, 192), convolution(192, 192, 3, 2)
    )
    return Branches(
        nn.Sequential(convolution(inputs, 192, 1), convolution(192, 320, 3, 2)), factorized, nn.MaxPool2d(3, 2)
    )


def _at_8(inputs: int) -> Branches:
    """A module on 8 x 8 pixels: figure 7, which is wide and not deep."""
    return Branches(
        convolution(inputs, 320, 1),
        nn.Sequential(convolution(inputs, 384, 1), _wide()),
        nn.Sequential(convolution(inputs, 448, 1), convolution(448, 384, 3, padding=1), _wide()),
        _pooled(inputs, 192),
    )


def _wide() -> Branches:
    return Branches(_along((1, 3), 384, 384), _along((3, 1), 384, 384))


def _along(kernel: tuple[int, int], inputs: int, outputs: int) -> nn.Sequential:
    return convolution(inputs, outputs, kernel, padding="same")


def _pooled(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), convolution(inputs, outputs, 1))
