"""What is wrong with a job is said in one sentence before anything starts, and the trial leaves no trace."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from support.wording import raising
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dure
from dure.errors import UsageError
from dure.job.data.dataset import Data, Samples
from dure.job.job import Job
from dure.job.validation import try_to_count, validate_job
from dure.run.config import TrainConfig
from dure.run.outcome import summary
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun

HERE = Path(__file__).relative_to(Path.cwd()) if Path(__file__).is_relative_to(Path.cwd()) else Path(__file__)


class Net(nn.Module):
    """Batch norm, which refuses a batch of one, and dropout, which draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, inputs):
        if inputs.shape[1] == 3:
            raise ValueError("three\nis no crowd")
        return self.layers(inputs)


def data(width=8, rows=10, dtype=torch.float32):
    return Data(torch.linspace(-1, 1, width * rows, dtype=dtype).reshape(rows, width), torch.arange(rows) % 2)


def job(model=Net, loss=functional.cross_entropy, train=None, **more):
    return Job(model, loss, train or data(), name="mine", batch_size=4, steps=3, **more)


def refused(wrong, match, *, place=False):
    """The sentence about `wrong`, which names the job, says `match`, and ends with where in this file it happened."""
    with pytest.raises(UsageError, match=match) as caught:
        validate_job(wrong, "mine.py:job", rows=4)
    said = str(caught.value)
    assert said.startswith("mine.py:job: ")
    assert "\n" not in said
    assert bool(re.search(rf"\({re.escape(str(HERE))}, line \d+\)\.$", said)) == place
    return caught.value


def none(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (none, r"must be one number, .* got shape \(4,\)"),
        (
            lambda outputs, targets: functional.cross_entropy(outputs, targets).item(),
            r"a tensor of one number.* got \d\.",
        ),
        (lambda outputs, targets: "loss", "a tensor of one number.* got 'loss'"),
        (lambda outputs, targets: functional.cross_entropy(outputs, targets).detach(), r"Leave out \.detach\(\)"),
    ],
)
def test_a_loss_is_one_number_with_a_gradient(loss, said):
    refused(job(loss=loss), said)


def test_a_loss_of_one_number_in_a_row_is_one_number():
    taken = []

    def loss(outputs, targets):
        taken.append(none(outputs, targets).mean().reshape(1))
        return taken[-1]

    validate_job(job(loss=loss), "mine", rows=4)
    assert {each.shape for each in taken} == {(1,)}


def test_model_and_data_must_fit():
    for dtype in (torch.float64, torch.bfloat16):
        said = f"torch.float32 with parameters of {dtype}, although both need one dtype .* raised RuntimeError: mat1"
        refused(job(lambda dtype=dtype: Net().to(dtype)), said, place=True)
    refused(job(train=data(5)), r"inputs \(4, 5\) torch.float32, and raised RuntimeError: mat1 and mat2", place=True)
    refused(job(lambda: nn.Linear(5, 2)), r"inputs \(4, 8\) torch.float32, and raised RuntimeError: mat1 and mat2")
    floats = Data(data().inputs, torch.zeros(10))
    refused(job(train=floats), r"loss must take outputs \(4, 2\) .* targets \(4,\) torch.float32, and raised Runtime")


def test_a_mapping_and_a_tuple_are_told_as_the_model_gets_them():
    two = data().inputs, torch.arange(10)
    named = job(train=Data({"first": two[0], "second": two[1]}, two[1] % 2))
    refused(named, r"{first: \(4, 8\) torch.float32, second: \(4,\) torch.int64} as model\(\*\*inputs\), and raised")
    refused(job(train=Data(two, two[1] % 2)), r"torch.int64\) as model\(\*inputs\), and raised TypeError: .* takes 2")
    refused(job(train=Samples(list(zip(*two, strict=True)), len)), "the collate of Samples must return .* gave int")
    refused(job(train=Samples(Broken())), "reading its first samples raised KeyError: 0", place=True)


class Broken:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {}[index]


def test_a_model_is_a_module_with_parameters():
    refused(job(lambda: 7), r"make a torch\.nn\.Module, it made 7\. Write model=lambda: Net\(\)\.")
    refused(job(lambda: 7).to(torch.float64), "it made 7")
    refused(job(nn.Flatten), "Flatten has no trainable parameters")


def test_what_a_users_code_raises_is_told_with_its_place():
    missing = {}
    error = refused(job(lambda: missing["net"]), r"its model\(\) raised KeyError: 'net' \(", place=True)
    assert isinstance(error.__cause__, KeyError)
    refused(job(train=data(3)), "and raised ValueError: three is no crowd", place=True)
    refused(job(loss=lambda outputs, targets: missing["loss"]), "its loss must .* raised KeyError: 'loss'", place=True)


def test_the_test_data_and_the_accuracy_are_tried_too():
    refused(job(test=data(3)), "ValueError: three is no crowd", place=True)
    refused(job(accuracy=lambda outputs, targets: {}["right"]), "accuracy must .* KeyError: 'right'", place=True)
    refused(
        job(accuracy=lambda outputs, targets: outputs.argmax(1) == targets), "accuracy must be one number.* got tensor"
    )
    validate_job(job(accuracy=lambda outputs, targets: (outputs.argmax(1) == targets).float().mean()), "mine", rows=4)
    refused(job(accuracy=lambda outputs, targets: len(targets)), r"from 0 to 1; got \d+\. Write .*mean\(\)")
    refused(job(accuracy=lambda outputs, targets: torch.tensor(50.0)), "from 0 to 1; got 50")


def test_a_model_is_examined_as_a_run_examines_it():
    class Learner(Net):
        def forward(self, inputs):
            if not self.training:
                raise ValueError("the exam is too hard")
            return super().forward(inputs)

    refused(job(Learner), "and raised ValueError: the exam is too hard", place=True)


def test_a_trial_draws_nothing_and_needs_no_more_than_it_is_given():
    before = torch.get_rng_state()
    few = job(train=data(rows=3))
    validate_job(few, "mine", rows=4)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        validate_job(few, "mine", rows=4)


def test_what_a_job_draws_elsewhere_in_the_trial_it_draws_again():
    def loss(outputs, targets):
        drawn.append((random.random(), np.random.rand()))
        return functional.cross_entropy(outputs, targets)

    drawn: list[tuple[float, float]] = []
    validate_job(job(loss=loss), "mine", rows=4)
    assert drawn[0] == (random.random(), np.random.rand())
    with pytest.raises(UsageError):
        validate_job(job(loss=lambda outputs, targets: random.random() + np.random.rand()), "mine", rows=4)
    assert drawn[1] == (random.random(), np.random.rand())


def counting(seen):
    """A job whose loss notes how many samples it is given, and whether for a gradient."""

    def loss(outputs, targets):
        seen.append((len(targets), outputs.requires_grad))
        return functional.cross_entropy(outputs, targets)

    return job(loss=loss)


def test_a_run_tries_its_extreme_batches_before_anything_else_and_is_the_run_without_a_trial():
    seen, unseen = [], []
    options = {"sync": "bsp", "on": "virtual", "workers": 2, "batch_sizes": (3, 5), "seed": 1}
    tried = dure.train(counting(seen), **options)
    assert seen[:3] == [(5, True), (3, True), (5, False)]
    setup, cluster = resolve(TrainConfig.of({**options, "job": "mine"}), Prebuilt(counting(unseen)))
    untried = VirtualRun(setup, cluster, Callbacks()).run()
    assert seen[3:] == unseen
    assert summary(setup, untried, "virtual")["params_sha256"] == tried.summary()["params_sha256"]
    assert untried.history == tried.history


def test_a_batch_too_small_for_the_model_is_found_before_the_run():
    said = (
        r"mine: its model must take a batch of inputs \(1, 8\).* raised ValueError: Expected more .* give larger batch"
    )
    with pytest.raises(UsageError, match=said):
        dure.train(job(), sync="bsp", on="virtual", workers=3, batch_sizes=(4, 1, 2))


def test_a_run_without_values_tries_no_batch_and_says_what_is_wrong_all_the_same():
    seen = []
    dure.train(counting(seen), on="virtual", sync="bsp", workers=2, timing_only=True)
    assert seen == [(2, True)]
    with raising(UsageError, "ValueError"):
        try_to_count(job(train=data(3)), "mine")
    with raising(UsageError, "Job.model"):
        try_to_count(job(lambda: 7), "mine")


class Checkpointed(nn.Linear):
    def forward(self, inputs):
        return checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)


def test_a_reentrant_checkpoint_is_refused_with_what_to_write():
    with raising(UsageError, "use_reentrant=True"):
        validate_job(job(lambda: Checkpointed(8, 2)), "mine", rows=4)
    with raising(UsageError, "use_reentrant=False"):
        try_to_count(job(lambda: Checkpointed(8, 2)), "mine")  # as in a plan
