"""Parameter groups as segments of the flat parameters."""

import pytest
from support.rate_jobs import differing, made
from support.wording import raising
from torch import nn

from dure.errors import UsageError
from dure.job.groups import Rates, rates_of, scaled
from dure.job.optimizer import GroupRange, OptimizerSpec
from dure.job.replica import Replica

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
