"""DDG against its recursion, written from the paper's equations as plain loops."""

import copy

import pytest
import torch
from support import chains
from support.chains import BATCH, LR, WIDTH, drained, flat, play, samples, split, stage_modules
from support.runs import local
from support.wording import raising
from torch import nn
from torch.nn.functional import mse_loss

import dure

STEPS = 9


def through(stages, inputs):
    for stage in stages:
        inputs = stage(inputs)
    return inputs


def step(module, gradients):
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter.add_(gradient, alpha=-LR)


def snapshot_recursion(num_stages, segments):
    """W_k(t + 1) = W_k(t) - lr grad_k f(x_s; w(s)), s = t - K + k, until each stage has used all mini-batches."""
    now, then = stage_modules(num_stages), {}
    for batches in segments:
        for t in range(batches.start, batches.stop + num_stages - 1):
            then[t] = copy.deepcopy(now)
            for k in range(num_stages):
                s = t - (num_stages - 1 - k)
                if s in batches:
                    inputs, targets = samples(s)
                    loss = mse_loss(through(then[s], inputs), targets)
                    step(now[k], torch.autograd.grad(loss, list(then[s][k].parameters())))
    return flat(now)


def current_recursion(num_stages, steps):
    """The backward of sample s multiplies by the newest weights, and its factors are the activations of the forward."""
    now = stage_modules(num_stages)
    kept, sent = {}, {}
    for t in range(steps + num_stages - 1):
        before = copy.deepcopy(now)  # a gradient that travels down was computed in the iteration before
        if t < steps:
            value = samples(t)[0]
            for k, module in enumerate(before):
                kept[t, k] = []
                for layer in module:
                    kept[t, k].append(value)
                    value = layer(value).detach()
            loss_gradient = 2 * (value - samples(t)[1]) / value.numel()
            sent[t, num_stages - 1] = loss_gradient
        for k in range(num_stages):
            s = t - (num_stages - 1 - k)
            if 0 <= s < steps:
                sent[s, k - 1], gradients = backward_by_hand(before[k], kept[s, k], sent[s, k])
                step(now[k], gradients)
    return flat(now)


def backward_by_hand(module, inputs, gradient):
    """The gradient of the inputs, and those of the parameters in order, without autograd."""
    found = []
    for layer, value in zip(reversed(module), reversed(inputs), strict=True):
        if isinstance(layer, nn.Linear):
            found = [gradient.T @ value, gradient.sum(dim=0), *found]
            gradient = gradient @ layer.weight.detach()
        else:
            gradient = gradient * (1 - torch.tanh(value) ** 2)
    return gradient, found


@pytest.mark.parametrize(("num_stages", "every"), [(2, 0), (4, 0), (4, 5)])
def test_snapshots_follow_the_recursion_bit_for_bit(num_stages, every):
    run = play("ddg", num_stages, checkpoint_every=every or None)
    assert torch.equal(run.params, snapshot_recursion(num_stages, drained(STEPS, every)))


def test_current_weights_follow_their_own_recursion():
    run = play("ddg:weights=current", 4)
    assert torch.allclose(run.params, current_recursion(4, STEPS), rtol=0, atol=1e-13)
    assert not torch.allclose(run.params, play("ddg", 4).params, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", ["snapshot", "current"])
def test_one_module_is_sgd_bit_for_bit(weights):
    module = nn.Sequential(*stage_modules(1))
    for batch in range(STEPS):
        inputs, targets = samples(batch)
        step(module, torch.autograd.grad(mse_loss(module(inputs), targets), list(module.parameters())))
    assert torch.equal(play(f"ddg:weights={weights}", 1).params, flat([module]))


@pytest.mark.parametrize("weights", ["snapshot", "current"])
def test_without_steps_each_update_is_the_exact_gradient_of_its_mini_batch(weights):
    stages = stage_modules(4)
    run = play(f"ddg:weights={weights}", 4, lr=0.0)
    for batch in range(STEPS):
        inputs, targets = samples(batch)
        loss = mse_loss(through(stages, inputs), targets)
        for k, stage in enumerate(stages):
            exact = torch.autograd.grad(loss, list(stage.parameters()), retain_graph=True)
            assert torch.equal(run.gradients[k][batch], torch.cat([each.reshape(-1) for each in exact]))


def test_delays_and_versions_are_those_of_the_paper():
    snapshot, current = play("ddg", 4), play("ddg:weights=current", 4)
    for run in (snapshot, current):
        for k, stage in enumerate(run.stages):
            delay = 4 - 1 - k
            filling = dict.fromkeys(range(delay), 1)  # the first updates of a module follow fewer updates
            assert stage.counts.staleness == filling | {delay: STEPS - delay}
            assert stage.counts.most_sets == delay + 1
    assert [stage.counts.most_versions for stage in snapshot.stages] == [4, 3, 2, 1]  # the newest included
    assert [stage.counts.most_versions for stage in current.stages] == [1, 1, 1, 1]


def test_snapshots_make_ddg_pipedream_and_rematerialisation_changes_no_bit():
    run = play("ddg", 3)
    assert torch.equal(run.params, play("pipedream", 3).params)
    assert torch.equal(run.params, play("ddg:remat=true", 3).params)
    assert run.finished.seconds == play("pipedream", 3).finished.seconds


@pytest.mark.long
def test_on_processes_bits_and_bytes_are_those_of_virtual_time():
    options = {"partition": split("ddg", 3), "workers": 3, "steps": STEPS, "dtype": "float64"}
    real, modelled = local(f"{chains.__file__}:dense", "bsp", **options), play("ddg", 3)
    assert torch.equal(real.params, modelled.params)
    assert real.summary["bytes_sent"] == modelled.finished.summary["bytes_sent"] == 2 * 2 * STEPS * BATCH * WIDTH * 8


def test_parameters_that_exclude_each_other_are_refused():
    with raising(ValueError, "features-replay"):
        dure.DDG(weights="current", remat=True)
