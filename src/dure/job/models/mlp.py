"""Dense layers, and the accuracy of classifiers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.models.he_values import with_he_values


def mlp(*widths: int) -> nn.Sequential:
    """Dense layers from `widths[0]` inputs to `widths[-1]` outputs with ReLU between; inputs are flattened per sample.

    >>> sum(each.numel() for each in mlp(784, 32, 10).parameters())
    25450
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def mlp_maker(*widths: int) -> Callable[[], nn.Sequential]:
    """A function that builds `mlp(*widths)`. Raises `UsageError` at once for invalid widths."""
    if len(widths) < 2 or min(widths) < 1:
        raise UsageError(f"dense layers need at least two widths of at least 1, got {widths}: write hidden=32.")
    return partial(mlp, *widths)


def deep_mlp_maker(inputs: int, hidden: int, depth: int, classes: int) -> Callable[[], nn.Sequential]:
    """A function that builds an `mlp` with `depth` hidden layers of `hidden` units.

    One hidden layer has PyTorch's initial values, deeper networks have those of `he_values.py`.

    >>> [type(each).__name__ for each in deep_mlp_maker(64, 8, 2, 10)()]
    ['Flatten', 'Linear', 'ReLU', 'Linear', 'ReLU', 'Linear']
    """
    if depth < 1:
        raise UsageError(f"depth counts hidden layers and must be at least 1, got {depth}: write depth=7.")
    maker = mlp_maker(inputs, *[hidden] * depth, classes)
    return maker if depth == 1 else partial(with_he_values, maker)


def top1(outputs: Tensor, targets: Tensor) -> float:
    """Accuracy: the share of samples whose highest score is at their label. Scores are (batch, classes)."""
    return float((outputs.argmax(dim=1) == targets).double().mean())
