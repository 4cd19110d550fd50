"""Jobs: built-in ones learn, files are found, mistakes are explained.

Jobs that take batches of some sizes only are measured, counted, planned and cut at sizes that they take.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.built_jobs import is_whole_and_learns, trained
from support.runs import virtual
from support.wording import raising
from torch import nn
from torch.nn.functional import mse_loss, triplet_margin_loss

import dure
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.data.split import Dirichlet, Replicated
from dure.job.evaluation import Evaluator
from dure.job.job import Job, load_job, refusal, trial_rows
from dure.job.names import BUILT_IN, may_have_companions
from dure.job.optimizer import OptimizerSpec
from dure.planner.job_profile import profile_job

OPTIMIZERS = {"char-gpt": "adamw"}
OF_DATA = [name for name in BUILT_IN if not may_have_companions(name)]  # tests/rl has the others

JOB_FILE = """
import torch
from dure.job.data import Data
from dure.job.job import Job
from beside import width

def small(rows: int = 6) -> Job:
    return Job(lambda: torch.nn.Linear(width, 2), torch.nn.functional.cross_entropy,
               Data(torch.zeros(rows, width), torch.zeros(rows, dtype=torch.int64)))

def with_root(data_root):
    job = small()
    job.source = str(data_root)
    return job

def untyped(rows=6):
    return small(rows)

def wrong():
    return 3

def asks(width, rows=3):
    return small(rows)

def stumbles():
    return small({}["rows"])
"""


LATE_FILE = """
import torch
from dure import Data, Job

def network():
    from later_neighbor import width
    return torch.nn.Linear(width, 2)

def late() -> Job:
    from late_neighbor import rows
    data = Data(torch.zeros(rows, 5), torch.zeros(rows, 2))
    return Job(network, torch.nn.functional.mse_loss, data)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("width = 5\n")
    (tmp_path / "mine.py").write_text(JOB_FILE)
    return tmp_path / "mine.py"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OF_DATA)
def test_built_in_jobs_are_whole_and_learn(name: str) -> None:
    is_whole_and_learns(name, OPTIMIZERS.get(name, "sgd"))


def test_digits_reach_95_percent_alone() -> None:
    job = load_job("digits-mlp")
    assert job.test is not None
    assert job.accuracy is not None
    assert job.batch_size == 32
    for seed in range(3):
        assert job.accuracy(trained(job, job.steps, seed)(job.test.inputs), job.test.targets) >= 0.95


def test_quadratic_ends_at_its_optimum() -> None:
    job = load_job(
        "quadratic", dim=20, conditioning=4.0, noise=0.5, samples=64, batch_size=64, split="striped", dtype="float64"
    )
    assert job.optimum is not None
    module = trained(job, 300)
    (place,) = module.parameters()
    assert place.dtype == torch.float64
    assert torch.allclose(place, job.optimum, rtol=0, atol=1e-12)
    assert not torch.allclose(job.train.targets[0], job.optimum, rtol=0, atol=0.1)


def test_quadratic_shrinks_each_coordinate_by_its_curvature() -> None:
    job = load_job("quadratic", dim=3, conditioning=100.0, noise=0.0, dtype="float64")
    assert job.optimum is not None
    (place,) = trained(job, 7).parameters()
    left = (1 - place / job.optimum).detach()
    assert left.tolist() == pytest.approx([(1 - 0.5 * a) ** 7 for a in (0.01, 0.1, 1.0)], rel=1e-9)


def test_flops_are_those_of_the_matrix_products_and_counting_leaves_randomness_alone() -> None:
    job = load_job("digits-mlp", hidden=32)
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    flops = job.flops_per_sample
    assert torch.equal(torch.rand(3), expected)
    forward = 2 * (64 * 32 + 32 * 10)
    assert flops == forward + forward + 2 * 32 * 10
    assert load_job("quadratic", dim=50).flops_per_sample == 300
    assert load_job("quadratic", dim=50, recompute=True).flops_per_sample == 400


def test_build_depends_on_its_seed_alone() -> None:
    job = load_job("digits-mlp")
    first, again, other = (next(job.build(seed).parameters()) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_overrides_reach_job_optimizer_and_function() -> None:
    job = load_job(
        "digits-mlp", hidden=7, batch_size=5, steps=9, lr=0.5, momentum=0.9, split="dirichlet:alpha=2", dtype="float64"
    )
    assert (job.batch_size, job.steps, job.split) == (5, 9, Dirichlet(2.0))
    assert (job.optimizer.lr, job.optimizer.momentum) == (0.5, 0.9)
    assert next(job.build().parameters()).shape == (7, 64)
    assert {job.train.inputs.dtype, next(job.build().parameters()).dtype} == {torch.float64}
    assert job.train.targets.dtype == torch.int64
    assert load_job("digits-mlp", batch_size=None, lr=None).optimizer == load_job("digits-mlp").optimizer


def test_a_text_gives_parameters_of_the_function(job_file: Path) -> None:
    job = load_job("digits-mlp:depth=3, hidden=7", lr=0.5)
    assert [len(each) for each in job.build().parameters()] == [7, 7, 7, 7, 7, 7, 10, 10]
    assert (job.name, job.optimizer.lr) == ("digits-mlp", 0.5)
    assert load_job("digits-mlp:hidden=7", hidden=5).build()[1].out_features == 5
    job = load_job("quadratic:noise=0,dtype=float64,dim=3")
    assert job.train.targets.dtype == torch.float64
    assert load_job("char-gpt:tied=true,width=8").build()[5].scores.out_features > 50
    job = load_job(f"{job_file}:small:rows=8")
    assert (job.name, len(job.train)) == ("small", 8)
    assert len(load_job(f"{job_file}:untyped:rows=9").train) == 9  # the type is that of the default


@pytest.mark.long
def test_parameters_of_a_job_reach_the_processes_of_a_run() -> None:
    job, settings = "digits-mlp:hidden=5,depth=2", {"workers": 1, "steps": 3}
    real = dure.train(job, on="local", **settings)
    assert real.config["job"] == job
    virtual = dure.train(load_job("digits-mlp", hidden=5, depth=2), on="virtual", **settings)
    assert real.summary()["loss"] == pytest.approx(virtual.summary()["loss"], rel=1e-6)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ((torch.zeros(2, 1), torch.zeros(2)), "Job.train"),
        (torch.zeros(2, 1), "Job.train"),
        (Endless(), "Job.train"),
        (torch.utils.data.DataLoader([1]), "Job.train"),
        (None, "Job.train"),
    ],
)
def test_data_are_a_data_set(train: object, said: str) -> None:
    with raising(UsageError, said):
        Job(lambda: nn.Linear(1, 1), nn.functional.mse_loss, train)


def test_a_map_style_data_set_is_taken_as_it_is() -> None:
    pairs = torch.utils.data.TensorDataset(torch.zeros(4, 1), torch.zeros(4, 1))
    job = Job(lambda: nn.Linear(1, 1), nn.functional.mse_loss, pairs, torch.utils.data.Subset(pairs, [1, 2]))
    assert (len(job.train), len(job.graded)) == (4, 2)
    assert job.to(torch.float64).train.batch(torch.tensor([0]))[0].dtype == torch.float64


def test_everything_that_a_job_needs_is_exported() -> None:
    for name in ("Job", "Data", "Samples", "Stream", "OptimizerSpec"):
        assert getattr(dure, name).__name__ == name


def test_a_job_from_a_file_may_import_its_neighbors(job_file: Path) -> None:
    job = load_job(f"{job_file}:small", rows=8, split=Replicated())
    assert job.name == "small"
    assert len(job.train) == 8
    assert job.split == Replicated()
    assert next(job.build().parameters()).shape == (2, 5)


def test_a_job_from_a_file_may_import_its_neighbors_when_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "late_neighbor.py").write_text("rows = 7\n")
    (tmp_path / "later_neighbor.py").write_text("width = 5\n")
    (tmp_path / "late.py").write_text(LATE_FILE)
    job = load_job(f"{tmp_path}/late.py:late")
    assert len(job.train) == 7
    assert next(job.build().parameters()).shape == (2, 5)


def test_a_job_from_a_file_is_given_the_data_root(job_file: Path, tmp_path: Path) -> None:
    assert load_job(f"{job_file}:with_root", data_root=tmp_path).source == str(tmp_path)


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("digits-mpl", {}, "digits-mpl"),
        ("xyzzy", {}, "digits-mlp"),
        ("absent.py:job", {}, "absent"),
        ("absent.py", {}, "FUNCTION"),
        ("digits-mlp", {"hiden": 3}, "hiden"),
        ("digits-mlp", {"batch_size": 0}, "batch_size"),
        ("digits-mlp", {"steps": 1.5}, "number"),
        ("digits-mlp", {"split": "iidd"}, "iid"),
        ("digits-mlp", {"dtype": "int8"}, "int8"),
        ("digits-mlp", {"hidden": 0}, "least 1"),
        (
            "digits-mlp:dept=3",
            {},
            "dept",
        ),
        ("digits-mlp:depth=x", {}, "x"),
        ("digits-mlp:depth", {}, "digits-mlp:depth"),
        ("char-gpt:data_root=x", {}, "data_root"),
        ("quadratic", {"conditioning": 0.5}, "least 1"),
    ],
)
def test_mistakes_are_explained(name: str, overrides: dict[str, object], said: str) -> None:
    with raising(UsageError, said):
        load_job(name, **overrides)


def test_mistakes_in_a_file_are_explained(job_file: Path) -> None:
    with raising(UsageError, "small"):
        load_job(f"{job_file}:smal")
    with raising(UsageError, "dure.Job"):
        load_job(f"{job_file}:wrong")
    with raising(UsageError, "width"):
        load_job(f"{job_file}:asks")
    assert len(load_job(f"{job_file}:asks", width=5).train) == 3
    with raising(UsageError, "rows"):
        load_job(f"{job_file}:stumbles")


def test_a_job_refuses_what_would_fail_later() -> None:
    data = Data(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    loss = nn.functional.cross_entropy
    with raising(UsageError, "lambda"):
        Job(nn.Linear(2, 2), loss, data)
    with raising(UsageError, "Job.recompute"):
        Job(nn.Flatten, loss, data, recompute="yes")  # type: ignore[arg-type]
    with raising(UsageError, "Job.accuracy"):
        Job(lambda: nn.Linear(2, 2), loss, data, accuracy=0.5)
    with raising(UsageError, "stages=lam"):
        Job(lambda: nn.Linear(2, 2), loss, data, stages=[])
    for optimizer in ("adam", torch.optim.Adam):
        with raising(UsageError, "adam"):
            Job(lambda: nn.Linear(2, 2), loss, data, optimizer=optimizer)
    with raising(UsageError, "Job.loss"):
        Job(nn.Flatten, None, data)  # type: ignore[arg-type]
    with raising(UsageError, "dure.Data("):
        Job(nn.Flatten, loss, (data.inputs, data.targets))  # type: ignore[arg-type]
    assert Job(nn.Flatten, loss, data).optimizer == OptimizerSpec()


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.5, "0.5"),
        ([], "[]"),
        ([(1.0, 2.0), 3.0], "block_seconds[1]"),
        ([(1.0, 2.0, 3.0)], "block_seconds[0]"),
        ([(1.0, -2.0)], "-2.0"),
        ([(1.0, float("inf"))], "inf"),
        ([(1.0, "2 ms")], "2 ms"),
        ([(0.0, 1.0), (0, 2.0)], "forward"),
        ([(1.0, 0.0)], "backward"),
    ],
)
def test_seconds_of_blocks_are_pairs_of_finite_numbers(given: Any, said: str) -> None:
    data = Data(torch.zeros(4, 2), torch.zeros(4, 2))
    with raising(UsageError, said):
        Job(lambda: nn.Linear(2, 2), mse_loss, data, block_seconds=given)


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
    assert replace(triplets(), recompute=True).flops_per_sample == 2 * (4 * 8 + 8 * 4) * 4 - 2 * 4 * 8


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
