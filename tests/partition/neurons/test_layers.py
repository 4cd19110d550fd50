"""The layers of units that are found in a model, and models that are refused."""

from __future__ import annotations

import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn.functional import conv2d

from dure.errors import UsageError
from dure.job.models.local import LocallyConnected2d
from dure.partition.neurons.layers import unit_model


def test_layers_of_a_nested_sequence_are_found_in_order() -> None:
    local = LocallyConnected2d((1, 5, 4), 2, 2)
    model = nn.Sequential(local, nn.Sequential(nn.Dropout(0.5), nn.Flatten()), nn.Linear(24, 3), nn.Dropout(0.5))
    layers, inside = unit_model(model)
    assert [(each.name, each.inputs, each.grid) for each in layers] == [("0", 20, (2, 4, 3)), ("2", 24, (1, 1, 3))]
    assert inside == {"1.0"}


def test_a_locally_connected_layer_with_one_weight_everywhere_is_a_convolution() -> None:
    layer, kernel = LocallyConnected2d((3, 6, 7), 2, 3, stride=2).double(), torch.randn(2, 3, 3, 3).double()
    inputs = torch.randn(4, 3, 6, 7).double()
    with torch.no_grad():
        layer.weight.copy_(kernel.flatten(1).repeat_interleave(layer.weight.shape[0] // 2, dim=0))
        layer.bias.zero_()
    torch.testing.assert_close(layer(inputs), conv2d(inputs, kernel, stride=2), rtol=1e-12, atol=1e-12)
    read = inputs.flatten(1)[:, layer.reads()]
    torch.testing.assert_close((read * layer.weight).sum(-1), layer(inputs).flatten(1), rtol=1e-12, atol=1e-12)


def again() -> nn.Sequential:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


class Residual(nn.Sequential):
    """A sequence whose forward is not that of its layers in order."""

    def forward(self, inputs):
        return inputs + super().forward(inputs)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(3, 3), "Linear"),
        (nn.Sequential(nn.ReLU()), "connected"),
        (
            nn.Sequential(nn.Linear(3, 3), nn.Softmax(-1), nn.Linear(3, 3)),
            "1",
        ),
        (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)), "1"),
        (nn.Sequential(LocallyConnected2d((1, 4, 4), 1, 2), nn.Linear(3, 3)), "has 9"),
        (nn.Sequential(LocallyConnected2d((1, 4, 4), 3, 4), nn.Linear(3, 3)), "Flatten"),
        (Residual(nn.Linear(3, 3)), "Residual"),
        (nn.Sequential(Residual(nn.Linear(3, 3)), nn.Linear(3, 3)), "0"),
        (again(), "and 2"),
    ],
)
def test_models_that_cannot_be_assigned_are_refused(model: nn.Module, message: str) -> None:
    with raising(UsageError, message):
        unit_model(model)


def test_a_patch_larger_than_the_grid_is_refused() -> None:
    with raising(UsageError, "from 1"):
        LocallyConnected2d((1, 4, 5), 1, 5)
