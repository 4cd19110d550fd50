"""Hogwild! and HogBatch against serial loops, closed forms, and what processes leave in shared memory."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles.test_equivalences import plain_gradients, staggered
from support import sparse_jobs
from support.purposes import soaked
from support.real_runs import Trial
from support.runs import Fixed, bowls, local, virtual
from support.sparse_jobs import PER_SAMPLE
from support.wording import raising
from torch import Tensor

from dure.errors import DureError, StrategyError, UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.run.config import TrainConfig
from dure.run.strategy import Strategy
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import Constant
from dure.sync.hogwild import HogBatch, Hogwild

JOBS = Path(sparse_jobs.__file__)


def trial_of(name: str, strategy: str, **options: Any) -> Trial:
    return Trial(TrainConfig(job=f"{JOBS}:{name}", strategy=strategy, on="local", eval_every=10_000, **options))


def serial(job: Job, steps: int, *, batch: int = 1, scale: str = "mean", decay: float = 1.0, lr: float = 0.0) -> Tensor:
    """By PyTorch alone: several mini-batches at one point, then one step."""
    gradient, values = plain_gradients(job, job.batch_size)
    per_epoch = len(job.train) / job.batch_size
    total, count = torch.zeros_like(values), 0
    for step in range(1, steps + 1):
        total += gradient(values.clone())
        count += 1
        if step % batch == 0 or step == steps:
            rate = (lr or job.optimizer.lr) * decay ** int((step - 1) / per_epoch)
            values.add_(total / count if scale == "mean" and count > 1 else total, alpha=-rate)
            total, count = torch.zeros_like(values), 0
    return values


# ---- one worker is serial SGD


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("strategy", ["hogwild", "hogwild shared:mode=atomic", "hogbatch:batch=1"])
def test_one_worker_is_serial_bit_for_bit(strategy, dtype):
    options = {"workers": 1, "steps": 20, "dtype": dtype, "exact": True}
    run = virtual("digits-mlp", strategy, **options)
    assert torch.equal(run.params, serial(load_job("digits-mlp", dtype=dtype), 20))


@pytest.mark.parametrize("strategy", ["hogwild", "hogwild shared:mode=atomic", "hogbatch:batch=1"])
def test_one_process_is_serial_bit_for_bit(strategy, fork_server):
    run = local("digits-mlp", strategy, fork_server=fork_server, workers=1, steps=20)
    assert torch.equal(run.params, serial(load_job("digits-mlp"), 20))


@pytest.mark.parametrize("scale", ["mean", "sum"])
@pytest.mark.parametrize("steps", [12, 14])
def test_one_hogbatch_worker_is_sgd_on_larger_batches(scale, steps, fork_server):
    job, strategy = load_job("digits-mlp", dtype="float64"), f"hogbatch:batch=4,scale={scale}"
    expected = serial(job, steps, batch=4, scale=scale)
    run = virtual("digits-mlp", strategy, workers=1, steps=steps, dtype="float64", exact=True)
    assert torch.equal(run.params, expected)
    real = local("digits-mlp", strategy, fork_server=fork_server, workers=1, steps=steps, dtype="float64")
    assert torch.equal(real.params, expected)


def test_one_hogbatch_worker_with_all_data_is_gradient_descent():
    options = {"dtype": "float64", "workers": 1, "lr": 0.7}
    batches = virtual("quadratic", "hogbatch:batch=64", batch_size=16, steps=64 * 5, **options)  # 1,024 samples
    whole = virtual("quadratic", "bsp", batch_size=1024, steps=5, **options)
    assert float((batches.params - whole.params).abs().max()) < 1e-12


@pytest.mark.parametrize(
    "optimizer", ["momentum:weight_decay=0.01", "adam:weight_decay=0.01", "adamw:weight_decay=0.1"]
)
def test_the_rule_is_the_job_s_and_its_state_each_worker_s_own(optimizer):
    options = {"workers": 1, "steps": 20, "dtype": "float64", "optimizer": optimizer}
    assert float((virtual("digits-mlp", "hogwild", **options).params - virtual("digits-mlp", "bsp", **options).params)
                 .abs().max()) < 1e-12  # fmt: skip


@pytest.mark.parametrize(("strategy", "batch"), [("hogwild:decay=0.9", 1), ("hogbatch:batch=2,decay=0.9", 2)])
def test_the_rate_decays_after_each_pass_over_the_data(strategy, batch):
    job = load_job("digits-mlp", dtype="float64", batch_size=128)
    steps = 3 * len(job.train) // 128 + 2
    options = {"workers": 1, "steps": steps, "dtype": "float64", "batch_size": 128, "exact": True}
    decayed = virtual("digits-mlp", strategy, **options)
    assert torch.equal(decayed.params, serial(job, steps, batch=batch, decay=0.9))
    assert not torch.equal(decayed.params, serial(job, steps, batch=batch))


# ---- several


def test_hogbatch_of_one_is_hogwild():
    machines = Machines(count=4, compute=Constant(seconds=0.01), speed=(1.0, 0.2, 1.3, 0.7))
    runs = [virtual("digits-mlp", m, Cluster(machines=(machines,)), steps=30) for m in ("hogwild", "hogbatch:batch=1")]
    assert torch.equal(runs[0].params, runs[1].params)
    assert runs[0].summary["staleness"] == runs[1].summary["staleness"]
    other = virtual("digits-mlp", "hogbatch:batch=2", Cluster(machines=(machines,)), steps=30)
    assert not torch.equal(runs[0].params, other.params)


@pytest.mark.parametrize(("workers", "batch", "scale"), [(2, 3, "mean"), (3, 2, "sum"), (3, 4, "mean")])
def test_in_turn_hogbatch_is_the_loop_of_the_paper(workers, batch, scale):
    """All gradients of one write are of one read, and worker k's first write comes k mini-batches early."""
    steps, lr = 11, 0.125
    pairs = [(1.0 + 0.25 * rank, 0.5 * rank - 1) for rank in range(workers)]
    job = bowls(pairs, lr=lr, start=1.0)
    run = virtual(job, f"hogbatch:batch={batch},scale={scale}", staggered(workers, steps), steps=steps)
    model, read, accrued = 1.0, [1.0] * workers, [[] for _ in range(workers)]
    for turn in range(steps * workers):
        rank, clock = turn % workers, turn // workers + 1
        a, b = pairs[rank]
        accrued[rank].append(a * read[rank] - b)
        if (clock + rank) % batch == 0 or clock == steps:
            model -= lr * sum(accrued[rank]) / (len(accrued[rank]) if scale == "mean" else 1)
            read[rank], accrued[rank] = model, []
    assert float(run.params) == pytest.approx(model, rel=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_in_turn_an_update_is_as_stale_as_there_are_others(workers):
    run = virtual("quadratic", "hogwild", staggered(workers, 8), steps=8)
    first = {str(delay): 1 for delay in range(workers - 1)}
    assert run.summary["staleness"]["histogram"] == first | {str(workers - 1): 8 * workers - (workers - 1)}


@pytest.mark.parametrize("workers", [2, 4])
def test_in_turn_it_is_gradient_descent_with_constant_delay(workers):
    """Stable below 2 sin(pi / (2 (2d + 1))) with d = K - 1, as Downpour."""
    limit = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    size = {}
    for q in (0.96 * limit, 1.04 * limit):
        steps = 400 // workers
        job = bowls([(1.0, 0.0)] * workers, lr=q, start=1.0)
        run = virtual(job, "hogwild", staggered(workers, steps), steps=steps)
        path = [1.0]
        for t in range(steps * workers):
            path.append(path[t] - q * path[max(0, t - workers + 1)])
        assert float(run.params) == pytest.approx(path[-1], rel=1e-9)
        size[q] = max(map(abs, path[-20:]))
    assert next(iter(size.values())) < 1 < list(size.values())[1]


def owned(workers: int, per_worker: int = 40) -> Job:
    """Worker k's samples touch features k, k + workers, k + 2 workers, ... alone."""
    job = sparse_jobs.sparse(features=60 * workers, samples=per_worker * workers)
    draw = torch.Generator().manual_seed(3)
    own = torch.randint(0, 60, (workers, per_worker, PER_SAMPLE), generator=draw) * workers
    inputs = (own + torch.arange(workers)[:, None, None]).reshape(-1, PER_SAMPLE)
    return Job(
        name="owned", model=job.model, loss=job.loss, train=Data(inputs, job.train.targets), batch_size=1,
        optimizer=job.optimizer, split=Fixed(),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", ["hogwild", "hogbatch:batch=3", "hogwild shared:mode=atomic"])
def test_on_disjoint_supports_the_interleaving_does_not_matter(strategy):
    speeds = (1.0, 0.2, 1.7)
    machines = Machines(count=3, compute=Constant(seconds=0.01), speed=speeds)
    together = virtual(owned(3), strategy, Cluster(machines=(machines,)), steps=50)
    assert together.summary["staleness"]["max"] > 0, "nobody was interrupted, so that this shows nothing"
    even = virtual(owned(3), strategy, Cluster.uniform(3), steps=50)
    assert torch.equal(together.params, even.params)
    if strategy == "hogwild":
        job = owned(3)
        for rank in range(3):
            part = slice(40 * rank, 40 * rank + 40)
            own = Data(job.train.inputs[part], job.train.targets[part])
            alone = Job(
                name="alone", model=job.model, loss=job.loss, train=own, batch_size=1, optimizer=job.optimizer,
                split=Fixed(),
            )  # fmt: skip
            one = virtual(alone, "hogwild", workers=1, steps=50)
            assert torch.equal(one.params[rank::3], together.params[rank::3])
            assert together.params[rank::3].count_nonzero() > 30


# ---- sparse updates


def supports(inputs: Tensor, order: list[int], batch: int) -> int:
    """Numbers written: over batches of samples, how many features any of them touches."""
    parts = [order[start : start + batch] for start in range(0, len(order), batch)]
    return sum(len(inputs[part].unique()) for part in parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("strategy", "batch"), [("hogwild", 1), ("hogbatch:batch=5", 5), ("hogbatch:batch=7", 7)])
@pytest.mark.parametrize("where", ["virtual", "real"])
def test_writes_are_the_union_of_supports(strategy, batch, where, fork_server):
    job = sparse_jobs.sparse()
    sampler = job.samplers([1], seed=0)[0]
    order = [int(sampler.next()) for _ in range(64)]
    expected = supports(job.train.inputs, order, batch)
    assert expected < PER_SAMPLE * 64, "no two samples share a feature, so that this shows nothing"
    if where == "virtual":
        run = virtual(job, strategy, workers=1, steps=64)
    else:
        run = local(f"{JOBS}:sparse", strategy, fork_server=fork_server, workers=1, steps=64)
    assert run.summary["per_shard"]["server 0"]["written"] == expected
    untouched = torch.ones(600, dtype=torch.bool)
    untouched[job.train.inputs[order].unique()] = False
    assert run.params[untouched].count_nonzero() == 0
    if batch == 1:
        assert torch.equal(run.params, by_torch(job, order))


def by_torch(job: Job, order: list[int]) -> Tensor:
    """PyTorch's SGD, whose sparse gradients write only what they name."""
    model = job.build(0)
    rule = torch.optim.SGD(model.parameters(), lr=job.optimizer.lr)
    for index in order:
        inputs, targets = job.train.batch(torch.tensor([index]))
        rule.zero_grad()
        job.loss(model(inputs), targets).backward()
        rule.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_dense_update_writes_everything():
    run = virtual("digits-mlp", "hogwild", workers=2, steps=5)
    assert run.summary["per_shard"]["server 0"]["written"] == 10 * run.params.numel()


@pytest.fixture(scope="module")
def loss_of_one_alone():
    return virtual(sparse_jobs.sparse(), "hogwild", workers=1, steps=5000).rows[-1]["loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["hogwild", *soaked("hogwild shared:mode=atomic,locks=8", "hogbatch:batch=4,scale=sum")]
)
def test_processes_learn_a_sparse_model_as_well_as_one_alone(strategy, fork_server, loss_of_one_alone):
    run = local(f"{JOBS}:sparse", strategy, fork_server=fork_server, workers=2, steps=2500)
    assert run.outcome.history[-1]["accuracy"] > 0.9
    assert run.outcome.history[-1]["loss"] < 1.1 * loss_of_one_alone + 0.02


@pytest.mark.long
def test_a_step_of_a_large_sparse_model_writes_what_its_samples_touch(fork_server):
    """48 of its two million numbers."""
    trial = trial_of("large", "hogwild", workers=2, steps=1500)
    outcome = trial.run(fork_server=fork_server)
    assert trial.driver.statuses[0]["written"] <= 3000 * 16 * PER_SAMPLE
    assert outcome.params.view(-1, 16)[1000:].count_nonzero() == 0
    assert outcome.history[-1]["loss"] < 0.02


def test_a_sparse_accumulation_is_part_of_a_checkpoint(tmp_path):
    from oracles.test_resume import check_every_stop

    on = Cluster(machines=(Machines(count=3, compute=Constant(seconds=0.01), speed=(1.0, 0.3, 1.4)),))
    check_every_stop(sparse_jobs.sparse(), tmp_path, on, strategy="hogbatch:batch=4", steps=18)


# ---- processes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["racy", "atomic"])
def test_updates_of_processes_add_up(mode, fork_server):
    trial = trial_of("ones", f"hogwild shared:mode={mode}", workers=3, steps=400)
    outcome = trial.run(fork_server=fork_server)
    values = -outcome.params
    assert outcome.totals.counts["updates_applied"] == 1200
    assert trial.driver.statuses[0]["written"] == 1200 * 64
    assert sum(trial.driver.statuses[0]["staleness"].values()) == 1200
    assert float(values.max()) <= 1200
    if mode == "atomic":
        assert values.tolist() == [1200.0] * 64


@pytest.mark.long
@pytest.mark.parametrize("mode", ["racy", "atomic"])
def test_killed_workers_lose_one_update_each_at_most(mode, fork_server):
    trial = trial_of("ones", f"hogwild shared:mode={mode}", workers=3, steps=3000, replace=False)
    killed: list[str] = []

    def act(trial: Trial) -> None:
        for name in ("worker 1", "worker 2"):
            if name not in killed and trial.driver.steps(name) > 100 * (1 + len(killed)):
                killed.append(name)
                trial.kill(name)

    outcome = trial.run(act, fork_server=fork_server)
    values = -outcome.params
    counted = outcome.totals.counts["updates_applied"]
    assert sorted(killed) == ["worker 1", "worker 2"]
    assert outcome.totals.failures_survived == 2
    assert trial.driver.roster.finished.keys() == {"worker 0"}
    assert 3200 < counted < 9000
    if mode == "atomic":
        assert counted <= float(values.min()) <= float(values.max()) <= counted + 2  # written and not yet counted
    else:
        assert float(values.max()) <= counted + 2


def test_the_death_of_the_owner_ends_the_run_and_its_memory(fork_server):
    trial = trial_of("ones", "hogwild", workers=2, steps=10**6)
    pids: list[int] = []

    def act(trial: Trial) -> None:
        if not pids and trial.driver.steps("worker 1") > 50:
            pids.extend(trial.pids()[1:])
            assert all("memfd:dure" in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
            trial.kill("server 0")

    with raising(DureError, "server 0"):
        trial.run(act, fork_server=fork_server)
    assert len(pids) == 3
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    holders = [path for path in Path("/proc").glob("[0-9]*/maps") if has_segment(path)]
    assert not [path for path in holders if int(path.parts[2]) in trial.pids()]


def has_segment(path: Path) -> bool:
    try:
        return "memfd:dure" in path.read_text()
    except OSError:
        return False


# ---- what takes how long


def test_writers_queue_where_there_is_one_lock():
    """Four workers of equal speed all want to write at once; 4 MB take 4 ms at 1 ns per byte."""
    cluster = Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01)),), gamma="1 ns/B")
    options = {"steps": 10, "timing_only": True}
    wide = Job(
        name="wide",
        model=lambda: sparse_jobs.Point(1_000_000),
        loss=lambda outputs, targets: outputs.mean(),
        train=Data(torch.zeros(4, 1_000_000), torch.zeros(4)),
        batch_size=1,
    )
    free = virtual(wide, "hogwild", cluster, **options)
    queue = virtual(wide, "hogwild shared:mode=atomic,locks=1", cluster, **options)
    assert free.seconds == pytest.approx(10 * 0.014, rel=0.01)
    assert queue.seconds == pytest.approx(0.01 + 4 * 10 * 0.004, rel=0.05)
    assert free.summary["bytes_sent"] == queue.summary["bytes_sent"] == 0


# ---- what makes no sense


@pytest.mark.parametrize("decay", [0.0, -1.0, 1.1, math.nan])
@pytest.mark.parametrize("method", [Hogwild, HogBatch])
def test_a_bad_decay_is_explained(method, decay):
    with raising(ValueError, "multiplies"):
        method(decay=decay)


def test_a_batch_of_nothing_is_explained():
    with raising(ValueError, "mini-batches"):
        HogBatch(batch=0)


@pytest.mark.parametrize("topology", ["ps", "collective"])
def test_other_topologies_are_refused(topology):
    with pytest.raises(StrategyError, match=f"hogwild does not run over {topology}: its workers write to one model"):
        Strategy.parse(f"hogwild {topology}")
    with raising(StrategyError, "shared"):
        Strategy.parse("ssp shared")


def test_a_loop_of_one_s_own_is_refused():
    import dure

    model = torch.nn.Linear(2, 1)
    with raising(UsageError, "workers"):
        dure.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), sync="hogwild")
