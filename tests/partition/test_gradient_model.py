"""Models of gradients, by themselves."""

import pytest
import torch
from support.wording import raising

from dure.job.optimizer import OptimizerSpec
from dure.partition.synthesizer import GradientModel, dense


def test_a_new_model_predicts_zero_whatever_it_reads():
    net = dense([3, 4, 4, 2])
    assert [type(layer).__name__ for layer in net] == ["Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert not net(torch.randn(5, 3)).any()


@pytest.mark.parametrize("scale", [1.0, 100.0])
@pytest.mark.parametrize("width", [2, 50])
def test_one_rate_fits_any_scale_and_width(scale, width):
    draws = torch.Generator().manual_seed(3)
    true = torch.randn(width, 3, generator=draws, dtype=torch.float64)
    model = GradientModel([width, 3], OptimizerSpec(lr=0.5), seed=0, dtype=torch.float64)
    errors = []
    for _ in range(300):
        features = scale * torch.randn(8, width, generator=draws, dtype=torch.float64)
        gradient = features @ true / 8
        errors.append(float((model.predict(features) - gradient).norm() / gradient.norm()))
        model.learn(features, gradient)
    assert errors[0] == 1
    assert max(errors) < 2
    assert errors[-1] < 1e-2


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_restored_model_goes_on_as_the_first(optimizer):
    made = [GradientModel([2, 2, 1], OptimizerSpec(optimizer, lr=0.1), seed=seed) for seed in (1, 2)]
    features, gradient = torch.ones(4, 2), torch.ones(4, 1)
    made[0].learn(features, gradient)
    made[1].restore(made[0].state().cloned())
    for each in made:
        each.learn(features, gradient)
    assert torch.equal(made[0].values, made[1].values)
    with raising(ValueError, "of 3"):
        GradientModel([2, 1], OptimizerSpec(optimizer), seed=0).restore(made[0].state())
