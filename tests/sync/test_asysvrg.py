"""AsySVRG against SVRG by plain loops, gradient descent where all samples agree, and what its phases promise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.real_runs import Trial, configured
from support.runs import Bowls, Cycle, Finished, local, mean_output, resolved, virtual
from support.wording import raising
from torch import Tensor

import dure
from dure.core.node import Call
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.job.models.quadratic import Point
from dure.job.optimizer import OptimizerSpec
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant
from dure.sync.asysvrg import AsySVRG
from dure.topology.shared_memory.segment import Access, SharedShard


def gradients(job: Job) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """The mean gradient of given samples at given parameters, by PyTorch alone; the initial parameters."""
    model = job.build(0)
    parameters = list(model.parameters())

    def gradient(values: Tensor, indices: Tensor) -> Tensor:
        torch.nn.utils.vector_to_parameters(values.clone(), parameters)
        inputs, targets = job.train.batch(indices)
        parts = torch.autograd.grad(job.loss(model(inputs), targets), parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    return gradient, torch.nn.utils.parameters_to_vector(parameters).detach().clone()


def svrg(job: Job, steps: int, *, inner: float = 2.0, portion: int = 128) -> Tensor:
    """Johnson and Zhang's, the last iterate beginning the next epoch."""
    gradient, values = gradients(job)
    samples, sampler = len(job.train), replace(job, split="whole").samplers([job.batch_size], seed=0)[0]
    done = 0
    while done < steps:
        snapshot, full = values.clone(), torch.zeros_like(values)
        for start in range(0, samples, portion):
            indices = torch.arange(start, min(start + portion, samples))
            full += gradient(snapshot, indices) * len(indices)
        full /= samples
        for _ in range(math.ceil(round(inner * samples) / job.batch_size)):
            if done == steps:
                break
            indices = sampler.next()
            values = values - job.optimizer.lr * (gradient(values, indices) - gradient(snapshot, indices) + full)
            done += 1
    return values


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


# ---- one worker is SVRG


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("inner", "portion"), [(2.0, 128), (0.3, 359), (0.01, 2000)])  # 359: one is left over
@pytest.mark.parametrize("lock", ["none", "write", "readwrite"])
def test_one_worker_is_svrg(inner, portion, lock):
    steps = 50
    run = virtual(
        "digits-mlp", f"asysvrg:inner={inner},portion={portion},lock={lock}", workers=1, steps=steps, dtype="float64"
    )
    expected = svrg(load_job("digits-mlp", dtype="float64"), steps, inner=inner, portion=portion)
    assert distance(run.params, expected) < 1e-12


@pytest.mark.parametrize("lock", ["none", "readwrite"])
def test_one_process_is_svrg(lock, fork_server):
    options = {"workers": 1, "steps": 30, "dtype": "float64", "fork_server": fork_server}
    run = local("digits-mlp", f"asysvrg:inner=0.3,lock={lock}", **options)
    assert distance(run.params, svrg(load_job("digits-mlp", dtype="float64"), 30, inner=0.3)) < 1e-12


def test_the_first_step_is_one_of_gradient_descent():
    job = load_job("digits-mlp", dtype="float64")
    gradient, values = gradients(job)
    run = virtual("digits-mlp", "asysvrg", workers=1, steps=1, dtype="float64")
    assert distance(run.params, values - 0.1 * gradient(values, torch.arange(len(job.train)))) < 1e-14
    sgd = virtual("digits-mlp", "hogwild", workers=1, steps=1, dtype="float64")
    assert distance(run.params, sgd.params) > 1e-3


def test_a_checkpoint_in_the_middle_of_the_full_gradient_loses_no_portion(monkeypatch, tmp_path):
    """It begins with a step, of the inner loop; so whoever began it has died since, and the others have gone on."""
    suspended: list[int] = []

    def at_a_portion(segment: Any, worker: Any) -> bool:
        if not suspended and worker.clock and int(worker.memory.access.segment.claims[0]) == 300:
            suspended.append(worker.clock)
            segment.suspending = True
        return bool(segment.suspending)

    options: dict[str, Any] = {"strategy": "asysvrg:inner=0.3,portion=100", "workers": 1, "steps": 20}
    whole = dure.train("digits-mlp", on="virtual", **options)
    monkeypatch.setattr(VirtualSegment, "_suspend", at_a_portion)
    stopped = dure.train("digits-mlp", on="virtual", out=tmp_path / "run", checkpoint_every=5, **options)
    assert suspended == [14], "the second epoch's"
    assert stopped.summary()["params_sha256"] == whole.summary()["params_sha256"]


class Lottery(torch.nn.Module):
    """Its gradient is what each evaluation draws."""

    def __init__(self) -> None:
        super().__init__()
        self.place = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.place * torch.rand((), dtype=torch.float64) + 0 * inputs


def test_each_portion_draws_its_own():
    """The first step is by F alone: over one portion a draw, over eight the mean of eight."""
    data = Data(torch.zeros(8, 1, dtype=torch.float64), torch.zeros(8))
    job = Job(name="lottery", model=Lottery, loss=mean_output, train=data, batch_size=1, optimizer=OptimizerSpec(lr=1))
    one, eight = (float(virtual(job, f"asysvrg:portion={n}", workers=1, steps=1).params) for n in (8, 1))
    assert -1 < one < 0
    assert abs(one - eight) > 1e-3


# ---- its locks


@pytest.mark.parametrize(
    ("lock", "reads", "adds"), [("none", False, False), ("write", False, True), ("readwrite", True, True)]
)
def test_what_is_done_alone(monkeypatch, lock, reads, adds):
    found: dict[str, set[bool]] = {"read": set(), "add": set()}
    for name in found:
        does = getattr(Access, name)

        def noted(
            self: Access, *given: Any, name: str = name, does: Any = does, alone: bool = False, **more: Any
        ) -> Any:
            found[name].add(alone)
            return does(self, *given, alone=alone, **more)

        monkeypatch.setattr(Access, name, noted)
    virtual("quadratic", f"asysvrg:lock={lock}", workers=2, steps=5)
    assert found == {"read": {reads}, "add": {adds}}


def test_writers_queue_where_each_has_it_alone():
    """Two gradients take 20 ms, a write 16 ms at 1 ns per byte: four writers side by side, or one after another."""
    numel = 4_000_000
    machines = Machines(count=4, compute=Constant(seconds=0.01))
    on = Cluster(machines=(machines,), gamma="1 ns/B")
    seconds = {}
    for lock in ("none", "write", "readwrite"):
        data = Data(torch.zeros(4, 1), torch.zeros(4))
        wide = Job(name="wide", model=partial(Point, numel, torch.float32), loss=mean_output, train=data, batch_size=1)
        run = virtual(wide, f"asysvrg:inner=20,lock={lock}", on, steps=18, timing_only=True)
        seconds[lock] = run.seconds
    assert seconds["none"] == pytest.approx(0.01 + 18 * 0.036, rel=0.15)
    assert seconds["write"] == pytest.approx(0.03 + 18 * 4 * 0.016, rel=0.15)
    assert seconds["readwrite"] >= seconds["write"]


# ---- its direction


@pytest.mark.parametrize("noise", [0.1, 5.0])
def test_where_samples_share_their_curvature_it_is_gradient_descent(noise):
    """They differ by a constant in the gradient, which cancels: no noise at all is left."""
    from dure.job.models.quadratic import quadratic

    job = replace(quadratic(noise=noise, dtype="float64", dim=20, samples=256), batch_size=4)
    run = virtual(job, "asysvrg:inner=0.2", workers=1, steps=60)
    gradient, values = gradients(job)
    for _ in range(60):
        values = values - 0.5 * gradient(values, torch.arange(256))
    assert distance(run.params, values) < 1e-11
    assert distance(virtual(job, "hogwild", workers=1, steps=60).params, values) > 0.01


PAIRS = [(0.3 + 0.2 * i, math.sin(3.0 * i)) for i in range(8)]


class Listed:
    """Every worker sees the samples in an order that the test gives."""

    def __init__(self, *order: int) -> None:
        self.order = order

    def samplers(self, targets: Tensor, batch_sizes: Any, *, seed: int) -> list[Any]:
        return [Cycle(torch.tensor(self.order), size) for size in batch_sizes]


def bowl(split: Any = "whole", lr: float = 0.25) -> Job:
    inputs = torch.tensor(PAIRS, dtype=torch.float64)
    return Job(
        name="bowls", model=lambda: Bowls(2.0), loss=mean_output, train=Data(inputs, torch.zeros(8)), batch_size=1,
        optimizer=OptimizerSpec(lr=lr), split=split,
    )  # fmt: skip


def test_over_all_samples_the_direction_is_the_full_gradient():
    """Its second step, from one place, for each of the samples in turn."""
    gradient, values = gradients(bowl())
    first = values - 0.25 * gradient(values, torch.arange(8))
    ends = [float(virtual(bowl(Listed(0, i)), "asysvrg", workers=1, steps=2).params) for i in range(8)]
    full = float(first - 0.25 * gradient(first, torch.arange(8)))
    assert sum(ends) / 8 == pytest.approx(full, abs=1e-14)
    assert max(ends) - min(ends) > 0.1, "all samples agree, so that this shows nothing"


# ---- convergence


def cluster(workers: int = 4, *events: Event, slow: float = 0.2) -> Cluster:
    compute = Constant(seconds=0.01)
    kinds = (Machines(count=workers - 1, compute=compute), Machines(compute=compute, speed=slow))
    return Cluster(machines=kinds, events=events)


@pytest.mark.long
@pytest.mark.parametrize("lock", ["none", "write", "readwrite"])
def test_the_error_falls_by_a_factor_an_epoch_where_hogwild_has_a_floor(lock):
    best = sum(b for _, b in PAIRS) / sum(a for a, _ in PAIRS)
    errors = []
    for epoch in (4, 8, 12, 16, 20):  # of 16 updates, of which each of 4 workers of equal speed makes 4
        run = virtual(bowl(lr=0.03), f"asysvrg:lock={lock},portion=2", Cluster.uniform(4), steps=4 * epoch)
        errors.append(abs(float(run.params) - best))
    slopes = [math.log(after / before) / 4 for before, after in pairwise(errors)]
    assert max(slopes) < -0.3
    assert max(slopes) - min(slopes) < 0.1, "no straight line"
    rough = [virtual(bowl(lr=0.03), "hogwild", Cluster.uniform(4), steps=steps) for steps in (80, 160, 163, 320)]
    assert max(abs(float(run.params) - best) for run in rough) > 100 * errors[-1]


# ---- phases


def phases(
    monkeypatch: pytest.MonkeyPatch, job: Job, strategy: str, on: Cluster, **options: Any
) -> tuple[Finished, list[Any]]:
    """A run, and (version, updates so far, weight contributed) when each phase ends."""
    closed: list[Any] = []
    close = SharedShard._close

    def noted(shard: SharedShard, call: Call) -> Any:
        if call.fields["version"] > shard.closed:
            closed.append((call.fields["version"], shard.applied, shard.weight))
        return close(shard, call)

    monkeypatch.setattr(SharedShard, "_close", noted)
    setup, on = resolved(job, strategy, on, on="virtual", eval_every=1000, **options)
    return Finished(setup, VirtualRun(setup, on, Callbacks()).run(), []), closed


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("inner", "updates"), [(2.0, 90), (0.25, 12)])
def test_an_epoch_has_its_updates_whoever_makes_them(monkeypatch, inner, updates):
    """Of 1,437 samples in mini-batches of 32: the counter is shared, and a slow worker makes fewer."""
    job = load_job("digits-mlp")
    run, closed = phases(monkeypatch, job, f"asysvrg:inner={inner},portion=100", cluster(), steps=60)
    whole = [entry for entry in closed if entry[1] < 4 * 60 - updates - 40]
    assert len(whole) >= 3
    assert [version for version, _, _ in closed] == list(range(1, len(closed) + 1))
    for version, applied, weight in whole:
        assert applied == updates * (version // 2)
        assert weight == (len(job.train) if version % 2 else 0)
    assert run.summary["updates_applied"] == 4 * 60


def test_a_slow_worker_holds_the_others_up_by_one_portion_and_one_step_at_most():
    job = load_job("digits-mlp")
    even = virtual(
        job, "asysvrg:portion=32", Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01)),)), steps=45
    )
    uneven = virtual(job, "asysvrg:portion=32", cluster(), steps=45)
    per_worker = uneven.summary["per_worker"]
    assert [per_worker[f"worker {rank}"]["steps"] for rank in range(4)] == [45] * 4
    assert uneven.seconds < 5 * even.seconds * 0.9


def test_who_dies_takes_its_portions_along_for_one_epoch(monkeypatch):
    """At 25 ms worker 3 has handed nothing in of the portions that it has taken."""
    job = load_job("digits-mlp")
    on = Cluster(
        machines=(Machines(count=4, compute=Constant(seconds=0.01)),), events=(Event(at=0.025, kind="crash", worker=3),)
    )
    run, closed = phases(monkeypatch, job, "asysvrg:portion=100", on, steps=60)
    weights = [weight for version, _, weight in closed if version % 2]
    assert 0.6 * len(job.train) < weights[0] < len(job.train)
    assert weights[1] == len(job.train)
    assert run.summary["failures_survived"] == 1
    assert [run.summary["per_worker"][f"worker {rank}"]["steps"] for rank in range(3)] == [60] * 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("at", [0.015, 0.045, 0.1, 0.133, 0.2, 0.31])
@pytest.mark.parametrize("kind", ["crash", "pause"])
def test_nobody_waits_for_ever_whenever_it_happens(at, kind):
    """Whatever the phase; who comes back takes part."""
    away = Event(at=at, kind=kind, worker=1, **({"duration": 30.0} if kind == "pause" else {}))
    events = (away,) if kind == "pause" else (away, Event(at=at + 0.2, kind="join", worker=1))
    run = virtual("digits-mlp", "asysvrg:portion=100,inner=0.5", cluster(4, *events), steps=80)
    steps = [run.summary["per_worker"][f"worker {rank}"]["steps"] for rank in range(4)]
    assert [steps[rank] for rank in (0, 2, 3)] == [80] * 3
    assert steps[1] > 0
    assert run.summary["failures_survived"] <= 1  # a pause before anybody's pace is known is waited for
    assert run.summary["accuracy"] > 0.9


def test_unequal_batches_count_by_their_samples(monkeypatch):
    _, closed = phases(
        monkeypatch, load_job("digits-mlp"), "asysvrg:inner=1", Cluster.uniform(2), steps=60, batch_sizes=(16, 48)
    )
    version, applied, _ = closed[1]
    assert version == 2
    assert 1437 / 48 < applied < 1437 / 16


# ---- processes


@pytest.mark.long
def test_processes_reach_the_optimum_that_hogwild_misses(fork_server):
    """To nine digits, at a constant rate, though they write over each other."""
    options = {"workers": 2, "steps": 600, "batch_size": 4, "dtype": "float64", "lr": 0.2, "fork_server": fork_server}
    optimum = load_job("quadratic", dtype="float64").optimum
    exact = local("quadratic", "asysvrg:inner=0.5", **options)
    rough = local("quadratic", "hogwild", **options)
    assert distance(exact.params, optimum) < 1e-6
    assert distance(rough.params, optimum) > 1e-3


@pytest.mark.long
def test_a_frozen_process_is_left_behind_and_taken_in_again(fork_server):
    import signal

    from dure.run.process import FaultSettings

    config = configured("digits-mlp", "asysvrg:inner=0.5", workers=3, steps=800, lr=0.05)
    trial = Trial(config, FaultSettings(evict_seconds=1.0, log=True))
    happened: dict[str, float] = {}

    def act(trial: Trial) -> None:
        now = time.monotonic()
        if "stop" not in happened and trial.driver.steps("worker 1") > 50:
            happened["stop"] = now
            trial.fork_server.signal("worker 1", signal.SIGSTOP)
        elif "evicted" not in happened and "worker 1" in trial.driver.roster.evicted:
            happened["evicted"] = now
            trial.fork_server.signal("worker 1", signal.SIGCONT)

    outcome = trial.run(act, fork_server=fork_server)
    assert happened["evicted"] - happened["stop"] < 15
    assert outcome.totals.failures_survived >= 1
    assert len(trial.driver.roster.finished) == 3
    assert outcome.history[-1]["accuracy"] > 0.9


# ---- what makes no sense


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"inner": 0.0}, "passes"),
        ({"inner": math.inf}, "passes"),
        ({"inner": math.nan}, "passes"),
        ({"portion": 0}, "samples"),
    ],
)
def test_bad_parameters_are_explained(given, said):
    with raising(ValueError, said):
        AsySVRG(**given)
