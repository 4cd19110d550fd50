"""The jobs of this distribution: dure finds them by their names, and they learn."""

import os
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch
from support.archives import unpack
from support.built_jobs import is_whole_and_learns
from support.reviews import invented, reviews
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.job.job import load_job
from dure.job.names import DURE_JOBS, function_of, known_jobs, may_have_companions

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OFFERED = PROJECT["entry-points"]["dure.jobs"]
NEEDS_DATA = {"mnist-mlp", "mnist-cnn", "cifar10-cnn", "cifar10-vgg16", "embedding-text", "imdb-bert", "imdb-albert"}
OPTIMIZERS = {"embedding-text": "adagrad", "cifar10-vgg16": "momentum"} | dict.fromkeys(
    ("imdb-bert", "imdb-albert"), "adamw"
)
STEPS = {"cifar10-vgg16": 100, "imdb-bert": 150, "imdb-albert": 400}
has_data = pytest.mark.skipif("DURE_DATA" not in os.environ, reason="DURE_DATA names no folder with data sets")


def test_dure_knows_the_names_that_this_distribution_offers() -> None:
    assert tuple(OFFERED) == DURE_JOBS
    assert {*DURE_JOBS} < {*known_jobs()}
    assert not any(map(may_have_companions, DURE_JOBS))
    for name, place in OFFERED.items():
        module, _, function = place.partition(":")
        assert function_of(name) is getattr(import_module(module), function)


def test_both_distributions_have_one_version() -> None:
    assert PROJECT["version"] == dure.__version__
    assert f"dure=={dure.__version__}" in PROJECT["dependencies"]


def marks(name: str) -> list[pytest.MarkDecorator]:
    """Jobs of Hugging Face learn for half a minute."""
    return [has_data] * (name in NEEDS_DATA) + [pytest.mark.long] * name.startswith("imdb")


@pytest.mark.parametrize("name", [pytest.param(each, marks=marks(each)) for each in OFFERED])
def test_jobs_are_whole_and_learn(name: str) -> None:
    is_whole_and_learns(name, OPTIMIZERS.get(name, "sgd"), STEPS.get(name, 40))


def test_batch_norm_job_has_buffers_and_convnet_has_none() -> None:
    from dure_jobs.cifar10 import convnet as with_norm
    from dure_jobs.mnist import convnet as without

    assert {name.rsplit(".")[-1] for name, _ in with_norm().named_buffers()} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert list(without().buffers()) == []
    assert sum(each.numel() for each in without().parameters()) == 105_866
    assert without()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert with_norm()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


def test_the_text_job_has_sparse_gradients_and_reads_words_alone(tmp_path: Path) -> None:
    unpack(tmp_path, reviews())
    job = load_job("embedding-text", data_root=tmp_path, vocabulary=30, dim=3, hidden=2, tokens=8)
    module = job.build()
    assert [tuple(each.shape) for each in module.parameters()] == [(30, 3), (2, 3), (2,), (2, 2), (2,)]
    inputs, targets = job.train.batch(torch.tensor([0, 5]))
    job.loss(module(inputs), targets).backward()
    table, *dense = [each.grad for each in module.parameters()]
    assert table.is_sparse
    assert set(table.coalesce().indices()[0].tolist()) == set(inputs[inputs > 0].tolist())
    assert not any(each.is_sparse for each in dense)
    with torch.no_grad():
        module.bag.weight[0] = 1e6
    assert torch.equal(module(inputs)[1], module(inputs[1:, :3])[0])


@pytest.mark.parametrize("setting", ["dim", "hidden"])
def test_the_text_job_refuses_what_has_no_width(setting: str, tmp_path: Path) -> None:
    with raising(UsageError, "1"):
        load_job("embedding-text", data_root=tmp_path, **{setting: 0})


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("on", "strategy"),
    [("virtual", "bsp collective"), ("virtual", "bsp ps"), ("virtual", "downpour"), ("local", "bsp collective")],
)
def test_the_text_job_runs_as_any_other(on: str, strategy: str, tmp_path: Path) -> None:
    """Its sparse gradients are made dense where a method knows nothing of them."""
    unpack(tmp_path, invented(40))
    run = dure.train("embedding-text", strategy=strategy, on=on, workers=2, data=tmp_path, steps=30, eval_every=30)
    assert run.history[-1]["loss"] < 0.6
    assert run.history[-1]["accuracy"] > 0.8
