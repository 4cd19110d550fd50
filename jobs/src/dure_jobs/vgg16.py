"""`cifar10-vgg16`: the network of Simonyan and Zisserman, Very Deep Convolutional Networks, ICLR 2015, configuration D.

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

from torch import Tensor
from torch.nn.functional import cross_entropy, interpolate

from dure.errors import UsageError
from dure.job.data.dataset import Data, Samples
from dure.job.job import Job
from dure.job.models.mlp import top1, with_he_values
from dure.job.optimizer import OptimizerSpec
from dure.job.shapes.images import vgg
from dure_jobs.data.cifar10 import load_cifar10

CIFAR_SIZE, CIFAR_CLASSES = 32, 10


def cifar10_vgg16(data_root: Path, width: float = 0.25, size: int = CIFAR_SIZE, classes: int = CIFAR_CLASSES) -> Job:
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
        name="cifar10-vgg16",
        model=partial(with_he_values, partial(vgg, width, size, classes)),
        loss=cross_entropy,
        train=_enlarged(data.train, size),
        test=_enlarged(data.test, size),
        batch_size=64,
        optimizer=OptimizerSpec("momentum", lr=0.01),
        steps=1000,
        accuracy=top1,
        source=data.source,
    )


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
