"""SpecTrain against its equations, and its predictions against the weights that come."""

import copy

import pytest
import torch
from support.chains import LR, WIDTH, Data, InOrder, flat, play, samples, stage_modules
from support.delayed import back
from support.runs import resolved
from support.wording import raising
from torch import nn

from dure.errors import StrategyError
from dure.job.job import Job
from dure.partition.methods.spectrain import SpecTrain
from dure.partition.orders import pipedream
from dure.run.strategy import Strategy

STEPS = 9
MOMENTUM = 0.7


def recursion(stages, steps, ways, *, momentum=MOMENTUM, lr=LR):
    """F(t) of stage k reads W_k(t - K + k) and B(t) reads W_k(t), moved by `ways` along lr v."""
    versions = [list(zip(stage_modules(stages), [None] * stages, strict=True))]

    def read(t, k, way):
        module, velocity = versions[max(0, t)][k]
        module = copy.deepcopy(module)
        for each, v in zip(module.parameters(), velocity or [], strict=False):
            each.data.sub_(lr * way * v)
        return module

    for t in range(steps):
        value, targets = samples(t)
        kept = []
        for k in range(stages):
            kept.append([])
            for layer in read(t - (stages - 1 - k), k, ways[k][0]):
                kept[k].append(value)
                value = layer(value).detach()
        error = 2 * (value - targets) / value.numel()
        after = []
        for k in reversed(range(stages)):
            error, gradients = back(read(t, k, ways[k][1]), kept[k], error)
            module, before = versions[t][k]
            velocity = (
                gradients if before is None else [momentum * v + g for v, g in zip(before, gradients, strict=True)]
            )
            module = copy.deepcopy(module)
            for each, v in zip(module.parameters(), velocity, strict=True):
                each.data.sub_(lr * v)
            after.insert(0, (module, velocity))
        versions.append(after)
    return flat([module for module, _ in versions[-1]])


def trained(options, stages, momentum=MOMENTUM, steps=STEPS, **rest):
    optimizer = f"momentum:lr={LR},momentum={momentum}"
    return play(f"spectrain:{options}", stages, optimizer=optimizer, steps=steps, **rest)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_run_follows_the_equations(stages):
    looks = [(k // 2 + stages - 1 - k, k // 2) for k in range(stages)]
    assert torch.allclose(
        trained("predicts=velocity", stages).params, recursion(stages, STEPS, looks), rtol=0, atol=1e-12
    )
    carried = [[sum(MOMENTUM**j for j in range(1, s + 1)) for s in pair] for pair in looks]
    assert torch.allclose(
        trained("predicts=carry", stages).params, recursion(stages, STEPS, carried), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("stages", [2, 4])
def test_without_looking_ahead_it_is_the_stale_pipeline_bit_for_bit(stages, monkeypatch):
    stale = play("ddg:weights=current", stages, optimizer=f"momentum:lr={LR},momentum={MOMENTUM}").params
    assert not torch.allclose(trained("predicts=velocity", stages).params, stale, rtol=0, atol=1e-5)
    monkeypatch.setattr(SpecTrain, "ahead_of_forward", lambda pipeline, rank: 0)
    monkeypatch.setattr(SpecTrain, "ahead_of_backward", lambda pipeline, rank: 0)
    assert torch.equal(trained("predicts=velocity", stages).params, stale)


def test_without_momentum_nothing_is_carried_but_the_last_gradient_is_still_followed():
    tiny = 1e-300  # v = g
    stale = play("ddg:weights=current", 4, optimizer=f"momentum:lr={LR},momentum={tiny}").params
    assert torch.equal(trained("predicts=carry", 4, tiny).params, stale)
    assert not torch.allclose(trained("predicts=velocity", 4, tiny).params, stale, rtol=0, atol=1e-5)


def test_one_stage_is_sgd_with_momentum_bit_for_bit():
    sgd = play("gpipe:micro=1", 1, optimizer=f"momentum:lr={LR},momentum={MOMENTUM}").params
    assert torch.equal(trained("predicts=velocity", 1).params, sgd)


class Shift(nn.Module):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, inputs):
        return inputs + self.by


def constant_gradients():
    """A loss that is linear in all parameters."""
    inputs = torch.ones(21, WIDTH, dtype=torch.float64)
    return Job(
        name="shifts",
        model=lambda: nn.Sequential(*(Shift() for _ in range(7))),
        loss=lambda outputs, targets: (outputs * torch.arange(WIDTH)).mean(),
        train=Data(inputs, inputs),
        batch_size=3,
        split=InOrder(),
    )


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_predictions_are_exact_while_gradients_are_constant(stages, monkeypatch):
    predicted, reached = [], {}

    def reading(reads, looks):
        def read(pipeline, stage, batch):
            reached[stage.rank, stage.version] = stage.newest.clone()
            weights = reads(pipeline, stage, batch)
            if batch > 80:  # the velocity has reached its last value
                predicted.append((stage.rank, stage.version + looks(pipeline, stage.rank), weights.clone()))
            return weights

        return read

    for name, looks in (("forward", SpecTrain.ahead_of_forward), ("backward", SpecTrain.ahead_of_backward)):
        monkeypatch.setattr(SpecTrain, f"{name}_reads", reading(getattr(SpecTrain, f"{name}_reads"), looks))
    trained("predicts=velocity", stages, momentum=0.5, steps=100, job=constant_gradients())
    pairs = [(weights, reached[rank, version]) for rank, version, weights in predicted if (rank, version) in reached]
    assert len(pairs) > 20 * stages
    for weights, came in pairs:
        assert torch.allclose(weights, came, rtol=1e-12, atol=0)


def ticks(stages, batches):
    """The tick in which each action runs if each takes one; an order of its own, written for this test."""
    orders = [
        [action for action in pipedream(rank, stages, range(batches)) if action.kind != "U"] for rank in range(stages)
    ]
    done, tick = {}, 0
    while any(orders):
        tick += 1
        ready = []
        for rank, order in enumerate(orders):
            if order:
                kind, batch = order[0].kind, order[0].batch
                needs = [("F", rank - 1)] if kind == "F" and rank else []
                needs += [("B", rank + 1)] if kind == "B" and rank < stages - 1 else []
                if all((kind, batch, at) in done for kind, at in needs):
                    ready.append((kind, batch, rank))
        for kind, batch, rank in ready:
            orders[rank].pop(0)
            done[kind, batch, rank] = tick
    return done


@pytest.mark.parametrize("stages", range(1, 8))
def test_the_closed_forms_count_the_updates_until_the_first_stage_goes_backward(stages):
    at, pipeline, batch = ticks(stages, 40), SpecTrain(stages=stages), 20
    for rank in range(stages):
        updates = [
            tick for (kind, other, where), tick in at.items() if kind == "B" and where == rank and other != batch
        ]
        target = at["B", batch, 0]
        for kind, formula in (("F", pipeline.ahead_of_forward), ("B", pipeline.ahead_of_backward)):
            assert sum(at[kind, batch, rank] <= tick <= target for tick in updates) == formula(rank)


@pytest.mark.parametrize("optimizer", ["sgd:lr=0.1", "adam:lr=0.1"])
def test_an_optimizer_without_velocity_is_refused(optimizer):
    with raising(StrategyError, "momentum"):
        resolved("digits-mlp", "bsp", partition="spectrain:stages=2", workers=2, on="virtual", optimizer=optimizer)


def test_servers_with_the_optimizer_are_refused():
    with raising(StrategyError, "optimizer"):
        Strategy.parse("bsp ps spectrain:stages=2")
    assert str(Strategy.parse("averaging ps spectrain:stages=2"))


def test_parameters_that_mean_nothing_are_refused():
    with raising(ValueError, "remat"):
        SpecTrain(remat=True)
