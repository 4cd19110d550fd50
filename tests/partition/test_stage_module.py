"""The part of a model at one worker of a pipeline."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dure
from dure.job.replica import Replica
from dure.partition.layout import StageLayout
from dure.partition.stage_module import StageModule


class Net(nn.Module):
    """A parameter and buffers of the model itself, which a block has to hold."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x):
        return self.last((self.first(x) + self.shift) * self.scale)


class Tail(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.last, self.moved_by = module.last, module.shift
        self.register_buffer("factor", module.scale)
        self.register_buffer("zero", torch.zeros(4))

    def forward(self, x):
        return self.last((x + self.moved_by) * self.factor + self.zero)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_blocks_hold_the_tensors_of_the_module_after_a_move(device):
    """`Module.to("meta")` replaces parameters, as that of some accelerators does."""
    data = dure.Data(torch.randn(6, 4), torch.zeros(6, dtype=torch.int64))
    job = dure.Job(Net, cross_entropy, data, stages=lambda module: [module.first, Tail(module)])
    layout = StageLayout(job, dure.GPipe(stages=2), Replica(job.build()))
    stage = StageModule(layout, 1, 0, device)
    ((tail,),) = stage._blocks
    own = stage.replica.module
    assert tail.moved_by is own.shift
    assert tail.factor is own.scale
    assert tail.last.weight is own.last.weight
    assert [slot[2] for slot in stage._slots[0]] == [0, 1, 2]
    assert {each.device.type for each in (*tail.parameters(), *tail.buffers())} == {device}
    assert [layer.name for layer in stage.replica.layers] == ["shift", "last.weight", "last.bias"]
