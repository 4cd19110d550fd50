"""Sleep in place of compute: gradients that come from the last layer to the first, and only when asked for."""

import pytest
import torch

from dure.job.gradient_engine import GradientEngine
from dure.planner.probe import short_runs
from dure.planner.probe.measure import MOST_STEPS, STEPS, step_seconds
from dure.planner.probe.short_runs import SLOPE, synthetic_job


def test_time_is_spent_a_third_before_and_the_rest_by_layer_from_the_last(monkeypatch):
    slept = []
    monkeypatch.setattr(short_runs.time, "sleep", slept.append)
    job = synthetic_job([300, 100], 0.9)
    net = job.build()
    filled = []
    for index, layer in enumerate(net.layers):
        layer.register_post_accumulate_grad_hook(lambda _, i=index: filled.append((i, len(slept))))
    inputs, targets = job.train.batch(torch.arange(1))
    job.loss(net(inputs), targets).backward()
    assert slept == pytest.approx([0.3, 0.15, 0.45])
    assert filled == [(1, 2), (0, 3)]
    assert all(torch.equal(layer.grad, torch.full_like(layer, SLOPE)) for layer in net.layers)


def test_an_evaluation_takes_no_time(monkeypatch):
    slept = []
    monkeypatch.setattr(short_runs.time, "sleep", slept.append)
    net = synthetic_job([4], 5.0).build()
    with torch.no_grad():
        without_gradients = net(torch.ones(3, 1))
    assert slept == []
    assert torch.equal(without_gradients, net(torch.ones(3, 1)))
    assert slept == [pytest.approx(5.0 / 3)]


def test_steps_are_timed_one_by_one_and_the_first_is_left_out(monkeypatch):
    asked = []
    one = GradientEngine.one
    monkeypatch.setattr(GradientEngine, "one", lambda self, work: asked.append(work.step) or one(self, work))
    seconds = step_seconds(synthetic_job([8], 0.0))
    assert STEPS < len(seconds) <= MOST_STEPS  # they are short
    assert asked == list(range(len(seconds) + 1))
