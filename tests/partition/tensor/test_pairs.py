"""Convolutions that are split by filters, with what lies between two of them, against whole networks."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from support.ways import on_ways
from torch import Tensor, nn

from dure.partition.tensor.plans import megatron, pairs
from dure.partition.tensor.ways import Ways

IMAGES = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def network() -> nn.Sequential:
    """Two pairs of convolutions, with and without batch norm, and a pair across the flattening."""
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular", bias=False), nn.BatchNorm2d(8), nn.ReLU()
    )
    return nn.Sequential(
        first,
        nn.Conv2d(8, 5, 3, padding=1),
        nn.MaxPool2d(2),
        nn.Conv2d(5, 7, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(28, 6),
    ).double()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_split_filters_equal_the_whole_network(size: int) -> None:
    whole, fresh = network(), network()
    inputs = IMAGES.clone().requires_grad_()
    outputs = whole(inputs)
    outputs.square().sum().backward()
    plan = megatron(whole, size)
    assert set(plan.layers) == {"0.0", "0.1", "1", "3", "6"}

    def at(ways: Ways) -> tuple[Tensor, Tensor | None, nn.Module, Ways]:
        part = plan.apply(deepcopy(fresh), ways)
        own = IMAGES.clone().requires_grad_()
        found = part(own)
        found.square().sum().backward()
        return found.detach(), own.grad, part, ways

    shards = plan.shards(whole, size)
    for rank, (found, gradient, part, ways) in enumerate(on_ways(size, at)):
        torch.testing.assert_close(found, outputs.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(gradient, inputs.grad, rtol=0, atol=1e-12)
        assert ways.counts == {"all_reduce": 4}
        own = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        for name, each in (*whole.named_parameters(), *whole.named_buffers()):
            right, mine = (each, own[name]) if each.grad is None else (each.grad, own[name].grad)
            assert mine is not None
            right = shards[name][rank].of(right) if name in shards else right
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layers", "split"),
    [
        ([nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)], {"0", "2"}),
        ([nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4)], set()),
        ([nn.Linear(4, 6), nn.MaxPool1d(2), nn.Linear(3, 4)], set()),
        ([nn.Linear(4, 6), nn.Flatten(), nn.Linear(12, 4)], set()),  # flattening mixes the units of positions
        ([nn.Conv1d(4, 6, 3), nn.Linear(6, 4)], set()),  # the dense layer acts on positions
        ([nn.Conv2d(4, 6, 3), nn.Conv2d(6, 4, 3, groups=2), nn.Conv2d(4, 2, 3)], set()),
        ([nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3)], {"0", "1", "2"}),
        ([nn.Conv2d(4, 6, 3), nn.Flatten(), nn.BatchNorm1d(24), nn.Linear(24, 4)], set()),
        ([nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)], {"2", "4"}),  # 2 units, 3 workers
    ],
)
def test_pairs_have_only_layers_of_single_channels_between(layers: list[nn.Module], split: set[str]) -> None:
    assert {name for name, _ in pairs("", nn.Sequential(*layers), 3)} == split


@pytest.mark.parametrize("name", ["0.0.weight", "1.weight", "1.bias", "6.weight"])
def test_frozen_parameters_stay_frozen(name: str) -> None:
    whole = network()
    whole.get_parameter(name).requires_grad_(False)
    part = on_ways(2, lambda ways: megatron(whole, 2).apply(deepcopy(whole), ways))[1]
    assert {key for key, each in part.named_parameters() if not each.requires_grad} == {name}


def test_dropout_between_two_layers_of_a_pair_is_inside() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 4), nn.Dropout(0.5))
    assert megatron(network, 2).inside == {"1"}
    assert set(megatron(deepcopy(network), 2).layers) == {"0", "2"}


def test_a_layer_that_occurs_again_closes_a_pair_each_time() -> None:
    """A pair across the second softmax would compute another function. Layers that are applied twice stay whole."""
    mixes, twice, tied = nn.Softmax(-1), nn.Linear(6, 6), nn.Linear(6, 6)
    tied.weight = twice.weight
    between = nn.Sequential(nn.Linear(6, 6), mixes, nn.Linear(6, 6), mixes, nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    assert {name for name, _ in pairs("", between, 2)} == {"4", "6"}
    assert list(pairs("", nn.Sequential(nn.Linear(4, 6), twice, nn.Linear(6, 6), twice, nn.Linear(6, 2)), 2)) == []
    assert list(pairs("", nn.Sequential(nn.Linear(4, 6), twice, nn.ReLU(), tied, nn.Linear(6, 2)), 2)) == []
