"""Schedules: the factors that the formulas give, and mistakes. Parameter groups as segments of the flat parameters."""

import math

import pytest
import torch
from support.rate_jobs import differing, made
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.optimizer import GroupRange, OptimizerSpec
from dure.job.rates import SCHEDULES, Rates, factor_at, rates_of, scaled, schedule_of
from dure.job.replica import Replica


def test_cosine_warms_up_and_falls_to_its_floor():
    cosine = schedule_of("cosine:steps=10,warmup=4,floor=0.2")
    assert [cosine(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4) == 1
    assert cosine(7) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2)
    assert cosine(10) == cosine(99) == pytest.approx(0.2)


def test_linear_falls_on_a_line():
    linear = schedule_of("linear:steps=6,warmup=2")
    assert [linear(step) for step in range(8)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]


@pytest.mark.parametrize(
    ("text", "kind", "options"),
    [
        ("step:every=3,factor=0.5", torch.optim.lr_scheduler.StepLR, {"step_size": 3, "gamma": 0.5}),
        ("cosine:steps=9", torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 9}),
    ],
)
def test_they_are_pytorchs(text, kind, options):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    theirs, ours = kind(optimizer, **options), schedule_of(text)
    for step in range(9):
        assert 2.0 * ours(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        optimizer.step()
        theirs.step()


def test_a_function_is_a_schedule_as_it_is():
    assert schedule_of(math.sqrt) is math.sqrt
    assert schedule_of(None) is None
    assert set(SCHEDULES) == {"cosine", "linear", "step"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("cosin:steps=3", "cosin:steps=3"),
        ("cosine", "steps=1000"),
        ("step", "every"),
        ("cosine:steps=3,warmup=3", "warmup"),
        ("linear:steps=3,floor=2", "share"),
        ("step:every=0", "1"),
        (0.5, "function"),
    ],
)
def test_what_is_no_schedule_is_refused(given, said):
    with raising(UsageError, said):
        schedule_of(given)


def test_a_scheduler_of_pytorch_is_refused():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    with raising(UsageError, "LambdaLR"):
        schedule_of(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
    with raising(UsageError, "StepLR"):
        schedule_of(torch.optim.lr_scheduler.StepLR)


def test_an_error_of_a_schedule_is_named_with_its_step():
    with raising(UsageError, "Job.schedule"):
        factor_at(lambda step: 1 / (step - 3), 3)


@pytest.mark.parametrize("factor", [-1, math.nan, math.inf, None, "fast"])
def test_a_factor_is_a_finite_number(factor):
    with raising(UsageError, "step 3"):
        factor_at(lambda step: factor, 3)


SPEC = OptimizerSpec("adamw", lr=0.5, weight_decay=0.1)


def rates(groups, module=None, schedule=None) -> Rates:
    replica = Replica(module or nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1)))
    return rates_of(SPEC, groups, schedule, replica.layers, replica.parameters)


def test_equal_differences_are_one_group_and_neighbors_one_segment():
    found = rates(lambda name, parameter: {"weight_decay": 0.0} if parameter.dim() < 2 else {"lr": 0.25})
    wide, narrow = {"lr": 0.25}, {"weight_decay": 0.0}
    assert found.segments == [
        GroupRange(0, 6, wide, 1), GroupRange(6, 8, narrow, 2), GroupRange(8, 12, wide, 1),
        GroupRange(12, 14, narrow, 2), GroupRange(14, 16, wide, 1), GroupRange(16, 17, narrow, 2),
    ]  # fmt: skip
    assert found.at(0) == [0.5, 0.25, 0.5]
    last = rates(lambda name, parameter: {"lr": 0.0} if name.startswith("2.") else None)
    assert last.segments == [GroupRange(14, 17, {"lr": 0.0}, 1)]


def test_a_schedule_scales_every_group():
    found = rates(lambda name, parameter: {"lr": 0.25} if parameter.dim() < 2 else {}, schedule=lambda step: 2.0**-step)
    assert found.at(2) == [0.125, 0.0625]
    assert rates(None, schedule=lambda step: 2.0**-step).at(1) == 0.25
    assert not rates(None)
    assert not rates(lambda name, parameter: {})


def test_scaled_groups_keep_what_is_no_rate():
    twice = scaled(lambda name, parameter: {"lr": 0.25, "weight_decay": 0.5}, 2.0)
    assert twice("w", nn.Parameter()) == {"lr": 0.5, "weight_decay": 0.5}
    assert scaled(lambda name, parameter: None, 2.0)("w", nn.Parameter()) == {}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            lambda name, parameter: {"learning_rate": 1},
            "learning_rate",
        ),
        (lambda name, parameter: {"name": "sgd"}, "name"),
        (lambda name, parameter: {"lr": -1.0}, "hyper-parameters"),
        (lambda name, parameter: 0.1, "gave 0"),
        (lambda name, parameter: {}[name], "0"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups, said):
    with raising(UsageError, said):
        rates(groups)


def test_groups_are_a_function():
    with raising(UsageError, "s name and the parameter, got "):
        made(groups="bias")
    assert made().groups is differing
