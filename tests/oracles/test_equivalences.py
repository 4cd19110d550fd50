"""What must give the same parameters as what else: the methods against each other, and against plain loops."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from support.runs import bowls, resolved, virtual
from torch import Tensor

from dure.job.job import Job, load_job
from dure.job.optimizer import OptimizerSpec
from dure.run.prebuilt import Callbacks
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, Trace
from dure.sync.base import ServerRule
from dure.sync.ssp import SSP
from dure.topology.parameter_server.admission import Decision, Start
from dure.topology.parameter_server.choice import ParameterServer
from dure.topology.parameter_server.policies import Bounded

STEPS = 6
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
SERVERS = [f"ps:shards={shards},split={split}" for shards in (1, 2, 3) for split in ("memory", "layer")]
TOPOLOGIES = ["collective", *SERVERS]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def staggered(workers: int, steps: int, seconds: float = 1.0) -> Cluster:
    """Workers that take turns: worker k's first step ends k / workers later, every other one takes as long."""
    first = [seconds * (1 + rank / workers) for rank in range(workers)]
    kinds = [Machines(count=1, compute=Trace(durations=(t, *[seconds] * steps), start="first")) for t in first]
    return Cluster(machines=tuple(kinds))


def plain_gradients(job: Job, batch_size: int):
    """A gradient function of a job's mini-batches in order, by PyTorch alone, and the initial parameters."""
    model = job.build(0)
    sampler = job.samplers([batch_size], seed=0)[0]
    parameters = list(model.parameters())

    def gradient(values: Tensor) -> Tensor:
        torch.nn.utils.vector_to_parameters(values, parameters)
        inputs, targets = job.train.batch(sampler.next())
        parts = torch.autograd.grad(job.loss(model(inputs), targets), parameters)
        return torch.cat([part.reshape(-1) for part in parts])

    return gradient, torch.nn.utils.parameters_to_vector(parameters).detach().clone()


# ---- BSP is one worker with a large batch


@cache
def alone(batch_size: int, dtype: str, optimizer: str) -> Tensor:
    """By PyTorch alone: its optimizer on the model's own parameters."""
    job = load_job("digits-mlp", dtype=dtype, split="striped")
    model = job.build(0)
    kinds = {"sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam}
    rates = {"sgd": {"lr": 0.1}, "momentum": {"lr": 0.1, "momentum": 0.9}, "adam": {"lr": 0.001}}
    rule = kinds[optimizer](model.parameters(), **rates[optimizer])
    sampler = job.samplers([batch_size], seed=0)[0]
    for _ in range(STEPS):
        inputs, targets = job.train.batch(sampler.next())
        rule.zero_grad()
        job.loss(model(inputs), targets).backward()
        rule.step()
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_bsp_is_one_worker_with_the_whole_batch(workers, topology, dtype):
    run = virtual(
        "digits-mlp", f"bsp {topology}", workers=workers, batch_size=8, split="striped", steps=STEPS, dtype=dtype
    )
    assert distance(run.params, alone(8 * workers, dtype, "sgd")) < TOLERANCE[dtype]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_bsp_weighs_unequal_batches(topology, optimizer):
    options = {"workers": 3, "batch_sizes": (4, 8, 20), "split": "striped", "steps": STEPS, "dtype": "float64"}
    run = virtual("digits-mlp", f"bsp {topology}", optimizer=optimizer, **options)
    assert distance(run.params, alone(32, "float64", optimizer)) < TOLERANCE["float64"]


def test_an_unweighted_mean_of_unequal_batches_would_be_seen():
    """What the test above would miss if the batches agreed: the same sizes on other workers move the result."""
    options = {"workers": 3, "split": "striped", "steps": STEPS, "dtype": "float64"}
    run = virtual("digits-mlp", "bsp", batch_sizes=(4, 8, 20), **options)
    assert distance(run.params, virtual("digits-mlp", "bsp", batch_size=8, **options).params) > 1e-3


# ---- who sums, and who averages


@pytest.mark.parametrize("topology", ["ps", "ps:shards=3,split=layer"])
def test_ssp_without_lead_is_bsp_at_the_summed_rate(topology):
    options = {"workers": 4, "batch_size": 8, "split": "striped", "steps": STEPS, "dtype": "float64"}
    summed = virtual("digits-mlp", f"ssp:bound=0 {topology}", lr=0.025, **options)
    mean = virtual("digits-mlp", "bsp", lr=0.1, **options)
    assert distance(summed.params, mean.params) < 1e-12


def test_ssp_without_lead_is_bsp_whatever_the_speeds():
    """The one far away asks so late for its version that the others have already pushed on top of it."""
    options = {"batch_size": 8, "split": "striped", "steps": STEPS, "dtype": "float64"}
    far = Machines(compute=Constant(seconds=0.003), link=Link(latency=0.05))
    near = Machines(count=2, compute=Constant(seconds=0.001), speed=(1.0, 2.3))
    cluster = Cluster(machines=(near, far))
    summed = virtual("digits-mlp", "ssp:bound=0 ps:shards=2", cluster, lr=0.05, **options)
    mean = virtual("digits-mlp", "bsp", lr=0.15, workers=3, **options)
    assert distance(summed.params, mean.params) < 1e-12


@pytest.mark.parametrize("topology", ["collective", "ps:shards=2"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_averaging_every_step_is_bsp_for_linear_rules(topology, optimizer):
    options = {"workers": 3, "batch_sizes": (4, 8, 20), "split": "striped", "steps": STEPS, "dtype": "float64"}
    averaged = virtual("digits-mlp", f"averaging:period=1 {topology}", optimizer=optimizer, **options)
    assert distance(averaged.params, alone(32, "float64", optimizer)) < 1e-12


@pytest.mark.parametrize("topology", ["collective", "ps:shards=2"])
def test_averaging_every_step_is_not_bsp_for_adam(topology):
    options = {"workers": 3, "batch_size": 8, "split": "striped", "steps": STEPS, "dtype": "float64"}
    averaged = virtual("digits-mlp", f"averaging:period=1 {topology}", optimizer="adam", **options)
    assert distance(averaged.params, alone(24, "float64", "adam")) > 1e-5


@pytest.mark.sampled(2)
@pytest.mark.parametrize("steps", [3, 4, 6, 7])
def test_averaging_over_servers_is_averaging_over_collectives(steps):
    options = {"workers": 3, "batch_sizes": (4, 8, 20), "steps": steps, "dtype": "float64", "optimizer": "adam"}
    one, other = (virtual("digits-mlp", f"averaging:period=3 {t}", **options) for t in ("collective", "ps:shards=3"))
    assert distance(one.params, other.params) < 1e-12


# ---- servers: neither their number nor the cut changes a bit


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum:nesterov=true,weight_decay=0.01", "adagrad", "adam"])
@pytest.mark.parametrize("sync", ["bsp", "ssp:bound=2", "downpour", "averaging:period=2"])
def test_results_do_not_depend_on_the_shards(sync, optimizer):
    """Workers take turns, so that pushes come in one order however many servers there are."""
    cluster = staggered(3, STEPS)
    others = ["ps:shards=3,split=hybrid,bound=1000", "ps:shards=5,split=layer", "ps:shards=3,split=keys"]
    choices = [*SERVERS, *others, "ps:shards=2,colocated=true"]
    if sync != "bsp":
        choices = choices[::3]
    digests = {
        virtual("digits-mlp", f"{sync} {t}", cluster, steps=STEPS, optimizer=optimizer).summary["params_sha256"]
        for t in choices
    }
    assert len(digests) == 1


# ---- Downpour


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_downpour_of_one_worker_is_serial(optimizer):
    run = virtual("digits-mlp", "downpour ps:shards=2", workers=1, steps=10, dtype="float64", optimizer=optimizer)
    gradient, values = plain_gradients(load_job("digits-mlp", dtype="float64"), 32)
    squares = torch.zeros_like(values)
    for _ in range(10):
        g = gradient(values)
        squares += g * g
        values -= 0.1 * g if optimizer == "sgd" else 0.01 * g / (squares.sqrt() + 1e-8)
    assert distance(run.params, values) < 1e-12


@pytest.mark.parametrize(("n_push", "n_fetch", "local_lr"), [(3, 3, 0.0), (1, 2, 0.05), (3, 2, 0.05), (2, 3, 0.1)])
def test_downpour_accrues_a_sum_and_fetches_on_its_own_schedule(n_push, n_fetch, local_lr):
    method = f"downpour:n_push={n_push},n_fetch={n_fetch},local_lr={local_lr}"
    run = virtual("digits-mlp", f"{method} ps:shards=2", workers=1, steps=10, dtype="float64")
    gradient, server = plain_gradients(load_job("digits-mlp", dtype="float64"), 32)
    values, accrued = server, torch.zeros_like(server)
    for step in range(10):
        if step % n_fetch == 0:
            values = server.clone()
        g = gradient(values)
        accrued += g
        values = values - local_lr * g
        if step % n_push == 0 or step == 9:
            server = server - 0.1 * accrued
            accrued = torch.zeros_like(server)
    assert distance(run.params, server) < 1e-12


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [2, 4])
def test_round_robin_downpour_is_gradient_descent_with_constant_delay(workers):
    """One gradient in flight per worker: w(t+1) = w(t) - q w(t - (K-1)), stable below 2 sin(pi / (2 (2d + 1)))."""
    limit = 2 * math.sin(math.pi / (2 * (2 * (workers - 1) + 1)))
    size = {}
    for q in (0.96 * limit, 1.04 * limit):
        steps = 400 // workers
        job = bowls([(1.0, 0.0)] * workers, lr=q, start=1.0)
        run = virtual(job, "downpour ps", staggered(workers, steps), steps=steps)
        path = [1.0]
        for t in range(steps * workers):
            path.append(path[t] - q * path[max(0, t - workers + 1)])
        assert float(run.params) == pytest.approx(path[-1], rel=1e-9)
        size[q] = max(map(abs, path[-20:]))
    assert next(iter(size.values())) < 1 < list(size.values())[1]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_round_robin_downpour_has_a_delay_of_all_the_others(workers):
    run = virtual("quadratic", "downpour ps:shards=2", staggered(workers, 8), steps=8)
    first = {str(delay): 1 for delay in range(workers - 1)}
    histogram = run.summary["staleness"]["histogram"]
    assert histogram == first | {str(workers - 1): 8 * workers - (workers - 1)}
    assert run.summary["staleness"]["max"] == workers - 1


# ---- averaging on bowls


@pytest.mark.parametrize("period", [2, 5])
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_on_a_common_bowl_the_mean_of_local_models_is_the_bsp_trajectory(period, steps):
    options = {"workers": 4, "batch_size": 4, "dtype": "float64", "steps": steps, "lr": 0.7}
    averaged = virtual("quadratic", f"averaging:period={period}", **options)
    assert distance(averaged.params, virtual("quadratic", "bsp", **options).params) < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", ["collective", "ps"])
@pytest.mark.parametrize(("period", "fixed_point"), [(1, 0.5), (2, 0.80508), (5, 1.45268), (50, 2.49354)])
def test_on_different_bowls_averaging_has_a_fixed_point_of_its_own(period, fixed_point, topology):
    a, b, lr = (0.2, 1.8), (1.0, 0.0), 0.5
    reach = [1 - (1 - lr * curvature) ** period for curvature in a]
    exact = sum(r * bk / ak for r, ak, bk in zip(reach, a, b, strict=True)) / sum(reach)
    assert exact == pytest.approx(fixed_point, abs=5e-6)
    rounds = {1: 50, 2: 40, 5: 30, 50: 6}[period]
    run = virtual(
        bowls(list(zip(a, b, strict=True)), lr=lr), f"averaging:period={period} {topology}", workers=2,
        steps=period * rounds,
    )  # fmt: skip
    assert float(run.params) == pytest.approx(exact, abs=1e-9)


# ---- SSP


class Watched(Bounded):
    """Notes each worker's lead when it starts, and how far the clocks have been apart."""

    def __init__(self, lead: float) -> None:
        super().__init__(lead)
        self.leads: dict[int, list[int]] = {}
        self.spread = 0

    def _start(self, worker: int) -> Decision:
        start = super()._start(worker)
        assert isinstance(start, Start)
        self.leads.setdefault(worker, []).append(self.clocks[worker] - self.clocks.minimum)
        return start

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        self.spread = max(self.spread, self.clocks[worker] + 1 - self.clocks.minimum)
        return super().staged(worker, group, seq)


@dataclass(frozen=True)
class WatchedSSP(SSP):
    watched: Watched | None = None

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return replace(super().server_rule(optimizer), policy=self.watched)


def watch_ssp(bound: float, cluster: Cluster, steps: int) -> tuple[Watched, VirtualRun]:
    watched = Watched(bound)
    setup, _ = resolved("quadratic", "ssp ps:shards=2", cluster, on="virtual", steps=steps, trace=True, out="unused")
    strategy = Strategy(WatchedSSP(bound=bound, watched=watched), ParameterServer(shards=2))
    run = VirtualRun(replace(setup, strategy=strategy), cluster, Callbacks())
    run.run()
    return watched, run


@pytest.mark.parametrize("bound", [0, 1, 3, math.inf])
def test_nobody_starts_with_too_great_a_lead(bound):
    machines = Machines(count=5, compute=Constant(seconds=0.1), speed=(1.0, 0.1, 3.0, 1.1, 0.5))
    cluster = Cluster(machines=(machines,))
    watched, _ = watch_ssp(bound, cluster, steps=20)
    assert all(len(leads) == 21 for leads in watched.leads.values()), "20 steps, and the question that ends them"
    assert max(max(leads) for leads in watched.leads.values()) == min(bound, 20)
    assert watched.spread == min(bound + 1, 20)


def test_a_lasting_straggler_throttles_everybody_to_its_rate():
    """A fast worker runs ahead by the bound at its own rate; then it starts whenever the straggler ends a step."""
    machines = (Machines(count=3, compute=Constant(seconds=0.1)), Machines(compute=Constant(seconds=0.1), speed=0.2))
    watched, run = watch_ssp(3, Cluster(machines=machines), steps=40)
    for rank in range(3):
        starts = [span.start for span in run.spans if span.rank_name == f"worker {rank}" and span.kind == "compute"]
        gaps = [after - before for before, after in pairwise(starts)]
        assert gaps[:2] == pytest.approx([0.1, 0.1], abs=2e-3)
        assert gaps[8:] == pytest.approx([0.5] * len(gaps[8:]), abs=2e-3)
        assert set(watched.leads[rank][4:]) == {3}
    assert set(watched.leads[3]) == {0}
    assert watched.spread == 4
