"""The primitives of a stage, in runs of small models in virtual time."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import stage_jobs
from support.wording import raising
from torch import nn

import dure
from dure.errors import UsageError
from dure.job.job import load_job
from dure.partition.stage_module import StageModule

OPTIONS = {"sync": "bsp", "topology": "collective", "on": "virtual", "steps": 6, "batch_size": 8, "dtype": "float64"}


def trained(job, partition, workers=2, **options):
    return dure.train(job, partition=partition, workers=workers, **{**OPTIONS, **options})


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10), nn.BatchNorm1d(10)
    )


@pytest.fixture
def normed_job():
    job = load_job("digits-mlp", dtype="float64")
    return dataclasses.replace(job, model=lambda: normed().double(), name="normed")


@pytest.mark.parametrize("partition", ["pipedream:stages=2", "gpipe:stages=2,micro=2"])
def test_forwards_in_flight_keep_their_batch_norm_statistics(normed_job, partition):
    """Batch norm changes its statistics in place; a backward that comes later needs those of its forward."""
    run = trained(normed_job, partition, eval_every=2)
    assert [row["step"] for row in run.history] == [2, 4, 6]


def test_rematerialisation_keeps_no_graph(monkeypatch):
    graphs = []
    forward = StageModule.forward

    def watched(self, chunk, passed, *rest, graph=True):
        forward(self, chunk, passed, *rest, graph=graph)
        graphs.append((graph, all(each.requires_grad for each in passed.outputs)))

    monkeypatch.setattr(StageModule, "forward", watched)
    trained("digits-mlp", "gpipe:stages=2,micro=2,remat=true", steps=1)
    assert sorted(set(graphs)) == [(False, False), (True, True)]
    assert len(graphs) == 8  # two stages, two micro-batches, each forward twice


@pytest.mark.parametrize("partition", ["gpipe:stages=2,micro=3", "pipedream:stages=4"])
def test_rematerialisation_gives_the_same_bits(partition):
    """Random layers draw again as in the forward, and batch norm moves once: the losses of the rows are by it."""
    found = []
    for remat in ("false", "true"):
        workers = 4 if "4" in partition else 2
        run = trained(stage_jobs.normed(), f"{partition},remat={remat}", workers, dtype=None, eval_every=2)
        found.append((run.summary()["params_sha256"], [(row["step"], row["loss"]) for row in run.history]))
    assert found[0] == found[1]


def test_stages_compute_on_one_thread(monkeypatch):
    threads = set()
    forward = StageModule._loss

    def watched(self, *arguments):
        threads.add(torch.get_num_threads())
        return forward(self, *arguments)

    monkeypatch.setattr(StageModule, "_loss", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        trained("digits-mlp", "gpipe:stages=2", steps=1)
    finally:
        torch.set_num_threads(before)
    assert threads == {1}


def test_more_micro_batches_than_samples_are_refused():
    with raising(UsageError, "mini-batch"):
        trained("digits-mlp", "gpipe:stages=2,micro=9")


def test_batch_sizes_are_those_of_the_copies_of_the_model():
    run = trained("digits-mlp", "gpipe:stages=2,micro=2", workers=4, batch_sizes=(8, 4))
    assert run.summary()["samples"] == 6 * 12
    with raising(UsageError, "gives 4"):
        trained("digits-mlp", "gpipe:stages=2,micro=2", workers=4, batch_sizes=(8, 4, 8, 4))


def test_a_codec_encodes_the_gradients_of_each_stage():
    plain, coded = (
        trained("digits-mlp", "gpipe:stages=2,micro=2", workers=4, codec=codec).summary() for codec in ("fp32", "int8")
    )
    assert coded["bytes_sent"] < plain["bytes_sent"]
