"""The form in which a job has its data changes no bit of a run, and one worker is plain PyTorch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import input_jobs
from support.input_jobs import FORMS
from support.runs import local, virtual

import dure
from dure.job.data.dataset import called
from dure.job.optimizer import OptimizerSpec
from dure.runtime.launch.fork_server import ForkServer

OPTIONS: dict[str, Any] = {"workers": 3, "batch_sizes": (2, 5, 9), "steps": 12, "eval_every": 4}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["bsp collective", "ssp:bound=1 ps:shards=2", "averaging:period=3", "ad-psgd"])
def test_every_form_gives_the_same_run(strategy):
    expected, *others = (virtual(form(), strategy, **OPTIONS) for form in FORMS.values())
    for run in others:
        assert torch.equal(run.params, expected.params)
        assert run.rows == expected.rows


def test_many_workers_are_computed_together_in_every_form():
    options = {"workers": 16, "steps": 4}
    expected, *others = (virtual(form(), "bsp collective", **options) for form in FORMS.values())
    for run in others:
        assert torch.equal(run.params, expected.params)
    rules = [list(run.outcome.notes["batching"]["shapes"].items()) for run in (expected, *others)]
    assert all(len(shapes) == 1 and shapes[0][1].startswith("stacked: vmap") for shapes in rules), rules
    assert rules[-1][0][0].startswith("inputs {ids: (8, 7) torch.int64, mask: (8, 7) torch.int64}, targets (8,)")


@pytest.mark.long
def test_every_form_gives_the_same_run_on_processes():
    with ForkServer() as fork_server:
        expected, *others = (
            local(f"{input_jobs.__file__}:{name}", "bsp collective", fork_server=fork_server, **OPTIONS)
            for name in FORMS
        )
    for run in others:
        assert torch.equal(run.params, expected.params)
        assert [row["loss"] for row in run.rows] == [row["loss"] for row in expected.rows]


@pytest.mark.parametrize("name", [*FORMS, "model", "batchified", "contiguous"])
def test_one_worker_is_plain_pytorch(name):
    job = getattr(input_jobs, name)()
    (sampler,) = job.samplers([job.batch_size], seed=5)
    module = job.build(5)
    optimizer = torch.optim.SGD(module.parameters(), lr=job.optimizer.lr, momentum=job.optimizer.momentum)
    for _ in range(20):
        inputs, targets = job.train.batch(sampler.next())
        optimizer.zero_grad()
        job.loss(called(module, inputs), targets).backward()
        optimizer.step()
    run = virtual(job, "bsp collective", workers=1, steps=20, seed=5)
    expected = torch.cat([each.detach().reshape(-1) for each in module.parameters()])
    assert torch.equal(run.params, expected)
    inputs, targets = job.graded.batch(torch.arange(len(job.graded)))
    loss = float(job.loss(called(module, inputs), targets).detach())
    assert run.rows[-1]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("split", ["striped", "iid"])
def test_workers_on_a_batchified_text_are_one_worker_with_all_columns(split):
    job = input_jobs.batchified()
    together = virtual(job, "bsp collective", workers=3, batch_sizes=(1, 2, 3), steps=9, split=split)
    alone = virtual(job, "bsp collective", workers=1, batch_size=6, steps=9)
    assert float((together.params - alone.params).abs().max()) < 1e-6
    drawn = virtual(input_jobs.model(), "bsp ps", workers=3, batch_sizes=(1, 2, 3), steps=9, split="striped")
    alone = virtual(input_jobs.model(), "bsp ps", workers=1, batch_size=6, steps=9, split="striped")
    assert float((drawn.params - alone.params).abs().max()) < 1e-6


def test_a_hybrid_asks_a_job_for_the_rows_of_a_mapping():
    job = replace(input_jobs.named(), rows=lambda inputs: {"table.weight": inputs["ids"]}, optimizer=OptimizerSpec())
    hybrid, around = (virtual(job, f"bsp {topology}", **OPTIONS) for topology in ("hybrid:servers=all", "collective"))
    assert float((hybrid.params - around.params).abs().max()) < 1e-6
    assert "table.weight" in {table.name for table in hybrid.setup.topology.rows.tables}
    samples = replace(job, train=input_jobs.dataset().train)
    assert torch.equal(virtual(samples, "bsp hybrid:servers=all", **OPTIONS).params, hybrid.params)


class Jittered(input_jobs.Reviews):
    """Reads a random word in place of the first, and notes what it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        words, label = super().__getitem__(index)
        self.drawn.append(float(torch.rand(())))
        return [int(self.drawn[-1] * input_jobs.WORDS), *words[1:]], label


@pytest.mark.parametrize("strategy", ["bsp collective", "downpour ps"])
def test_random_transforms_depend_on_seed_rank_and_step_alone(strategy):
    data = Jittered(), Jittered()
    jobs = [replace(input_jobs.dataset(), train=dure.Samples(each, input_jobs.padded)) for each in data]
    first, again = (virtual(job, strategy, **OPTIONS) for job in jobs)
    assert torch.equal(first.params, again.params)
    assert data[0].drawn == data[1].drawn
    assert len(set(data[0].drawn)) >= OPTIONS["steps"] * sum(OPTIONS["batch_sizes"])


@pytest.mark.parametrize("name", [*FORMS, "model"])
def test_a_run_without_values_counts_what_a_batch_costs(name):
    run = dure.train(getattr(input_jobs, name)(), sync="bsp", on="virtual", workers=2, steps=3, timing_only=True)
    assert run.summary()["seconds"] > 0


def test_an_epoch_of_a_stream_is_a_pass_over_its_tokens():
    job = input_jobs.model()
    run = dure.train(job, sync="bsp", on="virtual", workers=2, epochs=2.0)
    assert run.summary()["steps"] == -(-2 * 24 // 8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["dataset", "named", "model", "batchified"])
@pytest.mark.parametrize("strategy", ["bsp ps", "downpour:n_push=2"])
def test_a_resumed_run_reads_what_the_uninterrupted_one_reads(name, strategy, tmp_path):
    job = getattr(input_jobs, name)()
    whole, options = tmp_path / "whole", {"strategy": strategy, "on": "virtual", "workers": 2}
    full = dure.train(job, steps=12, out=whole, checkpoint_every=5, **options)
    (whole / "summary.json").unlink()
    shutil.rmtree(whole / "checkpoints" / "step-10")
    resumed = dure.train(job, resume=whole)
    assert resumed.summary()["params_sha256"] == full.summary()["params_sha256"]
