"""A layer of units at one machine: the units that are assigned to it, with their weights and biases.

    machine d                                                          Dean et al., NeurIPS 2012, sections 3 and 4
      receives the inputs that its units read and others own           each once, however many of its units read it
      y_i     = b_i + sum_j w_ij x_j                                   for its units i
      delta_j = sum_i w_ij delta_i                                     for each input j that it read
      sends the partial delta_j to the owner of j, which adds up the parts in the order of machines

Every machine has the inputs of the model. All machines get all outputs, so each computes the loss; its gradient needs
no message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from dure.partition.neurons.layers import UnitLayer
from dure.partition.tensor.shard import ParameterShard
from dure.partition.tensor.ways import Ways


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
    """The units of a layer at one machine, of whose inputs it has those at `has`, all machines the others.

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
