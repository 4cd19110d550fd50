"""PipeDream-2BW against SGD with gradients that are one update late."""

from dataclasses import replace

import pytest
import torch
from support.chains import BATCH, chain, play
from support.delayed import delayed
from support.wording import raising

import dure

STEPS = 9


@pytest.mark.parametrize(("stages", "micro"), [(1, 1), (2, 3), (3, 3)])
def test_gradients_are_one_update_late_at_every_stage(stages, micro):
    run = play(f"pipedream-2bw:micro={micro}", stages, steps=STEPS)
    assert torch.allclose(run.params, delayed([1], STEPS), rtol=0, atol=1e-13)
    for stage in run.stages:
        assert stage.counts.staleness == {0: 1, 1: STEPS - 1}
        assert stage.counts.most_versions == 2
    assert [stage.counts.most_sets for stage in run.stages] == list(range(stages, 0, -1))


def test_the_result_depends_on_the_stages_by_rounding_alone():
    job = replace(chain(), batch_size=2 * BATCH)
    run, other = play("pipedream-2bw:micro=5", 4, job=job), play("pipedream-2bw:micro=2", 2, job=job)
    assert torch.allclose(run.params, other.params, rtol=0, atol=1e-13)


def test_it_takes_less_time_than_with_a_flush():
    job = replace(chain(), batch_size=2 * BATCH)
    flush, on = (play(f"{name}:micro=4", 4, job=job).finished.seconds for name in ("1f1b", "pipedream-2bw"))
    assert on < 0.85 * flush


def test_fewer_micro_batches_than_stages_are_refused():
    with raising(ValueError, "micro=4"):
        dure.PipeDream2BW(stages=4, micro=3)
