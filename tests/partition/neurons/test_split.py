"""Layers of units at several machines against the whole model, for any assignment."""

from __future__ import annotations

from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from dure.job.models.local import LocallyConnected2d
from dure.partition.methods.neurons import split_plan
from dure.partition.neurons.assignment import Assignment, by_layers, even, shuffled, traffic
from dure.partition.neurons.layers import UnitLayer, unit_model
from dure.partition.tensor.ways import CollectiveCall, Recording, Ways
from tests.support.ways import on_ways

SAMPLES = 3


def dense() -> nn.Sequential:
    layers = [nn.Linear(5, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 8, bias=False), nn.Sigmoid()), nn.Linear(8, 6)]
    return nn.Sequential(nn.Flatten(), *layers, nn.LogSoftmax(-1))


def local() -> nn.Sequential:
    first = LocallyConnected2d((1, 7, 6), 2, 3)
    second = LocallyConnected2d(first.outputs, 3, 2, stride=2)
    return nn.Sequential(first, nn.Tanh(), second, nn.ReLU(), nn.Flatten(), nn.Linear(12, 6))


def last_local() -> nn.Sequential:
    first = LocallyConnected2d((2, 5, 5), 2, 2)
    return nn.Sequential(first, nn.Tanh(), LocallyConnected2d(first.outputs, 2, 3), nn.Flatten())


MODELS = {"dense": (dense, (5,)), "local": (local, (1, 7, 6)), "last_local": (last_local, (2, 5, 5))}


def uneven(layers: list[UnitLayer], machines: int, seed: int) -> Assignment:
    """Every unit at any machine, most at the first; a machine may have none of a layer."""
    generator = torch.Generator().manual_seed(seed)
    chances = torch.arange(machines, 0, -1, dtype=torch.float64).square()
    return {each.name: torch.multinomial(chances, each.units, replacement=True, generator=generator) for each in layers}


def assignments(layers: list[UnitLayer], machines: int) -> list[Assignment]:
    found = [even(layers, machines), shuffled(layers, machines, 1), uneven(layers, machines, 2)]
    return [*found, by_layers(layers, machines)] if machines <= len(layers) else found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "machines"), list(product(MODELS, range(1, 6))))
def test_any_assignment_equals_one_machine_and_sends_each_unit_once_to_a_machine(name: str, machines: int) -> None:
    torch.manual_seed(machines)
    build, shape = MODELS[name]
    whole = build().double()
    inputs = torch.randn(SAMPLES, *shape, dtype=torch.float64)
    outputs = whole(inputs)
    cotangent = torch.randn_like(outputs)
    (outputs * cotangent).sum().backward()
    layers, inside = unit_model(whole)
    for assignment in assignments(list(layers), machines):
        plan = split_plan(layers, assignment, inside)

        def at(ways: Ways, plan: object = plan) -> tuple[Tensor, dict[str, Tensor], list[int]]:
            sent, carry = [0], ways.carry_out

            def counted(call: CollectiveCall) -> object:
                each = call.sends * machines if call.kind == "all_gather" else call.sends
                sent[-1] += sum(tensor.numel() for rank, tensor in enumerate(each) if rank != ways.rank)
                return carry(call)

            ways.carry_out = counted
            part = plan.apply(deepcopy(whole), ways)  # type: ignore[attr-defined]
            found = part(inputs)
            sent.append(0)
            (found * cotangent).sum().backward()
            return found.detach(), {name: each.grad for name, each in part.named_parameters()}, sent

        shards = plan.shards(whole, machines)
        right = traffic(layers, assignment, machines)
        for machine, (found, gradients, sent) in enumerate(on_ways(machines, at)):
            torch.testing.assert_close(found, outputs.detach(), rtol=1e-12, atol=1e-12)
            for parameter, each in whole.named_parameters():
                assert each.grad is not None
                expected = shards[parameter][machine].of(each.grad)
                torch.testing.assert_close(gradients[parameter], expected, rtol=1e-12, atol=1e-12)
            words = [sum(int(getattr(each, way)[machine].sum()) for each in right) for way in ("forward", "backward")]
            assert sent == [SAMPLES * each for each in words]


def test_words_are_counted_at_the_edges_of_the_network() -> None:
    """An edge is an entry of a layer's Jacobian. Machines without a unit of a layer need no input."""
    whole, machines = local().double(), 4
    layers, _ = unit_model(whole)
    assignment = uneven(list(layers), machines, 5) | by_layers([layers[-1]], 1)
    found, sizes = traffic(layers, assignment, machines), {"2": whole[0].outputs, "5": (12,)}
    for before, after, counted in zip(layers, layers[1:], found[1:], strict=False):
        point = torch.randn(1, *sizes[after.name], dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(whole[int(after.name)], point)
        edges = jacobian.reshape(after.units, before.units) != 0  # type: ignore[union-attr]
        owners, readers = assignment[before.name].tolist(), assignment[after.name]
        pairs = {(unit, e) for e in range(machines) for unit in edges[readers == e].any(0).nonzero().flatten().tolist()}
        remote = [(owners[unit], e) for unit, e in pairs if owners[unit] != e]
        assert {(d, e): int(counted.forward[d, e]) for d, e in product(range(machines), repeat=2)} == {
            (d, e): remote.count((d, e)) for d, e in product(range(machines), repeat=2)
        }


def test_dropout_between_layers_draws_at_each_machine_and_is_the_same_behind_them() -> None:
    model = nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5), nn.Linear(40, 2), nn.Dropout(0.5))
    layers, inside = unit_model(model)
    plan = split_plan(layers, even(layers, 2), inside)
    masks, states = [], []
    for rank in range(2):
        part = plan.apply(deepcopy(model), Ways(rank, 2, Recording().carry_out))
        part[1].register_forward_hook(lambda layer, inputs, outputs: masks.append(outputs == 0))
        torch.manual_seed(0)
        part(torch.ones(1, 3))
        states.append(torch.get_rng_state())
    assert not torch.equal(*masks)
    assert torch.equal(*states)


def test_every_parameter_has_one_owner() -> None:
    whole = local()
    layers, inside = unit_model(whole)
    shards = split_plan(layers, shuffled(layers, 3, 0), inside).shards(whole, 3)
    for name, each in whole.named_parameters():
        assert sorted(torch.cat([shard.index for shard in shards[name]]).tolist()) == list(range(each.shape[0]))
