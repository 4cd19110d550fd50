"""Layers of units: the dense and locally connected layers of an `nn.Sequential`, and the part of each at one machine.

The part of a layer at a machine is the units that are assigned to it, with their weights and biases (`UnitsPart`).

    machine d                                                          Dean et al., NeurIPS 2012, sections 3 and 4
      receives the inputs that its units read and others own           each once, however many of its units read it
      y_i     = b_i + sum_j w_ij x_j                                   for its units i
      delta_j = sum_i w_ij delta_i                                     for each input j that it read
      sends the partial delta_j to the owner of j, which adds up the parts in the order of machines

Every machine has the inputs of the model. All machines get all outputs, so each computes the loss; its gradient needs
no message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from dure.errors import UsageError
from dure.job.models.local import LocallyConnected2d
from dure.partition.blocks import is_sequence
from dure.partition.tensor.plan import ParameterShard
from dure.partition.tensor.plans import ELEMENTWISE
from dure.partition.tensor.ways import Ways


@dataclass(frozen=True, slots=True)
class UnitLayer:
    """A layer that reads `inputs` numbers. Its units stand on a `grid` of (channels, height, width).

    A dense layer is one row of units. Row i of each parameter belongs to unit i. `reads` holds the inputs that each
    unit reads; None: all.
    """

    name: str
    inputs: int
    grid: tuple[int, int, int]
    reads: Tensor | None

    @property
    def units(self) -> int:
        """The number of its units."""
        return math.prod(self.grid)

    @property
    def places(self) -> int:
        """The places of its grid, at each of which there is a unit of each channel."""
        return self.grid[1] * self.grid[2]

    @property
    def fan_in(self) -> int:
        """The inputs of a unit."""
        return self.inputs if self.reads is None else self.reads.shape[1]

    def inputs_of(self, units: Tensor) -> Tensor:
        """The inputs that some of `units` read, in order."""
        if self.reads is None:
            return torch.arange(self.inputs if units.numel() else 0)
        found: Tensor = self.reads[units].unique()  # type: ignore[no-untyped-call]
        return found


class UnitModel(NamedTuple):
    """The layers of units of a model, and the names of the modules with random numbers between them."""

    layers: Sequence[UnitLayer]
    inside: frozenset[str]


def unit_model(module: nn.Module) -> UnitModel:
    """The layers of units of an `nn.Sequential`. Raises `UsageError` for a model that has other layers between them.

    Behind the last of them there may be any layers without parameters, and before the first too.
    """
    if not is_sequence(module):
        raise UsageError(
            f"units of a model can be assigned if it is an nn.Sequential of dense and locally connected layers without "
            f"a forward of its own, and this one is a {type(module).__name__}: write it as one, or split its layers by "
            "tensor:ways=2."
        )
    found: list[UnitLayer] = []
    behind: list[tuple[str, nn.Module]] = []
    inside: set[str] = set()
    for name, layer in _in_order("", module):
        if type(layer) in (nn.Linear, LocallyConnected2d):
            unit_layer = _unit_layer(name, layer)
            if found:
                _check_between(found[-1], unit_layer, behind)
                inside.update(place for place, each in behind if isinstance(each, nn.Dropout))
            found.append(unit_layer)
            behind = []
        elif next(layer.parameters(), None) is not None or next(layer.buffers(), None) is not None:
            raise UsageError(_refusal(name, layer, "has parameters or buffers of other layers"))
        else:
            behind.append((name, layer))
    _check_own(module)
    if not found:
        raise UsageError(
            f"this {type(module).__name__} has no dense or locally connected layer whose units could be assigned: "
            "leave the partition out, or use tensor:ways=2."
        )
    return UnitModel(found, frozenset(inside))


def _in_order(path: str, sequence: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """The layers of a sequence, and of sequences in it, in the order of the computation; one may come again."""
    for name, layer in sequence._modules.items():
        assert layer is not None
        if is_sequence(layer):
            yield from _in_order(f"{path}{name}.", layer)
        else:
            yield f"{path}{name}", layer


def _check_own(module: nn.Module) -> None:
    """Raise `UsageError` for a parameter of two layers: its units would have two owners."""
    names: dict[int, str] = {}
    for name, each in module.named_parameters(remove_duplicate=False):
        first = names.setdefault(id(each), name)
        if first != name:
            raise UsageError(
                f"the parameters {first} and {name} are one, and a weight is with the unit that reads by it: give each "
                "layer its own."
            )


def _unit_layer(name: str, layer: nn.Module) -> UnitLayer:
    if isinstance(layer, nn.Linear):
        return UnitLayer(name, layer.in_features, (1, 1, layer.out_features), None)
    assert isinstance(layer, LocallyConnected2d)
    return UnitLayer(name, math.prod(layer.inputs), layer.outputs, layer.reads())


def _check_between(before: UnitLayer, after: UnitLayer, between: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise `UsageError` unless machines can apply the layers between two layers of units to units of their own."""
    flat = before.reads is None or after.reads is not None
    for name, layer in between:
        flattens = isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1)
        flat = flat or flattens
        if not (flattens or isinstance(layer, (*ELEMENTWISE, nn.Dropout))):
            raise UsageError(_refusal(name, layer, "does not act on each unit alone"))
    if before.units != after.inputs or not flat:
        raise UsageError(
            f"layer {after.name} reads {after.inputs} inputs, and layer {before.name} before it has {before.units} "
            "units: let it read all of them, in one row (nn.Flatten) where it is dense."
        )


def _refusal(name: str, layer: nn.Module, reason: str) -> str:
    return (
        f"layer {name} ({type(layer).__name__}) {reason}, and units are assigned in models of nn.Linear, "
        "LocallyConnected2d, functions of single units, nn.Dropout and nn.Flatten: leave it out, or use tensor:ways=2."
    )


class Route(NamedTuple):
    """The activations that a machine sends and receives, by machine; those that it reads of its own are among them.

    `sends`: their places among its own units. `places`: those of the received ones among the inputs that it reads.
    """

    sends: Sequence[Tensor]
    places: Sequence[Tensor]


def route(needed: Sequence[Tensor], owned: Sequence[Tensor], machine: int) -> Route:
    """The route of a machine, from the inputs that each machine needs and owns, in order."""
    own, read = owned[machine], needed[machine]
    sends = [torch.isin(own, each).nonzero().flatten() for each in needed]
    return Route(sends, [torch.isin(read, each).nonzero().flatten() for each in owned])


class _Delivered(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, own: Tensor, way: Route) -> Tensor:
        ctx.ways, ctx.route, ctx.units = ways, way, own.shape[-1]
        return _placed(own, _exchanged(ways, own, way.sends, way.places), way.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        way, error = ctx.route, gradients[0]
        parts = _exchanged(ctx.ways, error, way.places, way.sends)
        total = error.new_zeros(*error.shape[:-1], ctx.units)
        for places, part in zip(way.sends, parts, strict=True):
            total.index_add_(-1, places.to(error.device), part)
        return None, total, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, own: Tensor, owned: Sequence[Tensor]) -> Tensor:
        ctx.own = owned[ways.rank]
        shapes = [torch.Size((*own.shape[:-1], each.numel())) for each in owned]
        return _placed(own, ways.all_gather(own, shapes), owned)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0].index_select(-1, ctx.own.to(gradients[0].device)), None


def _exchanged(ways: Ways, values: Tensor, sends: Sequence[Tensor], receives: Sequence[Tensor]) -> list[Tensor]:
    """Send each machine its places of `values`; receive as many as there are in `receives` from each."""
    pieces = [values.index_select(-1, places.to(values.device)) for places in sends]
    return ways.exchange(pieces, [torch.Size((*values.shape[:-1], each.numel())) for each in receives])


def _placed(like: Tensor, parts: Sequence[Tensor], places: Sequence[Tensor]) -> Tensor:
    """The parts at their places in the last dimension of a new tensor."""
    whole = like.new_empty(*like.shape[:-1], sum(each.numel() for each in places))
    for each, part in zip(places, parts, strict=True):
        whole.index_copy_(-1, each.to(like.device), part)
    return whole


class UnitsPart(nn.Module):
    """The `units` of a layer at one machine. The inputs come by the route `way`; None: all machines have them.

    `owned` holds the units of each machine; without it their outputs stay at this machine.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        layer: UnitLayer,
        tensors: Mapping[str, Tensor],
        ways: Ways,
        units: Tensor,
        way: Route | None,
        owned: Sequence[Tensor] | None,
    ) -> None:
        super().__init__()
        for name, each in tensors.items():
            self.register_parameter(name, nn.Parameter(each))
        if "bias" not in tensors:
            self.register_parameter("bias", None)
        self.ways = ways
        self._route = way
        self._owned = owned
        self._grid = None if layer.reads is None else layer.grid
        self._needed = layer.inputs_of(units)
        self._patches = None if layer.reads is None else torch.searchsorted(self._needed, layer.reads[units])

    def forward(self, inputs: Tensor) -> Tensor:
        if self._route is None:
            flat = inputs if self._patches is None else inputs.flatten(1)
            read = flat.index_select(-1, self._needed.to(inputs.device))
        else:
            read = _Delivered.apply(self.ways, inputs, self._route)  # type: ignore[no-untyped-call]
        self.ways.enter()
        own = self._outputs(read)
        if self._owned is None:
            return own
        self.ways.leave()
        whole: Tensor = _Joined.apply(self.ways, own, self._owned)  # type: ignore[no-untyped-call]
        return whole if self._grid is None else whole.view(-1, *self._grid)

    def _outputs(self, read: Tensor) -> Tensor:
        if self._patches is None:
            weight = self.weight if self._needed.numel() else self.weight[:, :0]  # without units it reads nothing
            return linear(read, weight, self.bias)
        sums = torch.einsum("bup,up->bu", read[:, self._patches.to(read.device)], self.weight)
        return sums if self.bias is None else sums + self.bias


@dataclass(frozen=True, slots=True)
class Units:
    """A split of a layer by `owners`, the machine of each unit. `sources` are those of its inputs; None: all have them.

    `joins`: all machines get the outputs.
    """

    layer: UnitLayer
    owners: Tensor
    sources: Tensor | None
    joins: bool

    def shards(self, layer: nn.Module, size: int) -> Mapping[str, Sequence[ParameterShard]]:
        shards = [ParameterShard(0, units) for units in units_at(self.owners, size)]
        return {name: shards for name, _ in layer.named_parameters()}

    def split(self, layer: nn.Module, ways: Ways) -> nn.Module:
        owned = units_at(self.owners, ways.size)
        needed = [self.layer.inputs_of(units) for units in owned]
        way = None if self.sources is None else route(needed, units_at(self.sources, ways.size), ways.rank)
        shard = ParameterShard(0, owned[ways.rank])
        tensors = {name: shard.of(each.detach()) for name, each in layer.named_parameters()}
        return UnitsPart(self.layer, tensors, ways, owned[ways.rank], way, owned if self.joins else None)


def units_at(owners: Tensor, machines: int) -> list[Tensor]:
    """The numbers of the units of each machine, in order."""
    return [(owners == machine).nonzero().flatten() for machine in range(machines)]
