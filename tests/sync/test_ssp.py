"""SSP in both forms: what every read must hold, what caching saves, and what it equals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.runs import Fixed, bowls, virtual
from support.wording import raising

from dure.errors import StrategyError
from dure.job.data.dataset import Data
from dure.job.gradient_engine import GradientEngine
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.run.strategy import make
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal, Trace
from dure.sync.ssp import SSP

WORKERS, STEPS = 3, 12
FORMS = ["snapshot", "rmw"]


class Tally(torch.nn.Module):
    """A vector with a place per worker; a worker's sample is the unit vector of its place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.nn.Parameter(torch.zeros(WORKERS, dtype=torch.float64))

    def forward(self, units: torch.Tensor) -> torch.Tensor:
        return -(units * self.count).sum(dim=1)


def mean_output(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def tally() -> Job:
    """At rate 1 the parameters count every worker's updates."""
    units = torch.eye(WORKERS, dtype=torch.float64)
    data = Data(units, torch.zeros(WORKERS, dtype=torch.float64))
    rule = OptimizerSpec(lr=1.0)
    return Job(name="tally", model=Tally, loss=mean_output, train=data, batch_size=1, optimizer=rule, split=Fixed())


@dataclass(frozen=True)
class Read:
    """Where a worker's gradient was computed: its clock, and how many updates of each worker it saw."""

    worker: int
    clock: int
    seen: tuple[int, ...]


@pytest.fixture
def reads(monkeypatch):
    found: list[Read] = []
    evaluate = GradientEngine.evaluate

    def watching(self: GradientEngine, works: Any) -> Any:
        found.extend(Read(work.rank, work.step, tuple(map(round, work.values.tolist()))) for work in works)
        return evaluate(self, works)

    monkeypatch.setattr(GradientEngine, "evaluate", watching)
    return found


CLUSTERS = {
    "uneven": Cluster(machines=(Machines(count=WORKERS, compute=LogNormal(seconds=0.01, sigma=0.7)),)),
    "one slow": Cluster(machines=(Machines(count=WORKERS, compute=Constant(seconds=0.01), speed=(1.0, 3.0, 0.2)),)),
    "far away": Cluster(
        machines=(
            Machines(count=2, compute=Constant(seconds=0.01)),
            Machines(compute=Constant(seconds=0.01), link=Link(latency=0.03)),
        )
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("servers", ["ps", "ps:shards=2"])
def test_a_read_misses_nothing_old_and_holds_its_own_writes_once(reads, servers, cluster, bound, form):
    virtual(tally(), f"ssp:bound={bound},form={form} {servers}", CLUSTERS[cluster], steps=STEPS, exact=True)
    assert len(reads) == WORKERS * STEPS
    for read in reads:
        assert read.seen[read.worker] == read.clock, "its own writes, each once"
        assert all(seen >= read.clock - bound for seen in read.seen), "an update of clock c - s - 1 is missing"
        assert all(seen <= read.clock + bound + 1 for seen in read.seen), "somebody is too far ahead"
    if bound == 0:
        assert all(set(read.seen) == {read.clock} for read in reads), "the snapshot, and no more"


def test_the_check_would_see_a_cache_that_is_too_old(reads, monkeypatch):
    """As if the bound were one more in the cache's test than in the clock's."""

    async def work(self: SSP, worker: Any) -> None:
        while True:
            if worker.kept_plain.get("cached", -math.inf) < worker.clock - self.bound - 1:
                await worker.server.admission()
                await worker.server.pull()
                worker.kept_plain["cached"] = worker.server.slowest
            gradient = await worker.gradient()
            before = worker.params.clone()
            worker.step(gradient)
            await worker.server.push(worker.params - before)

    monkeypatch.setattr(SSP, "work_on_cache", work)
    virtual(tally(), "ssp:bound=1,form=rmw ps", CLUSTERS["uneven"], steps=STEPS, exact=True)
    assert any(min(read.seen) < read.clock - 1 for read in reads)


@pytest.mark.parametrize(("bound", "pulls"), [(0, 12), (1, 6), (2, 4), (3, 3), (11, 1), (50, 1)])
def test_one_worker_pulls_when_its_cache_is_too_old(bound, pulls):
    run = virtual("quadratic", f"ssp:bound={bound},form=rmw ps:shards=2", workers=1, steps=12, dtype="float64")
    assert run.summary["bytes_received"] == pulls * run.params.nbytes
    assert run.summary["bytes_sent"] == 12 * run.params.nbytes


def test_equally_fast_workers_pull_once_in_a_bound():
    cluster = Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01)),))
    received = {
        form: virtual("quadratic", f"ssp:bound=3,form={form} ps", cluster, steps=40).summary["bytes_received"]
        for form in FORMS
    }
    assert received["rmw"] <= received["snapshot"] / 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "sgd:weight_decay=0.1", "adamw:weight_decay=0.1"])
@pytest.mark.parametrize("bound", [0, 3])
def test_one_worker_is_serial_whatever_the_bound(bound, optimizer):
    options = {"workers": 1, "steps": 10, "dtype": "float64", "optimizer": optimizer, "lr": 0.01}
    cached = virtual("digits-mlp", f"ssp:bound={bound},form=rmw ps:shards=2", **options)
    assert torch.allclose(cached.params, virtual("digits-mlp", "bsp", **options).params, rtol=0, atol=1e-12)


def test_without_lead_the_cached_form_is_bsp_at_the_summed_rate():
    cluster = CLUSTERS["far away"]
    options = {"batch_size": 8, "split": "striped", "steps": 6, "dtype": "float64"}
    summed = virtual("digits-mlp", "ssp:bound=0,form=rmw ps:shards=2", cluster, lr=0.05, **options)
    mean = virtual("digits-mlp", "bsp", lr=0.15, workers=3, **options)
    assert torch.allclose(summed.params, mean.params, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_a_passing_delay_within_the_bound_costs_the_others_nothing(form):
    """Worker 2 takes three steps' time for one; with a bound of 3 nobody notices, with a bound of 1 they do."""
    hiccup = (*[0.01] * 5, 0.03, *[0.01] * 30)
    machines = (
        Machines(count=2, compute=Constant(seconds=0.01)),
        Machines(compute=Trace(durations=hiccup, start="first")),
    )
    link = Link(bandwidth=1e12, latency=1e-7)
    cluster = Cluster(machines=machines, link=link, alpha=0.0, beta=0.0, gamma=0.0)

    def waited(bound: int) -> float:
        run = virtual("quadratic", f"ssp:bound={bound},form={form} ps", cluster, steps=20)
        return run.outcome.totals.time["wait"]

    assert waited(3) < 1e-3
    assert waited(1) > 0.015


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bound", [0, 1])
def test_it_is_stable_below_the_bound_of_its_greatest_delay(bound, form):
    """A read lacks at most about K (2 s + 1) updates: d of them are stable below 2 sin(pi / (2 (2 d + 1)))."""
    workers = 3
    delay = workers * (2 * bound + 1)
    rate = 0.9 * 2 * math.sin(math.pi / (2 * (2 * delay + 1)))
    cluster = Cluster(machines=(Machines(count=workers, compute=LogNormal(seconds=0.01, sigma=0.7)),))
    job = bowls([(1.0, 0.0)] * workers, lr=rate, start=1.0)
    run = virtual(job, f"ssp:bound={bound},form={form} ps", cluster, steps=200)
    assert abs(float(run.params)) < 1e-6


def test_parameters_that_make_no_sense_are_refused():
    with raising(ValueError, "bound=3"):
        SSP(bound=math.inf, form="rmw")


def test_remedies_join_the_form_that_pushes_gradients():
    assert make("ssp:bound=3+dc-asgd").remedies
    with raising(StrategyError, "gradient"):
        make("ssp:bound=3,form=rmw+dc-asgd")
