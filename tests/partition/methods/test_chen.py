"""Smaller mini-batches: Petrowski's pipeline on them, with as many samples."""

from dataclasses import replace

import pytest
import torch
from support.chains import chain, play
from support.runs import resolved
from support.wording import raising

import dure

T0 = 12


@pytest.mark.parametrize(
    ("stages", "delay", "size"), [(1, 1.0, 12), (2, 1.0, 4), (4, 1.0, 1), (2, 2.0, 8), (2, 9.0, 12)]
)
def test_the_mini_batch_shrinks_with_the_stages(stages, delay, size):
    assert dure.Chen(stages=stages, delay=delay).batch_size(T0) == size
    assert (2 * stages - 1) * size <= max(delay * T0, 2 * stages - 1) or size == T0


def test_a_run_is_petrowski_on_the_smaller_mini_batches():
    job = replace(chain(), batch_size=9)
    run = play("chen", 2, job=job)
    assert torch.equal(run.params, play("petrowski", 2, job=replace(job, batch_size=3)).params)
    assert run.stages[0].counts.staleness == {0: 1, 1: 1, 2: 7}


def test_the_samples_of_a_run_are_those_of_the_job():
    job = replace(chain(), batch_size=T0, steps=10)
    partition = {"partition": "chen:stages=2,cuts=4", "workers": 4, "on": "virtual", "dtype": "float64"}
    setup, _ = resolved(job, "bsp", **partition)
    assert (setup.steps, setup.batch_sizes) == (30, (4, 4))
    setup, _ = resolved(job, "bsp", **partition, batch_sizes=[6, 18])
    assert (setup.steps, setup.batch_sizes) == (30, (2, 6))
    setup, _ = resolved(job, "bsp", **partition, steps=7)
    assert (setup.steps, setup.batch_sizes) == (7, (4, 4))


def test_a_delay_that_is_none_is_refused():
    with raising(ValueError, "delay=1"):
        dure.Chen(delay=0.0)
