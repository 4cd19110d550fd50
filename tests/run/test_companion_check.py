"""Options that need a data set, or a model in parts, are refused for jobs whose gradients come from a replay."""

from __future__ import annotations

import pytest

import dure
from dure.errors import UsageError
from dure.planner.plan import plan

JOB = "apex:env=CartPole-v1,min_size=100,actors=2,hidden=8/8"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"partition": "gpipe:stages=2", "workers": 2}, "gpipe:stages=2 would divide it"),
        ({"partition": "tensor:ways=2", "workers": 2}, "tensor:ways=2 would divide it"),
        ({"sync": "lbfgs"}, "lbfgs:m=10 asks for the gradient of samples that it chooses"),
        ({"sync": "asysvrg"}, "asysvrg.* asks for the gradient of samples that it chooses"),
        ({"sync": "averaging:schedule=epoch"}, "counts epochs"),
        ({"timing_only": True}, "the actors of apex CartPole-v1 need a model that learns"),
        ({"epochs": 1}, "epochs is for a job with a data set"),
        ({"split": "iid"}, "split is for a job with a data set"),
    ],
)
def test_an_option_that_needs_data_is_refused(options, says):
    with pytest.raises(UsageError, match=says):
        dure.train(JOB, on="virtual", **{"steps": 5, **options})


def test_a_plan_is_refused():
    with pytest.raises(UsageError, match="learns from what actors experience"):
        plan(JOB, on="virtual", workers=3)
