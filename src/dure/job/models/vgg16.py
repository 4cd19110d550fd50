"""`vgg16`: a job with shapes but no values, for runs in virtual time without gradients (`timing_only`).

Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015, configuration D:
138,357,544 parameters, 74.3 % of them in the first dense layer.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from dure.job.data.dataset import Data
from dure.job.job import Job

BLOCKS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Number of channels and of convolutions before each pooling."""


def vgg16(batch_size: int = 32) -> Job:
    """A job with images of 3 x 224 x 224 and 1,000 classes; all tensors are on PyTorch's meta device."""
    images = torch.empty(1000, 3, 224, 224, device="meta")
    labels = torch.empty(1000, dtype=torch.int64, device="meta")
    return Job(
        name="vgg16", model=convnet, loss=cross_entropy, train=Data(images, labels), batch_size=batch_size, steps=10
    )


def convnet() -> nn.Sequential:
    """The network on the meta device: inputs (batch, 3, 224, 224), outputs (batch, 1000)."""
    with torch.device("meta"):
        layers: list[nn.Module] = []
        channels = 3
        for width, convolutions in BLOCKS:
            for _ in range(convolutions):
                layers += [nn.Conv2d(channels, width, kernel_size=3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        dense = [nn.Linear(channels * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
        return nn.Sequential(*layers, nn.Flatten(), *dense)
