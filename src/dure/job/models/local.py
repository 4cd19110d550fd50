"""Locally connected layers.

A locally connected layer reads patches as a convolution does, and each of its units has weights of its own. Le et al.,
"Building high-level features using large scale unsupervised learning", ICML 2012, and DistBelief train such networks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from dure.errors import UsageError


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
