"""Schedules: the factors that the formulas give, and mistakes."""

import math

import pytest
import torch
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.schedule import SCHEDULES, factor_at, schedule_of


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
