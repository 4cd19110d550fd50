"""The part of a model at one worker of a pipeline."""

import pytest
import torch
from support.chains import chain, model
from support.runs import virtual
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

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


class Checkpointed(nn.Sequential):
    """Keeps no activations: the backward computes the forward of its layers again."""

    def forward(self, inputs):
        return checkpoint(super().forward, inputs, use_reentrant=False)


def trained(partition, module):
    return virtual(chain(module), f"bsp {partition}", workers=2, steps=9).params


@pytest.mark.parametrize("method", ["pipedream:", "pipedream:sync=vertical,"])
def test_activation_checkpoints_compute_again_at_the_weights_of_their_forward(method):
    def checkpointed():
        layers = list(model())
        return nn.Sequential(layers[0], Checkpointed(layers[1], layers[2]), *layers[3:])

    found = trained(f"{method}stages=2,cuts=2", checkpointed)
    assert torch.equal(found, trained(f"{method}stages=2,cuts=3", model))


def test_activation_checkpoints_over_all_of_a_stage_with_current_weights_are_features_replay():
    def checkpointed():
        layers = list(model())
        return nn.Sequential(Checkpointed(*layers[:4]), *layers[4:])

    found = trained("ddg:weights=current,stages=2,cuts=1", checkpointed)
    assert torch.equal(found, trained("features-replay:stages=2,cuts=4", model))
    assert not torch.equal(found, trained("ddg:weights=current,stages=2,cuts=4", model))
