"""Locally connected layers, and `digits-local`: two of them and a dense layer on 8x8 digits.

A locally connected layer reads patches as a convolution does, and each of its units has weights of its own. Le et al.,
"Building high-level features using large scale unsupervised learning", ICML 2012, and DistBelief train such networks.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from dure.errors import UsageError
from dure.job.job import Job
from dure.job.models.digits import digits_job


class LocallyConnected2d(nn.Module):
    """Units on a grid, `channels` of them at each place, that each read a `kernel` x `kernel` patch of all channels.

    `inputs` is the shape (channels, height, width) of a sample. Row i of the weight belongs to unit i; units are in the
    order of the outputs (channels, height, width). The initial values are drawn as those of `nn.Linear`.
    """

    def __init__(self, inputs: tuple[int, int, int], channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        depth, height, width = inputs
        if not 1 <= kernel <= min(height, width) or stride < 1 or channels < 1:
            raise UsageError(
                f"patches of {kernel} x {kernel} at every {stride} places do not fit {channels} channels of units on a "
                f"grid of {height} x {width}: write a kernel from 1 to {min(height, width)}, and stride and channels "
                "from 1."
            )
        self.inputs = inputs
        self.kernel = kernel
        self.stride = stride
        self.outputs = (channels, (height - kernel) // stride + 1, (width - kernel) // stride + 1)
        units, patch = math.prod(self.outputs), depth * kernel**2
        self.weight = nn.Parameter(torch.empty(units, patch).uniform_(-(patch**-0.5), patch**-0.5))
        self.bias = nn.Parameter(torch.empty(units).uniform_(-(patch**-0.5), patch**-0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        patches = unfold(inputs, self.kernel, stride=self.stride)
        weight = self.weight.view(self.outputs[0], -1, self.weight.shape[1])
        sums = torch.einsum("bkp,cpk->bcp", patches, weight)
        return sums.reshape(-1, *self.outputs) + self.bias.view(self.outputs)

    def reads(self) -> Tensor:
        """For each unit the numbers of the inputs that it reads, in the order of its weights."""
        numbers = torch.arange(math.prod(self.inputs), dtype=torch.float64).view(1, *self.inputs)
        patches = unfold(numbers, self.kernel, stride=self.stride)[0].T.long()
        return patches.repeat(self.outputs[0], 1)


def local_network(side: int, channels: int, kernel: int, depth: int, classes: int) -> nn.Sequential:
    """`depth` locally connected layers with tanh on images of `side` x `side` pixels, and a dense layer."""
    shape, layers = (1, side, side), list[nn.Module]([nn.Unflatten(1, (1, side, side))])
    for _ in range(depth):
        layer = LocallyConnected2d(shape, channels, kernel)
        layers += [layer, nn.Tanh()]
        shape = layer.outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(math.prod(shape), classes))


def digits_local(channels: int = 4, kernel: int = 3, depth: int = 2) -> Job:
    """A job with 8 x 8 pixels, `depth` layers of `kernel` x `kernel` patches, and 10 classes."""
    return digits_job("digits-local", partial(local_network, 8, channels, kernel, depth, 10))
