"""Jobs that take batches of some sizes only are measured, counted, planned and cut at sizes that they take."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from support.runs import virtual
from torch import nn
from torch.nn.functional import mse_loss, triplet_margin_loss

import dure
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.evaluation import Evaluator
from dure.job.job import Job
from dure.job.trial import refusal, trial_rows
from dure.planner.job_profile import profile_job


class Norm(nn.BatchNorm1d):
    """Batch norm that keeps the numbers of samples that it has been called with."""

    seen: ClassVar[list[int]] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(inputs))
        return super().forward(inputs)


def data(rows: int = 26) -> Data:
    inputs = torch.linspace(-1, 1, 4 * rows).sin().reshape(rows, 4)
    return Data(inputs, inputs.flip(1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), Norm(8), nn.Linear(8, 4))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def of_triplets(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    anchor, same, other = outputs.view(-1, 3, 4).unbind(1)
    return triplet_margin_loss(anchor, same, other)


def triplets(batch_size: int = 12) -> Job:
    return Job(dense, of_triplets, data(), batch_size=batch_size, name="triplets", steps=3)


def test_a_trial_batch_is_a_mini_batch_where_two_samples_are_refused() -> None:
    module = normed()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    job, state = Job(normed, mse_loss, data(), batch_size=8), torch.get_rng_state()
    assert trial_rows(job, module) == 2
    assert "raised ValueError: Expected more than 1 value" in str(refusal(job, module, 1))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert trial_rows(triplets(), dense()) == 12


def test_operations_of_a_sample_are_equal_by_two_samples_and_by_a_mini_batch() -> None:
    assert triplets().flops_per_sample == replace(triplets(), loss=mse_loss).flops_per_sample
    assert triplets().flops_per_sample == 2 * (4 * 8 + 8 * 4) * 3 - 2 * 4 * 8  # no gradient of the inputs


def test_a_profile_takes_the_halves_of_a_mini_batch_that_the_job_takes() -> None:
    job = Job(normed, mse_loss, data(), batch_size=8)
    Norm.seen.clear()
    assert profile_job(job).times is not None
    assert set(Norm.seen) == {1, 2, 4, 8}  # 1 by a trial that fails
    sizes: list[int] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = of_triplets(outputs, targets)
        sizes.append(len(outputs))
        return found

    assert profile_job(replace(triplets(9), loss=loss)).sample >= 0  # of two sizes on a busy machine, maybe none
    assert set(sizes) == {9, 18}  # the halves of 9 are no triplets


def test_micro_batches_that_the_loss_refuses_are_refused_before_the_run() -> None:
    said = r"samples raised RuntimeError: shape .* A batch of 12 samples works, and micro-batches of 3 .* write fewer"
    for options in ({}, {"timing_only": True}):
        with pytest.raises(UsageError, match=said):
            dure.train(triplets(), partition="gpipe:stages=2,micro=3", on="virtual", workers=2, **options)  # type: ignore[arg-type]


def test_whole_triplets_in_micro_batches_train_as_one_process() -> None:
    whole = virtual(triplets(), "bsp collective", workers=1, steps=3)
    cut = virtual(triplets(), "bsp collective gpipe:stages=2,micro=4", workers=2, steps=3)
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=1e-6)


def test_an_evaluation_of_triplets_takes_whole_mini_batches() -> None:
    """26 samples have two mini-batches of 12."""
    module, inputs = triplets().build(0), data().inputs[:24]
    values = torch.cat([each.detach().reshape(-1) for each in module.parameters()])
    with torch.no_grad():
        expected = of_triplets(module(inputs), inputs)
    assert Evaluator(triplets()).grade(values).loss == pytest.approx(float(expected), abs=1e-6)
