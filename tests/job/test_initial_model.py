"""Jobs of shapes without values: the figures of the job itself."""

import pytest
import torch

from dure.job.initial_model import numel_of, shapes_of
from dure.job.job import load_job
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
