"""`digits-local`: locally connected layers and a dense layer on 8x8 digits."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from dure.job.job import Job
from dure.job.models.local import LocallyConnected2d
from dure.job.models.mlp import digits_job


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
