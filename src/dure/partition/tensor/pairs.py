"""Pairs of layers in an `nn.Sequential` that workers share: the first split by outputs, the second by inputs.

Between the two of a pair each worker has some channels of the activations. So there may be only layers that act on each
channel alone: functions of single units, pooling, batch norm (split by channels) and dropout. `nn.Flatten` keeps the
elements of a channel together, so a dense layer behind it is split by blocks of inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn

from dure.partition.blocks import is_sequence
from dure.partition.tensor.linear import ByChannel, Column, Row, is_splittable
from dure.partition.tensor.plan import LayerSplit

ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.Hardtanh, nn.Softplus),
    nn.Identity,
)
"""Layers that act on each unit alone, so that a worker can apply them to its own."""

POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
)
"""Layers that act on each channel of a convolution alone."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


@dataclass(slots=True)
class _Open:
    """A layer that would be split by outputs, and what lies behind it, until a second layer is found."""

    first: str
    layer: nn.Module
    between: list[tuple[str, LayerSplit | None]] = field(default_factory=list)
    flat: bool = False

    @property
    def outputs(self) -> int:
        return self.layer.get_parameter("weight").shape[0]

    @property
    def dense(self) -> bool:
        return isinstance(self.layer, nn.Linear)

    def passes(self, place: str, layer: nn.Module) -> bool:
        """Whether a layer acts on each channel alone."""
        if isinstance(layer, NORMS):
            self.between.append((place, ByChannel()))
            return not self.flat and layer.num_features == self.outputs
        if isinstance(layer, DROPOUTS):
            self.between.append((place, None))
            return True
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            self.flat = True
            return not self.dense
        return isinstance(layer, ELEMENTWISE) or (isinstance(layer, POOLING) and not self.dense and not self.flat)

    def pairs_with(self, layer: nn.Module) -> bool:
        """Whether a layer reads the channels of the first, dense layers behind convolutions flat ones."""
        dense = isinstance(layer, nn.Linear)
        return dense == (self.dense or self.flat) and layer.get_parameter("weight").shape[1] % self.outputs == 0


def pairs(path: str, sequence: nn.Sequential, ways: int) -> Iterator[tuple[str, LayerSplit | None]]:
    """The splits of the layers of `sequence`, by name; None for dropout between the two layers of a pair.

    A layer with fewer outputs than `ways` stays whole. So do one without a second, and one that occurs again or has a
    parameter of another.
    """
    opened: _Open | None = None
    flat = list(_flat(path, sequence))
    times = Counter(id(parameter) for _, layer in flat for parameter in layer.parameters())
    for place, layer in flat:
        if any(times[id(parameter)] > 1 for parameter in layer.parameters()):
            opened = None
        elif not is_splittable(layer):
            opened = opened if opened is not None and opened.passes(place, layer) else None
        elif opened is not None and opened.pairs_with(layer):
            yield opened.first, Column()
            yield from opened.between
            yield place, Row(layer.get_parameter("weight").shape[1] // opened.outputs)
            opened = None
        else:
            opened = _Open(place, layer)
            opened = opened if opened.outputs >= ways else None


def layers_of(sequence: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The layers of a sequence with their names; `named_children` leaves out one that occurs again."""
    return [(name, layer) for name, layer in sequence._modules.items() if layer is not None]


def _flat(path: str, sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, in their order."""
    for name, layer in layers_of(sequence):
        place = f"{path}.{name}" if path else name
        if is_sequence(layer):
            yield from _flat(place, layer)
        else:
            yield place, layer
