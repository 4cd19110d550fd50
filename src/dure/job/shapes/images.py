"""Networks on images, as shapes without values.

    | job                            | model                                                         | pixels |
    |--------------------------------|---------------------------------------------------------------|--------|
    | `resnet50`, `101`, `152`       | He et al., Deep Residual Learning, CVPR 2016                  | 224    |
    | `resnext50-32x4d`, `101-32x8d` | Xie et al., Aggregated Residual Transformations, CVPR 2017    | 224    |
    | `inception-v3`                 | Szegedy et al., Rethinking the Inception Architecture for     | 299    |
    |                                | Computer Vision, CVPR 2016, without the auxiliary classifier  |        |
    | `vgg16`                        | Simonyan and Zisserman, Very Deep Convolutional Networks,     | 224    |
    |                                | ICLR 2015, configuration D, without dropout                   |        |
    | `alexnet`                      | Krizhevsky, One weird trick, 2014                             | 224    |

Each model is an `nn.Sequential` with 1,000 classes: a convolution of the stem, a residual unit, an inception module and
a dense layer each are a child. Residual units are those of version 1.5: the 3 x 3 convolution has the stride. In the
paper the first 1 x 1 has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.job.shapes.shape_job import Shapes, function_of

if TYPE_CHECKING:
    from dure.job.job import Job

CLASSES = 1000


def _on_images(name: str, network: Callable[[], nn.Module], pixels: int = 224) -> Callable[..., Job]:
    return function_of(Shapes(name, network, cross_entropy, (3, pixels, pixels)))


def convolution(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] | str = 0,
    groups: int = 1,
) -> nn.Sequential:
    """A convolution without bias, batch norm and ReLU."""
    convolved = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(convolved, nn.BatchNorm2d(outputs), nn.ReLU())


# ---- ResNet and ResNeXt


def resnet(units: Sequence[int], groups: int = 1, width: int = 64) -> nn.Sequential:
    """The network with so many `units` in its four parts: inputs (batch, 3, 224, 224), outputs (batch, 1000).

    The 3 x 3 convolutions of the first part have `groups` groups of `width` channels; each part doubles the channels.
    """
    blocks: list[nn.Module] = [convolution(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for part, count in enumerate(units):
        inner, outputs = groups * width << part, 256 << part
        for number in range(count):
            stride = 2 if part and number == 0 else 1
            blocks.append(Bottleneck(inputs, inner, outputs, stride, groups))
            inputs = outputs
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Bottleneck(nn.Module):
    """A residual unit: convolutions of 1 x 1, 3 x 3 with the stride and the groups, and 1 x 1, added to the inputs.

    Inputs of another shape than the outputs are convolved by 1 x 1 before the sum.
    """

    def __init__(self, inputs: int, channels: int, outputs: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            convolution(inputs, channels, 1),
            convolution(channels, channels, 3, stride, 1, groups),
            nn.Conv2d(channels, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride > 1:
            projected = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projected, nn.BatchNorm2d(outputs))

    def forward(self, inputs: Tensor) -> Tensor:
        """Inputs (batch, inputs, height, width), outputs (batch, outputs, height / stride, width / stride)."""
        return torch.relu(self.residual(inputs) + self.shortcut(inputs))


resnet50 = _on_images("resnet50", partial(resnet, (3, 4, 6, 3)))
resnet101 = _on_images("resnet101", partial(resnet, (3, 4, 23, 3)))
resnet152 = _on_images("resnet152", partial(resnet, (3, 8, 36, 3)))
resnext50 = _on_images("resnext50-32x4d", partial(resnet, (3, 4, 6, 3), groups=32, width=4))
resnext101 = _on_images("resnext101-32x8d", partial(resnet, (3, 4, 23, 3), groups=32, width=8))


# ---- networks with large dense layers

VGG16 = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Number of channels and of convolutions before each pooling."""

DENSE = 4096
"""Units of the two hidden dense layers."""


def vgg(width: float = 1.0, size: int = 224, classes: int = CLASSES) -> nn.Sequential:
    """VGG-16 with `width` times its channels and units: inputs (batch, 3, size, size), outputs (batch, classes)."""
    layers: list[nn.Module] = []
    inputs = 3
    for channels, convolutions in VGG16:
        outputs = _scaled(channels, width)
        for _ in range(convolutions):
            layers += [nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    pixels, units = (size // 32) ** 2, _scaled(DENSE, width)
    dense = [nn.Linear(inputs * pixels, units), nn.ReLU(), nn.Linear(units, units), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *dense, nn.Linear(units, classes))


def _scaled(number: int, width: float) -> int:
    return max(1, round(number * width))


def one_tower() -> nn.Sequential:
    """AlexNet on one device: inputs (batch, 3, 224, 224), outputs (batch, 1000)."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, kernel, stride, padding, pooled in (
        (64, 11, 4, 2, True),
        (192, 5, 1, 2, True),
        (384, 3, 1, 1, False),
        (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] * pooled
        inputs = outputs
    dense = [nn.Linear(inputs * 36, DENSE), nn.ReLU(), nn.Linear(DENSE, DENSE), nn.ReLU(), nn.Linear(DENSE, CLASSES)]
    return nn.Sequential(*layers, nn.Flatten(), *dense)


vgg16 = _on_images("vgg16", vgg)
alexnet = _on_images("alexnet", one_tower)


# ---- Inception


class Branches(nn.Module):
    """Modules with the same inputs, whose outputs are joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs of the branches in order, along dimension 1."""
        return torch.cat([branch(inputs) for branch in self.branches], dim=1)


def inception() -> nn.Sequential:
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


inception_v3 = _on_images("inception-v3", inception, 299)
