"""AmoebaNet-D, as shapes without values: `amoebanet-d`, with `layers=18` normal cells and `filters=256`.

Real et al., "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019; the sizes and the joined
states are those of Huang et al., "GPipe", NeurIPS 2019, table 1, whose counts of parameters the model has.

    stem, two cells that halve the image                             112, 56, 28 pixels
    layers / 3 normal cells, a cell that halves, and so two times    28, 14, 7 pixels
    mean over the pixels, dense layer                                1,000 classes

A cell reads the outputs of the two cells before it, and makes five states, each the sum of two operations on earlier
ones. A cell that halves the image doubles the channels, from filters / 4 of the stem. Cells are blocks: between two of
them pass the outputs of the last cell and of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

from dure.errors import UsageError
from dure.job.job import Job
from dure.job.shapes.images import CLASSES
from dure.job.shapes.shape_job import Shapes

Operation = Callable[[int, int], nn.Module]
"""Makes an operation of so many channels, and with a stride."""


class Wiring(NamedTuple):
    """A cell: pairs of operations with the states that they read, and the states that are joined to its outputs.

    States 0 and 1 are those of the cell before and of the one before that; each pair makes the next.
    """

    pairs: tuple[tuple[tuple[int, str], tuple[int, str]], ...]
    joined: tuple[int, ...]


NORMAL = Wiring(
    (
        ((1, "1x1"), (1, "max")),
        ((1, "same"), (0, "1x7 7x1")),
        ((0, "1x1"), (0, "1x7 7x1")),
        ((2, "max"), (2, "same")),
        ((1, "mean"), (5, "1x1")),
    ),
    (0, 3, 4, 6),
)
HALVING = Wiring(
    (
        ((0, "max 2x2"), (0, "max")),
        ((2, "same"), (1, "3x3")),
        ((2, "1x7 7x1"), (2, "max")),
        ((3, "same"), (1, "max 2x2")),
        ((2, "mean"), (3, "1x1")),
    ),
    (4, 5, 6),
)


def activated(inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, stride: int = 1) -> nn.Sequential:
    """ReLU, a convolution without bias that keeps the pixels at stride 1, and batch norm."""
    high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
    strides = (stride if high > 1 or wide == 1 else 1, stride if wide > 1 or high == 1 else 1)
    convolved = nn.Conv2d(inputs, outputs, (high, wide), strides, (high // 2, wide // 2), bias=False)
    return nn.Sequential(nn.ReLU(), convolved, nn.BatchNorm2d(outputs))


def narrowed(channels: int, stride: int, *kernels: int | tuple[int, int]) -> nn.Sequential:
    """Convolutions in a quarter of the channels, between one of 1 x 1 to them and one back."""
    inner = channels // 4
    middle = (activated(inner, inner, kernel, stride) for kernel in kernels)
    return nn.Sequential(activated(channels, inner), *middle, activated(inner, channels))


OPERATIONS: dict[str, Operation] = {
    "same": lambda channels, stride: nn.Identity(),
    "max": lambda channels, stride: nn.MaxPool2d(3, stride, 1),
    "max 2x2": lambda channels, stride: nn.MaxPool2d(2, stride),
    "mean": lambda channels, stride: nn.AvgPool2d(3, stride, 1, count_include_pad=False),
    "1x1": lambda channels, stride: activated(channels, channels, 1, stride),
    "3x3": lambda channels, stride: narrowed(channels, stride, 3),
    "1x7 7x1": lambda channels, stride: narrowed(channels, stride, (1, 7), (7, 1)),
}


class Halved(nn.Module):
    """Half of the pixels of each direction: 1 x 1 convolutions of two grids of pixels, each to half of the outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.grids = nn.ModuleList(nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False) for _ in range(2))
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, inputs, height, width), outputs (batch, outputs, height / 2, width / 2)."""
        inputs = torch.relu(inputs)
        shifted = pad(inputs[:, :, 1:, 1:], (0, 1, 0, 1))
        parts = [grid(each) for grid, each in zip(self.grids, (inputs, shifted), strict=True)]
        found: Tensor = self.norm(torch.cat(parts, dim=1))
        return found


class ImageCell(nn.Module):
    """A cell of `channels`; the two cells before have `last` and `before` channels.

    `halved`: the last cell halves the image, so that the outputs of the one before have twice the pixels.
    """

    def __init__(self, wiring: Wiring, last: int, before: int, channels: int, *, halved: bool) -> None:
        super().__init__()
        self.wiring = wiring
        self.of_last = activated(last, channels)
        self.of_before: nn.Module = nn.Identity()
        if halved:
            self.of_before = Halved(before, channels)
        elif before != channels:
            self.of_before = activated(before, channels)
        strides = {state: 2 for state in (0, 1) if wiring is HALVING}
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, strides.get(state, 1)) for pair in wiring.pairs for state, name in pair
        )

    def forward(self, outputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The outputs of this cell and of the last one, from those of the last two; behind the stem there is one."""
        last, before = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        states = [self.of_last(last), self.of_before(before)]
        operations = iter(self.operations)
        for (one, _), (other, _) in self.wiring.pairs:
            states.append(next(operations)(states[one]) + next(operations)(states[other]))
        return torch.cat([states[number] for number in self.wiring.joined], dim=1), last


class CellClassifier(nn.Module):
    """The mean over the pixels of the last cell, and a dense layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, CLASSES)

    def forward(self, outputs: tuple[Tensor, Tensor]) -> Tensor:
        """Outputs (batch, 1000)."""
        found: Tensor = self.dense(outputs[0].mean(dim=(2, 3)))
        return found


def network(layers: int, filters: int) -> nn.Sequential:
    """The network: inputs (batch, 3, 224, 224), outputs (batch, 1000)."""
    part = [NORMAL] * (layers // 3)
    channels = last = before = filters // 4
    blocks: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1, bias=False), nn.BatchNorm2d(channels))]
    halved = False
    for wiring in (HALVING, HALVING, *part, HALVING, *part, HALVING, *part):
        channels *= 2 if wiring is HALVING else 1
        blocks.append(ImageCell(wiring, last, before, channels, halved=halved))
        last, before, halved = channels * len(wiring.joined), last, wiring is HALVING
    return nn.Sequential(*blocks, CellClassifier(last))


def amoebanet_d(
    layers: int = 18,
    filters: int = 256,
    batch: int = 32,
    precision: str = "fp32",
    accumulate: int = 1,
    recompute: bool = False,
    optimizer: str = "sgd",
) -> Job:
    """AmoebaNet-D of so many normal cells and filters. Raises `UsageError` for sizes that do not divide."""
    if layers < 3 or layers % 3:
        raise UsageError(f"amoebanet-d: layers must be a multiple of 3, such as 18, got {layers}.")
    if filters < 8 or filters % 8:
        raise UsageError(f"amoebanet-d: filters must be a multiple of 8, such as 256, got {filters}.")
    shapes = Shapes("amoebanet-d", partial(network, layers, filters), cross_entropy, (3, 224, 224))
    return shapes.job(batch, precision, accumulate, recompute, optimizer)
