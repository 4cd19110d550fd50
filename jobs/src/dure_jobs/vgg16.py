"""`vgg16`: the network of Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015, configuration D.

13 convolutions in five groups, each followed by pooling, and three dense layers. For images of 3 x 224 x 224 and 1,000
classes it has 138,357,544 parameters, 74.3 % of them in the first dense layer. The paper's dropout is left out.

    | part       | children of the `nn.Sequential`                      | widths                                   |
    |------------|------------------------------------------------------|------------------------------------------|
    | features   | 0 to 30: convolutions with ReLU, five poolings       | 64, 128, 256, 512, 512 channels          |
    | classifier | 31 to 36: flattening, three dense layers, ReLU       | 4096, 4096, classes                      |

So `cuts=31` separates features and classifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from dure.errors import UsageError
from dure.job.data.dataset import Data, Samples
from dure.job.job import Job
from dure.job.models.mlp import top1, with_he_values
from dure.job.optimizer import OptimizerSpec
from dure_jobs.data.cifar10 import load_cifar10

GROUPS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Number of channels and of convolutions before each pooling."""

DENSE = 4096
"""Units of the two hidden dense layers."""

CIFAR_SIZE, CIFAR_CLASSES = 32, 10


def vgg16(data_root: Path, width: float = 0.25, size: int = CIFAR_SIZE, classes: int = CIFAR_CLASSES) -> Job:
    """A job on CIFAR-10, whose images are enlarged to `size` x `size`; 2.1 million parameters by default.

    `width` is a factor of all numbers of channels and hidden units. `width=1, size=224, classes=1000` has the shapes of
    the paper; of the classes then only the first ten occur.
    """
    if not width > 0:
        raise UsageError(f"width is a factor of the channels and must be above 0, got {width}: write width=0.25.")
    if size < CIFAR_SIZE or size % CIFAR_SIZE:
        raise UsageError(f"size counts pixels and must be a multiple of 32, which five poolings halve, got {size}.")
    if classes < CIFAR_CLASSES:
        raise UsageError(f"CIFAR-10 has ten classes, so classes must be at least 10, got {classes}.")
    data = load_cifar10(data_root)
    return Job(
        name="vgg16",
        model=partial(with_he_values, partial(network, width, size, classes)),
        loss=cross_entropy,
        train=_enlarged(data.train, size),
        test=_enlarged(data.test, size),
        batch_size=64,
        optimizer=OptimizerSpec("momentum", lr=0.01),
        steps=1000,
        accuracy=top1,
        source=data.source,
    )


def vgg16_shapes(batch_size: int = 32) -> Job:
    """A job with shapes but no values, for runs in virtual time without gradients (`timing_only`).

    Images are 3 x 224 x 224, with 1,000 classes; all tensors are on PyTorch's meta device.
    """
    images = torch.empty(1000, 3, 224, 224, device="meta")
    labels = torch.empty(1000, dtype=torch.int64, device="meta")
    return Job(
        name="vgg16", model=convnet, loss=cross_entropy, train=Data(images, labels), batch_size=batch_size, steps=10
    )


def convnet() -> nn.Sequential:
    """The network on the meta device: inputs (batch, 3, 224, 224), outputs (batch, 1000)."""
    with torch.device("meta"):
        return network()


def network(width: float = 1.0, size: int = 224, classes: int = 1000) -> nn.Sequential:
    """The network: inputs (batch, 3, size, size), outputs (batch, classes)."""
    layers: list[nn.Module] = []
    inputs = 3
    for channels, convolutions in GROUPS:
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


def _enlarged(data: Data, size: int) -> Data | Samples:
    """Images of size x size, enlarged one by one as they are read: the whole set at 224 pixels needs 30 GB."""
    if size == CIFAR_SIZE:
        return data
    assert isinstance(data.inputs, Tensor)
    assert isinstance(data.targets, Tensor)
    return Samples(EnlargedImages(data.inputs, data.targets, size))


@dataclass(frozen=True, slots=True)
class EnlargedImages:
    """A map-style data set of `images` enlarged to `size` x `size`, each pixel repeated, with the labels `targets`."""

    images: Tensor
    targets: Tensor
    size: int

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = interpolate(self.images[index : index + 1], size=(self.size, self.size), mode="nearest")[0]
        return image, self.targets[index]
