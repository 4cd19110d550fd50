"""Pipelines with a flush against SGD on whole mini-batches, written as plain loops."""

from dataclasses import replace

import pytest
import torch
from support.chains import LR, chain, data, free_network, linear, model, play
from support.wording import raising
from torch.nn.functional import mse_loss

import dure
from dure.partition.methods.gpipe import GPipe
from dure.partition.stage import Stage

STEPS = 4
BATCH = 7

METHODS = [
    ("gpipe", 4, None),
    ("1f1b", 4, None),
    ("interleaved:chunks=2", 2, 4),
    ("zero-bubble:schedule=h1", 4, None),
    ("zero-bubble:schedule=h2", 3, None),
    ("zero-bubble:schedule=v", 2, 4),
]


def job(module=model):
    return replace(chain(module), batch_size=BATCH)


def parts(micro):
    """The micro-batches as numbers of samples in the mini-batch; the first ones have one sample more."""
    return torch.arange(BATCH).tensor_split(micro)


def sgd(micro=1, steps=STEPS, module=model):
    """SGD on whole mini-batches, or on micro-batches whose gradients are summed as |u| / T grad(u)."""
    whole = job(module).build(0)
    inputs, targets = data().batch(torch.arange(21))
    for batch in range(steps):
        taken = (torch.arange(BATCH) + batch * BATCH) % 21
        sums = None
        for part in parts(micro):
            own = taken[part]
            loss = mse_loss(whole(inputs[own]), targets[own]) * (len(own) / BATCH)
            found = torch.autograd.grad(loss, list(whole.parameters()))
            sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
        with torch.no_grad():
            for parameter, gradient in zip(whole.parameters(), sums, strict=True):
                parameter.add_(gradient, alpha=-LR)
    return torch.cat([each.detach().reshape(-1) for each in whole.parameters()])


def trained(strategy, stages, depth=None, micro=4, options="", module=model):
    colon = "," if ":" in strategy else ":"
    return play(f"{strategy}{colon}micro={micro}{options}", stages, depth=depth, job=job(module), steps=STEPS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "stages", "depth"), METHODS)
@pytest.mark.parametrize("micro", [1, 4, 7])  # 7 divides the mini-batch, 4 makes micro-batches of 1 and 2 samples
def test_the_result_is_that_of_sgd(strategy, stages, depth, micro):
    if strategy.startswith("interleaved") and micro == 7:
        micro = 6  # rounds of 2
    run = trained(strategy, stages, depth, micro)
    assert torch.allclose(run.params, sgd(), rtol=1e-12, atol=1e-15)
    for stage in run.stages:
        assert stage.counts.staleness == {0: STEPS}
        assert stage.counts.most_versions == 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "stages", "depth"), METHODS)
def test_rematerialisation_changes_no_bit(strategy, stages, depth):
    kept, again = (trained(strategy, stages, depth, options=f",remat={remat}").params for remat in ("false", "true"))
    assert torch.equal(kept, again)


def test_gpipe_computes_forwards_again_while_gradients_travel_and_may_keep_the_last():
    """Four stages and micro-batches, f = b: one stage after another waits for the first gradient."""
    whole, network = replace(chain(model), batch_size=8), {"cluster": free_network(4), "steps": STEPS}
    plain, again, last = (
        play(f"gpipe:micro=4{options}", 4, job=whole, **network)
        for options in ("", ",remat=true", ",remat=true,keep_last=true")
    )
    tick = plain.finished.seconds / (2 * (4 + 3))
    assert again.finished.seconds == pytest.approx(tick * (4 + 3 + 2 * 4 + 3), rel=1e-9)
    assert last.finished.seconds == pytest.approx(tick * (4 + 3 + 2 * 4 + 3 - 1), rel=1e-9)
    assert torch.equal(plain.params, again.params)
    assert torch.equal(plain.params, last.params)
    with raising(ValueError, "keep_last=true is for remat=true"):
        GPipe(keep_last=True)


@pytest.mark.parametrize(
    "strategy", ["1f1b", "interleaved:chunks=1", "zero-bubble:schedule=h1", "zero-bubble:schedule=h2"]
)
def test_one_stage_is_gradient_accumulation_bit_for_bit(strategy):
    assert torch.equal(trained(strategy, 1).params, sgd(micro=4))
    assert torch.equal(trained(strategy, 1, micro=1).params, sgd())


def test_one_stage_of_gpipe_accumulates_from_the_last_micro_batch_on(monkeypatch):
    assert torch.equal(trained("gpipe", 1, micro=1).params, sgd())
    backwards = trained("gpipe", 1, micro=4).params
    monkeypatch.setattr(f"{__name__}.parts", lambda micro, own=parts: list(reversed(own(micro))))
    assert torch.equal(backwards, sgd(micro=4))


def test_a_deep_v_and_three_chunks_are_sgd():
    for strategy, stages in (("zero-bubble:schedule=v", 3), ("interleaved:chunks=3", 2), ("interleaved:chunks=2", 3)):
        run = trained(strategy, stages, 6, 6, module=linear)
        assert torch.allclose(run.params, sgd(module=linear), rtol=1e-12, atol=1e-15)


def test_the_loss_of_a_v_is_at_the_first_worker():
    v, straight = trained("zero-bubble:schedule=v", 2, 4), trained("1f1b", 4)
    assert v.finished.summary["loss"] == pytest.approx(straight.finished.summary["loss"], rel=1e-12)
    assert v.finished.summary["samples"] == straight.finished.summary["samples"] == STEPS * BATCH


@pytest.mark.parametrize(
    ("strategy", "stages", "depth", "micro", "sets"),
    [
        ("gpipe", 4, None, 6, [6, 6, 6, 6]),
        ("1f1b", 4, None, 6, [4, 3, 2, 1]),
        ("1f1b", 4, None, 3, [3, 3, 2, 1]),
        ("zero-bubble:schedule=h1", 4, None, 6, [4, 4, 4, 4]),
        ("interleaved:chunks=2", 2, 4, 6, [5, 3]),
        ("zero-bubble:schedule=v", 2, 4, 6, [4, 4]),
    ],
)
def test_a_stage_keeps_as_many_activations_as_the_papers_say(strategy, stages, depth, micro, sets):
    run = trained(strategy, stages, depth, micro)
    assert [stage.counts.most_sets for stage in run.stages] == sets


def test_shares_that_are_forgotten_are_found(monkeypatch):
    begun = Stage._begun

    def forgetting(*args):
        passed = begun(*args)
        passed.share = 1.0
        return passed

    monkeypatch.setattr(Stage, "_begun", forgetting)
    assert not torch.allclose(trained("gpipe", 4).params, sgd(), rtol=0, atol=1e-3)


def test_equal_shares_of_unequal_micro_batches_are_found(monkeypatch):
    begun = Stage._begun

    def equal(*args):
        passed = begun(*args)
        passed.share = 1 / 4
        return passed

    monkeypatch.setattr(Stage, "_begun", equal)
    assert not torch.allclose(trained("gpipe", 4).params, sgd(), rtol=0, atol=1e-6)


def test_an_update_before_a_forward_of_the_same_mini_batch_is_found(monkeypatch):
    """The weights of the mini-batch change under it."""
    read = GPipe.backward_reads

    def changing(pipeline, stage, batch):
        stage.requester.params.mul_(1.001)
        return read(pipeline, stage, batch)

    monkeypatch.setattr(GPipe, "backward_reads", changing)
    assert not torch.allclose(trained("gpipe", 4).params, sgd(), rtol=0, atol=1e-6)


def test_parameters_that_mean_nothing_are_refused():
    with raising(ValueError, "micro=8"):
        dure.Interleaved(stages=4, micro=9)
    with raising(ValueError, "chunks=0"):
        dure.Interleaved(chunks=0)
