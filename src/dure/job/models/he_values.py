"""Initial values of deep networks with ReLU: He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def with_he_values(maker: Callable[[], nn.Sequential]) -> nn.Sequential:
    """A new network of `maker`, with weights drawn from N(0, 2 / inputs of a unit), and biases of 0.

    These keep the strength of a signal. PyTorch's initial values divide its variance by 6 in each layer with ReLU, so
    that a network with seven hidden layers at first learns almost nothing.
    """
    network = maker()
    for layer in network:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network
