"""Jobs of shapes without values: the figures of the job itself."""

import pytest
import torch
from support.wording import raising
from torch import nn

import dure
from dure.errors import UsageError
from dure.job.initial_model import InitialModel, numel_of, shapes_of
from dure.job.job import Job, load_job
from dure.job.replica import Replica


@pytest.mark.parametrize("name", ["digits-mlp", "digits-local"])
def test_shapes_have_the_operations_and_sizes_of_the_job(name):
    job = load_job(name)
    found = shapes_of(job)
    assert found.flops_per_sample == job.flops_per_sample
    assert numel_of(job) == Replica(job.build(0)).numel
    assert len(found.train) == len(job.train)
    inputs, targets = found.train.batch(torch.arange(3))
    assert inputs.is_meta
    assert targets.is_meta
    assert next(found.build(0).parameters()).is_meta


class Tied(nn.Module):
    """A layer used twice; `held` says whether the module holds a function that uses itself."""

    def __init__(self, held):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.function = (lambda x: self.first(x)) if held else None

    def forward(self, x):
        return self.second(self.first(x) if self.function is None else self.function(x))


@pytest.mark.parametrize("held", [False, True])
def test_models_of_shapes_share_nothing_and_keep_their_ties(held):
    data = dure.Data(torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64))
    found = shapes_of(Job(lambda: Tied(held), nn.functional.cross_entropy, train=data))
    one, other = found.build(0), found.build(0)
    assert one.first.weight is one.second.weight
    assert not {id(each) for each in one.parameters()} & {id(each) for each in other.parameters()}
    if held:
        assert one.function.__closure__[0].cell_contents is one


@pytest.mark.parametrize(("key", "value"), [("accumulate", 2), ("precision", "bf16"), ("recompute", True)])
def test_what_plans_alone_know_is_refused_where_values_are_trained(key, value):
    job = load_job("digits-mlp", **{key: value})
    assert InitialModel(job, 0, timing_only=True).params.numel() > 0
    with raising(UsageError, "remat=true"):
        _ = InitialModel(job, 0).replica


def test_a_published_model_without_values_says_so_first():
    with raising(UsageError, "shapes and no values"):
        _ = InitialModel(load_job("alexnet"), 0).replica
