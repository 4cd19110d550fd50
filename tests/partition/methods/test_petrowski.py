"""Pipelined back-propagation against its equations, in cycles and without autograd."""

import pytest
import torch
from support.chains import flat, play, stage_modules
from support.delayed import cycles, delayed, loss_of, sgd
from support.wording import raising

import dure

STEPS = 9


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_run_follows_the_equations(stages):
    run = play("petrowski", stages)
    params, gradients = cycles(stages, STEPS)
    assert torch.allclose(run.params, params, rtol=0, atol=1e-13)
    for mine, theirs in zip(run.gradients, gradients, strict=True):
        assert torch.allclose(torch.stack(mine), torch.stack(theirs), rtol=0, atol=1e-13)


@pytest.mark.parametrize("stages", [1, 3, 4])
def test_overwritten_activations_follow_their_equations(stages):
    run = play("petrowski:acts=overwritten", stages)
    params, gradients = cycles(stages, STEPS, overwritten=True)
    assert torch.allclose(run.params, params, rtol=0, atol=1e-13)
    for mine, theirs in zip(run.gradients, gradients, strict=True):
        assert torch.allclose(torch.stack(mine), torch.stack(theirs), rtol=0, atol=1e-13)
    assert [stage.counts.most_sets for stage in run.stages] == [1] * stages
    if stages > 1:
        kept = play("petrowski", stages)
        assert not torch.allclose(run.params, kept.params, rtol=0, atol=1e-3)
        nbytes = [stage.counts.most_activation_nbytes for stage in run.stages]
        sets = [stage.counts.most_sets for stage in kept.stages]
        assert [stage.counts.most_activation_nbytes for stage in kept.stages] == [
            each * count for each, count in zip(nbytes, sets, strict=True)
        ]


def test_its_gradient_is_that_of_no_weights():
    """A stash in the same order changes the result."""
    assert not torch.allclose(play("petrowski", 4).params, delayed([6, 4, 2, 0], STEPS), rtol=0, atol=1e-5)


def test_one_stage_is_sgd_bit_for_bit():
    assert torch.equal(play("petrowski", 1).params, sgd(STEPS))


def test_without_steps_each_gradient_is_exact():
    run, stages = play("petrowski", 4, lr=0.0), stage_modules(4)
    for batch in range(STEPS):
        for k, stage in enumerate(stages):
            exact = torch.autograd.grad(loss_of(stages, batch), list(stage.parameters()))
            assert torch.equal(run.gradients[k][batch], torch.cat([each.reshape(-1) for each in exact]))
    assert torch.equal(run.params, flat(stages))


@pytest.mark.parametrize("stages", [2, 4])
def test_staleness_versions_and_activations_are_those_of_the_paper(stages):
    run = play("petrowski", stages)
    for k, stage in enumerate(run.stages):
        delay = 2 * (stages - 1 - k)
        assert stage.pipeline.staleness(k) == delay
        assert stage.counts.staleness == dict.fromkeys(range(delay), 1) | {delay: STEPS - delay}
        assert stage.counts.most_versions == 1
        assert stage.counts.most_sets == delay + 1


def test_rematerialisation_is_refused():
    with raising(ValueError, "features-replay"):
        dure.Petrowski(remat=True)
