"""Options that need a data set, or a model in parts, are refused for jobs whose gradients come from a replay."""

from __future__ import annotations

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.planner.plan import plan

JOB = "apex:env=CartPole-v1,min_size=100,actors=2,hidden=8/8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "gpipe:stages=2", "workers": 2}, "stages=2"),
        ({"partition": "tensor:ways=2", "workers": 2}, "ways=2"),
        ({"sync": "lbfgs"}, "m=10"),
        ({"sync": "asysvrg"}, "gradient"),
        ({"sync": "averaging:schedule=epoch"}, "epochs"),
        ({"timing_only": True}, "CartPole-v1"),
        ({"epochs": 1}, "epochs"),
        ({"split": "iid"}, "split"),
    ],
)
def test_an_option_that_needs_data_is_refused(options, says):
    with raising(UsageError, says):
        dure.train(JOB, on="virtual", **{"steps": 5, **options})


def test_a_plan_is_refused():
    with raising(UsageError, "experience"):
        plan(JOB, on="virtual", workers=3)
