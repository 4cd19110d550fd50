"""Words sent and work for a sample under an assignment of units, computed from the assignment alone.

An activation goes to each other machine with a unit that reads it, once. Its error comes back as one word of each of
these machines. All machines get the outputs of the last layer, and no error of them. A dense layer that is read by a
dense layer sends n (D - 1) words if all D machines have units of the next.

    t_l = max_d(work_d) + comm_l        every machine waits for the slowest in each layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def seconds(self, multiplications: float, words: float) -> float:
        """The seconds of a forward, for machines of so many multiplications and sent words per second."""
        return float(self.work.max()) / multiplications + float(self.forward.sum(1).max()) / words


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
