"""SharedLayers linear layers against whole ones."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from dure.partition.tensor.layers import Column, Row
from dure.partition.tensor.plan import SplitPlan
from dure.partition.tensor.ways import Ways
from tests.support.ways import on_ways

PLAN = SplitPlan({"0": Column(), "2": Row()})


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_column_and_a_row_equal_the_whole_layers(size: int) -> None:
    whole = mlp()
    inputs = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    outputs = whole(inputs)
    outputs.square().sum().backward()

    def at(ways: Ways) -> tuple[Tensor, Tensor, dict[str, Tensor], Ways]:
        part = PLAN.apply(deepcopy(whole), ways)
        own = inputs.detach().clone().requires_grad_()
        found = part(own)
        found.square().sum().backward()
        assert own.grad is not None
        return found.detach(), own.grad, {name: each.grad for name, each in part.named_parameters()}, ways

    shards = PLAN.shards(whole, size)
    for rank, (found, gradient, gradients, ways) in enumerate(on_ways(size, at)):
        torch.testing.assert_close(found, outputs.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient, inputs.grad, rtol=1e-13, atol=1e-13)
        assert ways.counts == {"all_reduce": 2}
        for name, each in whole.named_parameters():
            assert each.grad is not None
            right = shards[name][rank].of(each.grad) if name in shards else each.grad
            torch.testing.assert_close(gradients[name], right, rtol=1e-13, atol=1e-13)
