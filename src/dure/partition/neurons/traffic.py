"""Words sent and work for a sample under an assignment of units, computed from the assignment alone.

An activation goes to each other machine with a unit that reads it, once. Its error comes back as one word of each of
these machines. All machines get the outputs of the last layer, and no error of them. A dense layer that is read by a
dense layer sends n (D - 1) words if all D machines have units of the next.

    t_l = max_d(work_d) + comm_l        every machine waits for the slowest in each layer, forward and backward

The backward of a layer has twice the work of its forward, that of the first layer as much: no input needs an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dure.partition.neurons.assignment import Assignment
from dure.partition.neurons.layers import UnitLayer
from dure.partition.neurons.split import units_at


@dataclass(frozen=True, slots=True)
class LayerTraffic:
    """A layer of units for one sample: its `work` at each machine, in multiplications, and words between machines.

    `forward[d, e]` are the activations that machine d sends to e before the layer, `backward[e, d]` the errors back.
    The outputs of the model are a layer of their own, without work.
    """

    name: str
    work: Tensor
    forward: Tensor
    backward: Tensor

    @property
    def idle(self) -> float:
        """The share of the machines' time that they wait for the slowest, of work alone."""
        slowest = int(self.work.max())
        return 1 - float(self.work.sum()) / (slowest * len(self.work)) if slowest else 0.0

    @property
    def words(self) -> tuple[int, int]:
        """The most words that one machine sends or receives, forward and backward: its link carries them in turn."""
        most = [int(torch.maximum(each.sum(0), each.sum(1)).max()) for each in (self.forward, self.backward)]
        return most[0], most[1]


class Forecast(NamedTuple):
    """Seconds of a mini-batch in which machines compute or communicate, and the share of it that they are idle."""

    compute: float
    communicate: float
    idle: float

    @property
    def seconds(self) -> float:
        """Seconds of the mini-batch."""
        return self.compute + self.communicate


def traffic(layers: Sequence[UnitLayer], assignment: Assignment, machines: int) -> list[LayerTraffic]:
    """The traffic of each layer, and of the outputs."""
    found, sources = [], None
    for layer in layers:
        owned = units_at(assignment[layer.name], machines)
        words = torch.zeros(machines, machines, dtype=torch.long)
        if sources is not None:
            needed = [layer.inputs_of(units) for units in owned]
            pairs = [[int(torch.isin(each, read).sum()) for read in needed] for each in sources]
            words = torch.tensor(pairs).fill_diagonal_(0)
        work = torch.tensor([units.numel() * layer.fan_in for units in owned])
        found.append(LayerTraffic(layer.name, work, words, words.T))
        sources = owned
    assert sources is not None
    outputs = torch.tensor([[units.numel()] * machines for units in sources]).fill_diagonal_(0)
    nothing = torch.zeros_like(outputs)
    return [*found, LayerTraffic("outputs", nothing[0], outputs, nothing)]


def words_sent(found: Sequence[LayerTraffic]) -> tuple[int, int]:
    """The words of a sample that all machines send, forward and backward."""
    return sum(int(each.forward.sum()) for each in found), sum(int(each.backward.sum()) for each in found)


def forecast(found: Sequence[LayerTraffic], seconds: float, words_per_second: float, backward: float) -> Forecast:
    """The forecast of a mini-batch that takes one machine so many `seconds`, in which `backward` is the share of that.

    Each machine sends and receives `words_per_second` of each sample of the mini-batch at the same time. Every two
    machines are supposed to exchange something before each layer, so that all wait for the slowest. If some have their
    inputs before others, the mini-batch takes less.
    """
    machines = len(found[0].work)
    work = torch.stack([each.work for each in found]).double()
    times = torch.tensor([1.0, *[2.0] * (len(found) - 1)], dtype=torch.float64)[:, None] * work
    own = work.sum(0)
    passes = (1 - backward) * work / own.sum(), backward * times / times.sum(0) * own / own.sum()
    compute = seconds * sum(float(each.amax(1).sum()) for each in passes)
    communicate = sum(sum(each.words) for each in found) / words_per_second
    return Forecast(compute, communicate, 1 - seconds / (machines * (compute + communicate)))
