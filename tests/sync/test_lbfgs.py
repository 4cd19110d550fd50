"""Sandblaster L-BFGS against its closed forms: conjugate gradients, steepest descent, one batch by whomever."""

from __future__ import annotations

import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import dyadic_jobs
from support.nodes import World
from support.real_runs import Trial
from support.runs import local, recorded, resolved, resume_local, virtual
from support.wording import raising
from torch.nn.functional import cross_entropy

import dure
from dure.errors import DureError, StrategyError, UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.job.models.quadratic import Point, half_square, quadratic
from dure.job.optimizer import OptimizerSpec
from dure.job.replica import Replica
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks
from dure.run.process import FaultSettings
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.sync import line_search

DIM = 10


def bowl():
    """A quadratic in DIM dimensions with condition number 30, evaluated in five portions."""
    job = quadratic(dim=DIM, conditioning=30.0, noise=0.5, samples=80, dtype="float64")
    job.batch_size = 16
    return job


def center_and_curvature(job):
    return job.train.targets.mean(dim=0).numpy(), np.geomspace(1 / 30.0, 1.0, DIM)


def conjugate_gradients(job):
    """Hestenes and Stiefel, 1952."""
    center, a = center_and_curvature(job)
    places = [np.zeros(DIM)]
    residual = a * (center - places[0])
    direction = residual
    for _ in range(DIM):
        step = residual @ residual / (direction @ (a * direction))
        places.append(places[-1] + step * direction)
        after = residual - step * a * direction
        direction = after + after @ after / (residual @ residual) * direction
        residual = after
    return places


def steepest_descent(job, steps):
    center, a = center_and_curvature(job)
    places = [np.zeros(DIM)]
    for _ in range(steps):
        gradient = a * (places[-1] - center)
        places.append(places[-1] - gradient @ gradient / (gradient @ (a * gradient)) * gradient)
    return places


def after(iterations, parameters, topology="ps:shards=2", **options):
    run = virtual(bowl(), f"lbfgs:iterations={iterations},{parameters} {topology}", steps=10_000, workers=3, **options)
    return run.params.numpy()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("parameters", ["m=1", "m=2,gamma=false", "m=10", "m=10,gamma=false"])
def test_with_an_exact_line_search_it_is_conjugate_gradients(parameters):
    """On a quadratic, for any memory, with and without scaling."""
    places = conjugate_gradients(bowl())
    for iterations in (1, 2, 3, 5, 8):
        found = after(iterations, f"search=exact,{parameters}")
        assert np.abs(found - places[iterations]).max() < 2e-12


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("split", ["memory", "layer"])
def test_any_number_of_shards_gives_the_same_iterates(shards, split):
    one = after(6, "search=exact", "ps")
    assert np.abs(after(6, "search=exact", f"ps:shards={shards},split={split}") - one).max() < 2e-12


def test_it_ends_after_as_many_iterations_as_there_are_dimensions():
    """And then the run ends, long before its mini-batches are spent."""
    run = virtual(bowl(), "lbfgs:search=exact ps:shards=2", steps=10_000, workers=3)
    center, _ = center_and_curvature(bowl())
    assert np.abs(run.params.numpy() - center).max() < 1e-9
    assert run.summary["updates_applied"] <= DIM + 2
    assert run.summary["samples"] < 100 * 80


@pytest.mark.parametrize("gamma", ["true", "false"])
def test_without_memory_it_is_steepest_descent(gamma):
    places = steepest_descent(bowl(), 8)
    for iterations in (1, 4, 8):
        found = after(iterations, f"search=exact,m=0,gamma={gamma}")
        assert np.abs(found - places[iterations]).max() < 2e-12


def bfgs_inverse(pairs, gamma):
    """H by the update of BFGS itself, from gamma I through all pairs: dense, no recursion."""
    inverse = (gamma if pairs else 1.0) * np.eye(DIM)
    for s, y in pairs:
        left = np.eye(DIM) - np.outer(s, y) / (y @ s)
        inverse = left @ inverse @ left.T + np.outer(s, s) / (y @ s)
    return inverse


@pytest.mark.parametrize("m", [1, 3, 10])
@pytest.mark.parametrize("scaled", [True, False])
def test_with_any_line_search_the_direction_is_that_of_bfgs(m, scaled):
    """Seven iterations that backtrack, each from the direction of a dense H; the line search is not on trial here."""
    center, a = center_and_curvature(bowl())
    variance = float((0.5 * (bowl().train.targets.numpy() - center) ** 2 * a).sum(axis=1).mean())
    place, pairs, decrease = np.zeros(DIM), [], 0.0
    for _ in range(7):
        gradient = a * (place - center)
        loss = 0.5 * gradient @ (place - center) + variance
        recent = pairs[-m:]
        gamma = recent[-1][0] @ recent[-1][1] / (recent[-1][1] @ recent[-1][1]) if recent and scaled else 1.0
        direction = -bfgs_inverse(recent, gamma) @ gradient
        start = line_search.Trial(0.0, loss, gradient @ direction)

        async def attempt(step, place=place, direction=direction):
            away = place + step * direction - center
            return line_search.Trial(step, 0.5 * away @ (a * away) + variance, (a * away) @ direction)

        first = 1.0 if pairs else min(1.0, 1.0 / np.sqrt(-start.slope))
        found = World().run(line_search.backtracking(attempt, start, first))
        after_it = place + found.step * direction
        pairs.append((after_it - place, a * (after_it - place)))
        decrease, place = loss - found.loss, after_it
    assert decrease > 0
    text = f"search=backtracking,m={m},gamma={str(scaled).lower()}"
    assert np.abs(after(7, text) - place).max() < 2e-12


def test_who_forgets_pairs_is_no_conjugate_gradients(monkeypatch):
    """Negative control."""
    from dure.sync.lbfgs import LBFGS

    direction = LBFGS.direction

    async def forgetful(self, lead, pairs):
        return await direction(self, lead, pairs[:1])

    monkeypatch.setattr(LBFGS, "direction", forgetful)
    places = conjugate_gradients(bowl())
    assert np.abs(after(5, "search=exact") - places[5]).max() > 1e-3


def test_a_curve_that_bends_downwards_leaves_no_pair():
    """f(w) = -cos w: from 2.8, where it bends the wrong way, a short step gives s'y < 0."""
    from dure.topology.parameter_server.coordinator import Coordinator

    seen, kept = [], []
    order = Coordinator.order

    async def spying(self, *commands):
        dots = await order(self, *commands)
        kept.extend(pair["sy"] for pair in self.kept["pairs"])
        if len(dots) == 3:
            seen.append(dots[0])
        return dots

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Coordinator, "order", spying)
        job = dyadic_jobs.hill()
        run = virtual(job, "lbfgs:search=backtracking,iterations=30 ps", steps=1000, workers=2)
    assert min(seen) < 0 < min(kept)
    assert float(torch.cos(run.params[0])) == pytest.approx(1.0, abs=1e-12)


# ---- as good as the library's


@pytest.mark.long
def test_as_good_as_torch_alone():
    """The training loss after as many evaluations of the whole of digits, with the same memory."""
    job = load_job("digits-mlp")
    replica = Replica(job.build(0))
    alone = torch.optim.LBFGS(replica.module.parameters(), max_iter=30, max_eval=30, line_search_fn="strong_wolfe")
    history = []

    def closure():
        replica.module.zero_grad()
        loss = job.loss(replica.module(job.train.inputs), job.train.targets)
        loss.backward()
        history.append(float(loss.detach()))
        return loss

    alone.step(closure)
    theirs = min(history)
    evaluations = -(-len(job.train) // 32) * 30
    run = virtual("digits-mlp", "lbfgs ps:shards=2", workers=4, steps=evaluations // 4)
    replica.load(run.params)
    with torch.no_grad():
        ours = float(job.loss(replica.module(job.train.inputs), job.train.targets))
    assert theirs < 0.02
    assert ours < 2 * theirs
    assert run.rows[-1]["accuracy"] > 0.95


@pytest.mark.sampled(1)
@pytest.mark.parametrize("search", ["wolfe", "backtracking"])
def test_fixed_batches(search):
    run = virtual("digits-mlp", f"lbfgs:batch=256,search={search} ps", workers=4, steps=200)
    assert run.rows[-1]["accuracy"] > 0.95


# ---- one batch, whoever evaluates it


def one_step(topology="ps:shards=2", cluster=None, *, push_every=3, **options):
    """The exact place after one dyadic step of steepest descent."""
    strategy = f"lbfgs:m=0,iterations=1,search=backtracking,push_every={push_every} {topology}"
    return virtual(dyadic_jobs.dyadic(), strategy, cluster, **{"steps": 10_000} | options)


def stepped():
    """w = 0 - 1/4 (0 - mean of t)."""
    return dyadic_jobs.targets().mean(dim=0) / 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [1, 2, 7])
@pytest.mark.parametrize("push_every", [1, 3, 100])
def test_the_gradient_is_the_batch_s_to_the_last_bit(workers, push_every):
    for shards, batch_size in ((1, 1), (3, 4), (2, 256)):
        compute = LogNormal(seconds=0.01, sigma=1.0)
        on = Cluster.uniform(workers, compute=compute)
        run = one_step(f"ps:shards={shards}", on, push_every=push_every, batch_size=batch_size)
        assert run.params.equal(stepped())
        assert run.summary["updates_applied"] == 1


def test_dead_paused_and_late_workers_leave_no_trace_in_it():
    events = (
        Event(at=0.02, kind="crash", worker=0),
        Event(at=0.03, kind="pause", worker=1, duration=0.5),
        Event(at=0.05, kind="join", worker=3),
        Event(at=0.06, kind="crash", worker=2),
        Event(at=0.1, kind="join", worker=0),
    )
    on = Cluster(machines=(Machines(count=4, compute=LogNormal(seconds=0.01, sigma=0.5)),), events=events)
    run = one_step(cluster=on)
    assert run.params.equal(stepped())
    assert run.summary["failures_survived"] == 2
    assert run.seconds < 0.8, "somebody was waited for while there was work to do"


@pytest.mark.long
@pytest.mark.parametrize("push_every", [1, 8])
@pytest.mark.parametrize("workers", [2, 4, 16])
def test_one_worker_five_times_slower_costs_at_most_a_portion(workers, push_every):
    """One evaluation of 1,000 portions of 10 ms. Messages take 0.2 ms, so a little more than the ideal time is due."""
    compute = Constant(seconds=0.01)
    on = Cluster(machines=(Machines(count=workers - 1, compute=compute), Machines(compute=compute, speed=0.2)))
    job = load_job("quadratic", samples=1000, batch_size=1, dim=3, dtype="float64")
    setup, cluster = resolved(job, f"lbfgs:push_every={push_every} ps", on, on="virtual", steps=10_000)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    times = []
    evaluate = segment.coordinator.evaluate

    async def timed(*arguments, **options):
        times.append(segment.runtime.kernel.now)
        if len(times) == 2:
            segment.coordinator.spent = segment.coordinator.limits.portions
        return await evaluate(*arguments, **options)

    segment.coordinator.evaluate = timed
    segment.run()
    asks = 1000 / (push_every if push_every == 1 else 4) / workers
    assert times[1] - times[0] < 1000 * 0.01 / (workers - 0.8) + 0.01 + asks * 0.002


@pytest.mark.long
def test_a_killed_process_leaves_no_trace_in_it(fork_server):
    """Real processes: one is killed in the middle of the batch, and started again."""
    job = f"{Path(dyadic_jobs.__file__)}:slow_dyadic"
    strategy = "lbfgs:m=0,iterations=1,search=backtracking,push_every=4 ps:shards=2"
    options = {"workers": 3, "steps": 10_000, "eval_every": 1000, "replace": False}
    trial = Trial(TrainConfig(job=job, strategy=strategy, on="local", **options))
    done = set()

    def act(trial):
        if "kill" not in done and trial.driver.steps("worker 1") > 5:
            done.add("kill")
            trial.kill("worker 1")
        elif (
            "start" not in done and "worker 1" in trial.driver.roster.failed and "worker 1" in trial.fork_server.exited
        ):
            done.add("start")
            trial.driver.start("worker 1")

    outcome = trial.run(act, fork_server=fork_server)
    assert done == {"kill", "start"}
    assert outcome.params.equal(stepped())
    assert outcome.totals.failures_survived == 1


@pytest.mark.long
def test_who_stands_still_is_not_waited_for_at_the_end(fork_server):
    """A real worker that is stopped for good: the others finish, and the run ends without it."""
    job = f"{Path(dyadic_jobs.__file__)}:slow_dyadic"
    strategy = "lbfgs:m=0,iterations=1,search=backtracking ps"
    config = TrainConfig(job=job, strategy=strategy, on="local", workers=3, steps=10_000, eval_every=1000)
    trial = Trial(config, FaultSettings(evict_seconds=0.5, log=True))
    stopped = []

    def act(trial):
        if not stopped and trial.driver.steps("worker 2") > 3:
            stopped.append(True)
            trial.fork_server.signal("worker 2", signal.SIGSTOP)

    outcome = trial.run(act, fork_server=fork_server)
    assert stopped
    assert outcome.params.equal(stepped())
    assert outcome.totals.failures_survived == 1
    assert "worker 2" not in trial.driver.roster.finished


# ---- checkpoints, ends, refusals


@pytest.mark.long
def test_a_real_run_is_resumed(tmp_path, fork_server):
    """From its first checkpoint, as if it had been killed before the next."""
    options: dict[str, Any] = {"workers": 2, "steps": 50, "dtype": "float64"}
    record: dict[str, Any] = {"out": tmp_path / "run", "checkpoint_every": 20, "eval_every": 10}
    strategy = "lbfgs:batch=128 ps:shards=2"
    whole = recorded("digits-mlp", strategy, fork_server, **record, **options)
    places = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in places.glob("step-*")) == ["step-20", "step-40"]
    shutil.rmtree(places / "step-40")
    (tmp_path / "run" / "summary.json").unlink()
    resumed = resume_local(tmp_path / "run", fork_server)
    assert resumed.summary["accuracy"] > 0.85
    assert whole.summary()["accuracy"] > 0.85
    assert abs(resumed.summary["samples"] - whole.summary()["samples"]) < 0.3 * whole.summary()["samples"]
    steps = [row["step"] for row in resumed.outcome.history]
    assert steps == sorted(steps)


def test_an_interval_shorter_than_an_iteration_gives_a_checkpoint_per_iteration(tmp_path, fork_server):
    """A real run too makes progress between two of them."""
    options: dict[str, Any] = {"workers": 2, "steps": 24, "checkpoint_every": 1, "out": tmp_path / "run"}
    run = recorded("digits-mlp", "lbfgs:batch=128 ps", fork_server, **options)
    assert run.summary()["updates_applied"] >= 2
    assert len(list((tmp_path / "run" / "checkpoints").glob("step-*"))) >= 2


def test_the_work_ends_in_time(fork_server):
    run = virtual("digits-mlp", "lbfgs ps", Cluster.uniform(4, compute=Constant(seconds=0.01)), seconds=1.0)
    assert 1.0 <= run.seconds < 1.3
    real = local("digits-mlp", "lbfgs ps", fork_server=fork_server, workers=2, seconds=0.5)
    assert real.seconds < 3.0


def test_timing_only():
    """Without numbers every line search takes its first trial: two evaluations of 20 portions make an iteration."""
    options: dict[str, Any] = {"workers": 1, "steps": 300, "timing_only": True}
    run = virtual("digits-mlp", "lbfgs:batch=640 ps:shards=2", **options)
    assert run.summary["updates_applied"] == 300 // (2 * 20)
    assert run.summary["bytes_sent"] > 0


def test_the_first_loss_must_be_a_number():
    job = Job(
        name="nowhere",
        model=partial(Point, 2, torch.float64),
        loss=partial(half_square, torch.ones(2, dtype=torch.float64)),
        train=Data(torch.zeros(4, 1, dtype=torch.float64), torch.full((4, 2), 1e200, dtype=torch.float64)),
        batch_size=2,
        optimizer=OptimizerSpec(lr=0.5),
    )
    with raising(DureError, "begins"):
        virtual(job, "lbfgs ps", workers=2)


def test_random_layers_draw_the_same_at_every_trial():
    """Dropout: the function that is searched does not change while it is searched, nor with who evaluates it."""
    data = load_job("digits-mlp").train

    def model():
        return torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 10))

    job = Job(name="dropout", model=model, loss=cross_entropy, train=data, batch_size=64)
    losses = []
    for workers in (1, 4):
        run = virtual(job, "lbfgs:iterations=4 ps", workers=workers, steps=10_000, dtype=None)
        losses.append(run.rows[-1]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("m=-1", "0"),
        ("batch=-5", "0"),
        ("push_every=0", "push_every"),
        ("iterations=0", "got 0"),
        ("search=newton", "newton"),
    ],
)
def test_bad_parameters_are_refused(parameters, message):
    with raising(StrategyError, message):
        resolved("digits-mlp", f"lbfgs:{parameters} ps")


def test_it_needs_servers_and_the_data():
    with raising(StrategyError, "nearest"):
        resolved("digits-mlp", "lbfgs collective")
    module = torch.nn.Linear(2, 2)
    with raising(UsageError, "coordinator"):
        dure.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), sync="lbfgs")
