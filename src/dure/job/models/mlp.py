"""Dense layers with ReLU, their initial values and their accuracy; and `digits-mlp`, the job of such a network.

The handwritten digits of `digits-mlp` are part of the package. It needs no download.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dure.errors import UsageError
from dure.job.data.loaders import load_digits
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec


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

    One hidden layer has PyTorch's initial values, deeper networks have those of `with_he_values`.

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


def with_he_values(maker: Callable[[], nn.Sequential]) -> nn.Sequential:
    """A new network of `maker`, with weights drawn from N(0, 2 / inputs of a unit), and biases of 0.

    He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2. These
    values keep the strength of a signal. PyTorch's initial values divide its variance by 6 in each layer with ReLU, so
    that a network with seven hidden layers at first learns almost nothing.
    """
    network = maker()
    for layer in network:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return network


def digits_mlp(hidden: int = 64, depth: int = 1) -> Job:
    """A job with 64 pixels, `depth` hidden layers of `hidden` units, and 10 classes."""
    return digits_job("digits-mlp", deep_mlp_maker(64, hidden, depth, 10))


def digits_job(name: str, model: Callable[[], nn.Module]) -> Job:
    """A job of a classifier of 64 pixels."""
    data = load_digits()
    return Job(
        name=name,
        model=model,
        loss=cross_entropy,
        train=data.train,
        test=data.test,
        batch_size=32,
        optimizer=OptimizerSpec(lr=0.1),
        steps=300,
        accuracy=top1,
        source=data.source,
    )
