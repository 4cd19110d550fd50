"""Which samples an evaluation takes, in every place, and how long evaluations took."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dure
from dure import Data, Job
from dure.job.evaluation import SAMPLES, Evaluator

TOTAL = 5000


class Slow(torch.nn.Linear):
    """Returns its input, and takes a moment over it where it is evaluated."""

    def __init__(self) -> None:
        super().__init__(1, 1, bias=False)
        torch.nn.init.ones_(self.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training and not torch.is_grad_enabled():
            time.sleep(0.02)
        return super().forward(inputs)


def numbered(test: bool = False) -> Job:
    """The loss is the mean of the numbers of the samples that it is taken of."""
    data = Data(torch.arange(float(TOTAL))[:, None], torch.zeros(TOTAL))
    return Job(Slow, lambda outputs, targets: outputs.mean(), data, data if test else None, batch_size=4)


def mean_number(job: Job, samples: int | None = None) -> float:
    return Evaluator(job, samples).grade(torch.ones(1)).loss


def test_a_test_set_counts_whole_and_a_training_set_by_a_fixed_choice() -> None:
    assert mean_number(numbered(test=True)) == pytest.approx(TOTAL / 2 - 0.5, rel=1e-4)
    chosen = torch.randperm(TOTAL, generator=torch.Generator().manual_seed(0))[:SAMPLES].double()
    assert SAMPLES == 1000
    torch.manual_seed(5)
    assert mean_number(numbered()) == pytest.approx(float(chosen.mean()), rel=1e-4)
    assert abs(float(chosen.mean()) - TOTAL / 2) < 150
    few = pytest.approx(float(chosen[:10].mean()), rel=1e-4)
    assert mean_number(numbered(), 10) == mean_number(numbered(test=True), 10) == few
    assert mean_number(numbered(), 10 * TOTAL) == pytest.approx(TOTAL / 2 - 0.5, rel=1e-4)


def test_an_accuracy_that_is_a_tensor_becomes_a_number() -> None:
    job = replace(numbered(), accuracy=lambda outputs, targets: (targets == 0).float().mean())
    assert Evaluator(job, 10).grade(torch.ones(1)).accuracy == 1.0
    run = dure.train(job, sync="bsp", on="virtual", workers=2, steps=2)
    assert json.loads(json.dumps(run.summary()))["accuracy"] == 1.0


def test_sorted_labels_are_all_there() -> None:
    labels = torch.arange(TOTAL) // (TOTAL // 10)
    job = replace(numbered(), train=Data(labels.float()[:, None], labels))
    seen: list[int] = []
    job.loss = lambda outputs, targets: (seen.extend(targets.tolist()), outputs.mean())[1]
    Evaluator(job).grade(torch.ones(1))
    assert len(seen) == SAMPLES
    assert min(seen.count(label) for label in range(10)) > 60


@pytest.mark.parametrize("batch_size", [6, 48, 1024, 1500])
@pytest.mark.parametrize("needs_gradients", [False, True])
def test_a_loss_of_whole_mini_batches_leaves_out_the_samples_behind_the_last(
    batch_size: int, needs_gradients: bool
) -> None:
    """Neither BATCH nor the number of samples is a multiple of most of the sizes."""

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if needs_gradients:
            torch.autograd.grad(outputs.sum(), outputs)
        return outputs.view(-1, batch_size).mean()

    job = replace(numbered(test=True), loss=loss, batch_size=batch_size)
    whole = TOTAL // batch_size * batch_size
    assert mean_number(job) == pytest.approx(whole / 2 - 0.5, rel=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", ["virtual", "local"])
@pytest.mark.parametrize("samples", [None, 10])
def test_runs_are_graded_on_these_samples_and_say_how_long_it_took(on: str, samples: int | None) -> None:
    given = {"workers": 2, "steps": 4, "eval_every": 2, "lr": 0.0, "eval_samples": samples}
    run = dure.train(f"{Path(__file__)}:numbered", on=on, **given)
    expected = mean_number(numbered(), samples)
    assert [row["loss"] for row in run.history] == pytest.approx([expected] * len(run.history))
    assert len(run.history) >= 2
    assert len(run.history) * 0.02 <= run.summary()["evaluation_seconds"] < 20
