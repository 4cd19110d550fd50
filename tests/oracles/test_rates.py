"""Parameter groups and schedules: PyTorch's, over collectives, servers and rows, at servers and at workers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import rate_jobs, row_jobs
from support.rate_jobs import KINDS, differing, falling, made, pytorch
from support.runs import local, virtual
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.runtime.launch.fork_server import ForkServer

SIZES = (3, 5, 8)
TOGETHER: dict[str, Any] = {"workers": 3, "batch_sizes": SIZES, "steps": 12}
OVER = ["collective", "collective:algorithm=ring", "ps", "ps:shards=3,split=memory", "ps:shards=2,split=layer"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", OVER)
def test_bsp_is_pytorch_on_the_whole_batch(kind, topology):
    job = made(kind)
    run = virtual(job, f"bsp {topology}", **TOGETHER)
    assert float((run.params - pytorch(job, 12, SIZES)).abs().max()) < 1e-12


@pytest.mark.parametrize(("groups", "schedule"), [(differing, None), (None, falling)])
@pytest.mark.parametrize("topology", ["collective", "ps:shards=2"])
def test_either_alone(groups, schedule, topology):
    job = made("momentum", groups=groups, schedule=schedule)
    run = virtual(job, f"bsp {topology}", **TOGETHER)
    assert float((run.params - pytorch(job, 12, SIZES)).abs().max()) < 1e-12


REAL = [(rate_jobs, "adam", "collective"), (rate_jobs, "momentum", "ps:shards=2"), (row_jobs, "grouped", "hybrid")]


@pytest.mark.long
def test_bsp_is_pytorch_on_processes():
    with ForkServer() as fork_server:
        for file, name, topology in REAL:
            run = local(f"{file.__file__}:{name}", f"bsp {topology}", fork_server=fork_server, **TOGETHER)
            assert float((run.params - pytorch(getattr(file, name)(), 12, SIZES)).abs().max()) < 1e-12


ALONE = [
    "averaging:period=4", "averaging:period=4 ps", "bmuf:period=4,momentum=0,nesterov=false ps", "one-shot",
    "ad-psgd", "ssp:bound=1 ps:shards=2", "ssp:bound=1,form=rmw ps", "downpour ps",
    "downpour:at_once=true ps", "k-sync:k=1 ps", "k-async:k=1 ps", "k-batch-async:k=1 ps", "backup:backups=0 ps",
    "hogwild", "hogbatch:batch=1",
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ALONE)
def test_one_worker_of_any_method_is_pytorch(strategy):
    """A server, a worker or a shared memory steps each group by the rate of the worker's step."""
    job = made("momentum")
    run = virtual(job, strategy, workers=1, batch_size=8, steps=12)
    assert float((run.params - pytorch(job, 12, [8])).abs().max()) < 1e-12


@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_the_center_of_easgd_follows_a_worker_that_is_pytorch(topology):
    """The center moves once in 12 steps of period 10, by the elasticity times the distance to the worker after 10."""
    job = made("sgd")
    run = virtual(job, f"easgd:period=10,elasticity=0.25 {topology}", workers=1, batch_size=8, steps=12)
    start = pytorch(job, 0, [8])
    assert float((run.params - start - 0.25 * (pytorch(job, 10, [8]) - start)).abs().max()) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory_is_pytorch_for_one_worker(kind):
    job = made(kind)
    run = virtual(job, "hogwild", workers=1, batch_size=8, steps=12)
    assert float((run.params - pytorch(job, 12, [8])).abs().max()) < 1e-11


def test_the_decay_of_hogwild_multiplies_the_schedule():
    job = made("sgd", groups=None)
    data = dure.Data(job.train.inputs[:16], job.train.targets[:16])
    epochs = 2  # of two steps
    both = replace(job, train=data, schedule=lambda step: falling(step) * 0.5 ** (step // epochs))
    run = virtual(replace(job, train=data), "hogwild:decay=0.5", workers=1, batch_size=8, steps=6)
    assert float((run.params - pytorch(both, 6, [8])).abs().max()) < 1e-11
    grouped = replace(job, train=data, groups=differing)
    run = virtual(grouped, "hogwild:decay=0.5", workers=1, batch_size=8, steps=6)
    assert float((run.params - pytorch(replace(both, groups=differing), 6, [8])).abs().max()) < 1e-11


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["bsp ps:shards=2", "downpour:n_push=3 ps", "averaging:period=4", "ssp:bound=1"])
def test_a_resumed_run_continues_the_schedule(strategy, tmp_path):
    job = made("adam", schedule="cosine:steps=12,warmup=3,floor=0.1")
    options = {"strategy": strategy, "on": "virtual", "workers": 3, "steps": 12, "checkpoint_every": 5}
    whole = dure.train(job, out=tmp_path / "run", **options)
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-10")
    resumed = dure.train(job, resume=tmp_path / "run")
    assert json.dumps(resumed.summary()["params_sha256"]) == json.dumps(whole.summary()["params_sha256"])


@pytest.mark.parametrize(
    ("strategy", "schedule"), [("downpour:n_push=3 ps", falling), ("hogbatch:batch=4,decay=0.5", None)]
)
def test_what_a_resumed_run_still_has_to_push_keeps_its_rate(strategy, schedule, tmp_path):
    """A run of 9 steps is resumed to end where its checkpoint is, with gradients of a step that is over."""
    job = made("sgd", groups=None, schedule=schedule)
    job = replace(job, train=dure.Data(job.train.inputs[:16], job.train.targets[:16]))
    options = {"strategy": strategy, "on": "virtual", "workers": 1, "batch_size": 8}
    dure.train(job, out=tmp_path, steps=9, checkpoint_every=5, **options)
    (tmp_path / "summary.json").unlink()
    resumed = dure.train(job, resume=tmp_path, steps=5)
    short = dure.train(job, steps=5, **options)
    assert resumed.summary()["params_sha256"] == short.summary()["params_sha256"]


def test_momentum_compensation_sees_every_group():
    job = made("momentum", groups=lambda name, parameter: {"momentum": 0.4} if parameter.dim() < 2 else {})
    setup = virtual(job, "downpour+momentum-compensation ps:shards=1", workers=2, steps=2).setup
    momenta = [piece.overrides["momentum"] for piece in setup.topology.plan.server_segments(setup.topology.ranges[0])]
    assert momenta == [pytest.approx(-0.1)] * len(momenta)
    assert momenta


def test_scaled_rates_scale_groups():
    job = made("sgd", schedule=None)
    run = virtual(job, "bsp ps", workers=2, batch_size=8, steps=6, scale_lr=True)
    twice = replace(
        job,
        optimizer=replace(job.optimizer, lr=0.4),
        groups=lambda name, parameter: {k: 2 * v if k == "lr" else v for k, v in differing(name, parameter).items()},
    )
    assert float((run.params - pytorch(twice, 6, [16])).abs().max()) < 1e-12


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("k-async:k=2 ps", "k=2"),
        ("k-batch-sync:k=2 ps", "of 2"),
        ("lbfgs ps", "m=10"),
        ("downpour:local_lr=0.1 ps", "local_lr"),
    ],
)
def test_what_cannot_be_exact_is_refused(strategy, said):
    with raising(UsageError, said):
        virtual(made("sgd"), strategy, workers=3, steps=3)
    virtual(made("sgd", groups=None, schedule=None), strategy, workers=3, steps=3)


def test_a_factor_that_is_no_number_is_refused_before_the_run():
    with raising(UsageError, "step 11"):
        virtual(made(schedule=lambda step: 1 - 0.1 * step), "bsp", workers=2, steps=12)


ROWS = [("hybrid:servers=all", "sgd"), ("hybrid:servers=table.weight", "adagrad"), ("hybrid:servers=none", "momentum")]


@pytest.mark.parametrize(("topology", "kind"), ROWS)
def test_rows_at_servers_step_by_the_rates_of_their_groups(topology, kind):
    job = replace(row_jobs.grouped(), optimizer=KINDS[kind])
    run = virtual(job, f"bsp {topology}", workers=3, batch_sizes=SIZES, steps=8)
    assert float((run.params - pytorch(job, 8, SIZES)).abs().max()) < 1e-12


def test_a_table_of_a_group_with_decay_is_refused():
    job = replace(row_jobs.bags(), groups=lambda name, parameter: {"weight_decay": 0.1})
    with raising(UsageError, "gradient"):
        virtual(job, "bsp hybrid:servers=all", workers=3, steps=2)


def test_nothing_is_left_of_the_optimizer_of_another_run():
    assert not torch.equal(pytorch(made("sgd"), 3, [8]), pytorch(made("sgd", schedule=None), 3, [8]))
