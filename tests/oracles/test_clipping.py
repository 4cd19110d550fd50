"""Training with `clip` is training in PyTorch with `clip_grad_norm_`, whole or in stages."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.purposes import soaked
from support.runs import virtual
from support.stage_jobs import job_text
from support.wording import raising
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

from dure.errors import StrategyError
from dure.job.job import load_job

STEPS = 6
BATCH = 12
CLIP = 0.45
OPTIONS = {"steps": STEPS, "dtype": "float64", "seed": 0, "split": "striped", "optimizer": f"momentum:clip={CLIP}"}


@cache
def in_pytorch(clip: float = CLIP) -> tuple[Tensor, list[float]]:
    """The parameters after the steps, and the norms before clipping."""
    job = load_job(job_text("tied"), dtype="float64", split="striped")
    model = job.build(0)
    rule = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = job.samplers([BATCH], seed=0)[0]
    norms = []
    for _ in range(STEPS):
        inputs, targets = job.train.batch(sampler.next())
        rule.zero_grad()
        job.loss(model(inputs), targets).backward()
        norms.append(float(clip_grad_norm_(model.parameters(), clip)))
        rule.step()
    return parameters_to_vector(model.parameters()).detach(), norms


def check(run):
    torch.testing.assert_close(run.params, in_pytorch()[0], rtol=0, atol=1e-12)


def test_some_gradients_are_clipped_and_some_are_not():
    norms = in_pytorch()[1]
    assert min(norms) < CLIP < max(norms), norms


@pytest.mark.parametrize("workers", [1, 3])
def test_the_mean_gradient_is_clipped(workers):
    check(virtual(job_text("tied"), "bsp collective", workers=workers, batch_size=BATCH // workers, **OPTIONS))


def test_workers_that_step_alone_clip_their_own_gradients():
    """Over servers too, where the servers apply no gradient."""
    for strategy in ("averaging collective", "averaging ps:shards=2", "averaging collective gpipe:stages=2,micro=2"):
        check(virtual(job_text("tied"), strategy, workers=1 + ("gpipe" in strategy), batch_size=BATCH, **OPTIONS))


@pytest.mark.parametrize(
    ("partition", "replicas"),
    [
        ("gpipe:stages=3,cuts=2/3,micro=3", 1),
        ("1f1b:stages=2,micro=2", 2),
        *soaked(("1f1b:stages=5,micro=4", 1), ("gpipe:stages=1,micro=3", 1), ("gpipe:stages=3,cuts=2/3,micro=2", 2)),
    ],
)
def test_a_pipeline_clips_by_the_norm_over_all_stages(partition, replicas):
    """A parameter that is in several stages counts once."""
    workers = replicas * int(partition.partition("stages=")[2][0])
    strategy = f"bsp collective {partition}"
    check(virtual(job_text("tied"), strategy, workers=workers, batch_size=BATCH // replicas, **OPTIONS))


def test_a_norm_is_one_number_to_each_other_stage():
    for timing_only in (False, True):
        options = {"workers": 3, "batch_size": BATCH, "timing_only": timing_only, **OPTIONS}
        sent = [
            virtual(job_text("plain"), "bsp collective gpipe:stages=3,micro=2", **options | {"optimizer": each}).summary
            for each in ("sgd", f"sgd:clip={CLIP}")
        ]
        for worker in ("worker 0", "worker 1", "worker 2"):
            plain, clipped = (each["per_worker"][worker]["bytes_sent"] for each in sent)
            assert clipped == plain + STEPS * 2 * 8, (worker, timing_only)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("bsp ps:shards=2", "with bsp over ps:shards=2 each server applies gradients of its own part"),
        ("downpour ps", "with downpour"),
        ("bsp hybrid:servers=all", "with bsp over hybrid:servers=all"),
        ("hogwild shared", "with hogwild"),
        ("bsp collective pipedream:stages=2", "the stages of pipedream:stages=2 update at different times"),
        ("bsp collective ddg:stages=2", "the stages of ddg:stages=2 update at different times"),
    ],
)
def test_a_norm_that_nobody_knows_is_refused(strategy, problem):
    with pytest.raises(StrategyError, match=f"clip=0.45 limits the norm .*{problem}"):
        virtual("digits-mlp", strategy, workers=2, steps=1, optimizer="sgd:clip=0.45")


def test_a_clip_must_be_above_zero():
    with raising(StrategyError, "clip=1"):
        virtual("digits-mlp", "bsp collective", workers=1, steps=1, optimizer="sgd:clip=0")
