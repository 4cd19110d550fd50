"""Timings of strategies: the seconds of long runs of the same strategy, and closed forms."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from support.wording import raising
from torch import nn

import dure
from dure.errors import ClusterError, UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job, load_job
from dure.planner import timing
from dure.planner.candidates import Scene
from dure.planner.options import PlanOptions
from dure.planner.plan import scene_of
from dure.planner.ranking import ranked
from dure.planner.timing import StepTimes, setup_in, timed
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal

COMMON = {"flops_per_second": 1e9, "overhead": 1e-3}
COMPUTE = Constant(**COMMON)
LINK = Link(bandwidth=1e7, latency=1e-4)


def scene(workers=4, machines=None, batch=128):
    kinds = machines or (Machines(count=workers, compute=COMPUTE),)
    return Scene(load_job("digits-mlp"), Cluster(machines=kinds, link=LINK, alpha=0.0, beta=0.0), batch)


@pytest.mark.parametrize(("bandwidth", "least", "most"), [(1e8, 0.9, 1.3), (1e6, 0.1, 0.4), (12_500, 0.0, 0.0)])
def test_exchanges_of_gossip_that_are_given_up_do_not_count(bandwidth, least, most):
    """A model takes 0.2 ms, 19 ms and 1.5 s of the link, a step 10 ms; a worker gives up after 100 steps."""
    steps = Machines(count=4, compute=Constant(seconds=0.01))
    here = Scene(load_job("digits-mlp"), Cluster(machines=(steps,), link=Link(bandwidth=bandwidth)), 128)
    timing = timed(here, "ad-psgd")
    assert timing.bytes_per_step > 0
    assert least <= timing.exchanges <= most


@pytest.mark.parametrize(("strategy", "tolerance"), [("ad-psgd", 0.12), ("averaging:period=32", 1e-3), ("bsp", 1e-3)])
def test_a_run_ends_with_an_exchange_that_a_plan_counts(strategy, tolerance):
    """A model takes 0.5 s of the link: without its last exchange, the run of ad-psgd would take a third less."""
    steps = Machines(count=4, compute=Constant(seconds=0.01))
    here = Scene(load_job("digits-mlp"), Cluster(machines=(steps,), link=Link(bandwidth=37_500)), 128)
    row = ranked(strategy, timed(here, strategy), here)
    run = VirtualRun(setup_in(here, strategy, steps=here.run), here.cluster, Callbacks()).run()
    assert here.run * row.timing.seconds / row.stepping == pytest.approx(run.totals.seconds, rel=tolerance)


@pytest.mark.parametrize("strategy", ["bsp", "bsp tensor:ways=2", "bsp 1f1b:stages=2,micro=4"])
def test_a_timing_has_a_bound_that_its_seconds_reach_at_the_end(strategy):
    bounds = []
    seconds = timed(scene(), strategy, began=bounds.append).seconds
    assert bounds[0]() == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "strategy", ["averaging:period=4", "downpour ps", "bsp pipedream:stages=2", "backup:backups=1 ps", "bsp 1bit"]
)
def test_a_timing_whose_steps_differ_has_no_bound(strategy):
    timed(scene(), strategy, began=pytest.fail)


LOCKSTEP = (
    "bsp",
    "bsp 1bit",
    "averaging:period=4",
    "bsp ps:shards=2",
    "bsp 1f1b:stages=2,micro=4",
    "bsp pipedream:stages=2",
    "bsp tensor:ways=2",
)


def of_long_runs(here, strategy, fewer, more):
    """Seconds and bytes of a step late in a run."""
    size = timed(here, strategy).batch_size
    options = {"on": here.cluster, "timing_only": True, "batch_size": size, "eval_every": 10_000}
    first, second = (
        dure.train("digits-mlp", strategy=strategy, steps=steps, **options).summary() for steps in (fewer, more)
    )
    steps = more - fewer
    return [(second[key] - first[key]) / steps for key in ("seconds", "bytes_sent")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", LOCKSTEP)
def test_a_few_steps_have_the_seconds_of_many(strategy):
    here = scene()
    seconds, sent = of_long_runs(here, strategy, 20, 40)
    found = timed(here, strategy)
    assert found.seconds == pytest.approx(seconds, rel=1e-6)
    assert found.bytes_per_step == pytest.approx(sent / here.workers, rel=1e-6)
    assert found.samples_per_second == pytest.approx(here.batch / seconds, rel=1e-6)


def test_exchanges_of_unequal_workers_are_in_their_seconds():
    """The fast workers end before the slow one has done a step after the last exchange."""
    slow = Constant(flops_per_second=1e8, overhead=1e-2)
    here = scene(machines=(Machines(count=3, compute=COMPUTE), Machines(count=1, compute=slow)))
    here = here.on(here.cluster.changed(link=Link(bandwidth=1e5, latency=1e-4)))
    seconds, _ = of_long_runs(here, "averaging:period=4", 20, 40)
    assert timed(here, "averaging:period=4").seconds == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "error"),
    [("downpour ps:shards=2", 0.02), pytest.param("easgd:period=8 ps", 0.15, marks=pytest.mark.long)],
)
def test_workers_that_go_at_their_own_pace_have_drifted_apart(strategy, error):
    """Workers of exactly equal speeds would send to the servers at the same times for hundreds of steps."""
    here = scene()
    spread = here.on(here.cluster.changed(machines=(Machines(count=4, compute=LogNormal(sigma=0.02, **COMMON)),)))
    seconds, sent = of_long_runs(spread, strategy, 400, 800)
    found = timed(here, strategy)
    assert found.seconds == pytest.approx(seconds, rel=error)
    assert found.bytes_per_step == pytest.approx(sent / here.workers, rel=0.05)
    assert of_long_runs(here, strategy, 20, 40)[0] > 1.1 * seconds


def test_the_step_of_a_ring_is_its_closed_form():
    here = scene()
    computed = 1e-3 + 32 * here.job.flops_per_sample / 1e9
    nbytes = 4 * here.model.replica.numel
    exchanged = 2 * 3 * (nbytes / 4 / 1e7 + 1e-4)
    assert timed(here, "bsp collective:algorithm=ring").seconds == pytest.approx(computed + exchanged, rel=0.05)


def test_asynchronous_workers_go_at_their_own_speeds():
    """A worker of a fifth of the speed holds synchronous SGD up, and adds a fifth of a worker to asynchronous SGD."""
    kinds = (Machines(count=3, compute=COMPUTE), Machines(count=1, speed=0.2, compute=COMPUTE))
    equal, unequal = scene(), scene(machines=kinds)
    link = Link(bandwidth=1e12, latency=1e-9)
    equal, unequal = (each.on(each.cluster.changed(link=link)) for each in (equal, unequal))
    plain = timed(equal, "bsp").samples_per_second
    assert timed(unequal, "bsp").samples_per_second == pytest.approx(plain / 5, rel=0.01)
    assert timed(unequal, "downpour ps").samples_per_second == pytest.approx(plain * 3.2 / 4, rel=0.05)


def test_all_copies_of_the_model_have_the_samples_of_all_workers():
    assert timed(scene(), "bsp").batch_size == 32
    assert timed(scene(), "bsp 1f1b:stages=2,micro=4").batch_size == 64


def test_servers_on_machines_of_their_own_are_counted():
    assert timed(scene(), "bsp ps:shards=2").server_machines == 2
    assert timed(scene(), "bsp ps:shards=4,colocated=true").server_machines == 0


def test_a_model_that_does_not_fit_is_refused():
    small = (Machines(count=4, compute=COMPUTE, memory=1000),)
    with pytest.raises(UsageError, match="bytes of memory or more"):
        timed(scene(machines=small), "bsp")


def test_cuts_by_a_profile_do_not_depend_on_the_strategies_timed_before():
    """Copies of the model in a pipeline of four workers have mini-batches twice as large as in one of two."""
    widths = (32, 128, 128, 8, 32)

    def model():
        return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))

    data = Data(torch.zeros(64, widths[0]), torch.zeros(64, dtype=torch.long))
    job = Job(model, nn.functional.cross_entropy, data, batch_size=8)
    kinds = (Machines(count=4, compute=Constant(flops_per_second=1e9, overhead=1e-4)),)
    here = Scene(job, Cluster(machines=kinds, link=LINK), 64)
    wanted = "bsp pipedream:stages=2,cuts=profile"
    alone = setup_in(here, wanted).stages.layout.bounds
    fresh = Scene(here.job, here.cluster, here.batch)
    assert setup_in(fresh, "bsp 1f1b:stages=4,micro=4,cuts=profile").stages.layout.bounds == (0, 1, 2, 3, 4)
    assert setup_in(fresh, wanted).stages.layout.bounds == alone


@pytest.mark.parametrize("bandwidth", [1.25e5, 1.25e6, 1.25e9])
@pytest.mark.parametrize("micro", [4, 6, 16])
def test_a_pipeline_without_a_flush_is_timed_for_few_steps_where_their_periods_are_equal(micro, bandwidth, monkeypatch):
    """The seconds of few steps are those of many; on a slow link, on which messages queue, many are timed."""
    kinds = (Machines(count=4, compute=COMPUTE),)
    here = Scene(load_job("digits-mlp:depth=4"), Cluster(machines=kinds, link=Link(bandwidth=bandwidth)), 128)
    strategy, steps = f"bsp pipedream-2bw:stages=4,micro={micro}", []
    monkeypatch.setattr(
        timing, "setup_in", lambda *args, **rest: steps.append(rest["steps"]) or setup_in(*args, **rest)
    )
    found = timed(here, strategy).seconds
    monkeypatch.setattr(timing, "_short_window", lambda strategy, cluster: None)
    assert found == pytest.approx(timed(here, strategy).seconds, rel=2e-3)
    short, usual = steps[0], steps[-1]
    assert short < usual
    assert len(steps) <= 3


def test_speeds_are_those_of_whole_periods_before_the_first_worker_ends():
    times = StepTimes(warm=1, period=2)
    for worker, seconds in ((0, (1.0, 2.0, 2.5, 4.0, 4.5)), (1, (2.0, 4.0, 6.0, 8.0))):
        for number, now in enumerate(seconds):
            times(
                SimpleNamespace(number=worker, sessions=SimpleNamespace(peer=None)),
                now,
                lambda number=number: 10 * number,
            )
    assert times.steps_per_second() == {0: 2 / 2.0, 1: 1 / 2.0}
    assert times.bytes_per_second() == 20 / 2.0


@pytest.mark.parametrize(("bandwidth", "steps"), [(1e7, 2_000), pytest.param(1e6, 20_000, marks=pytest.mark.long)])
def test_exchanges_that_last_longer_than_many_steps_are_in_the_bytes(bandwidth, steps):
    """Gossip behind the computation: an exchange of these slow networks takes some ten or hundred steps."""
    machines = (Machines(count=4, compute=Constant(flops_per_second=1e12, overhead=1e-4)),)
    slow = Scene(load_job("digits-mlp"), Cluster(machines=machines, link=Link(bandwidth=bandwidth)), 128)
    found = timed(slow, "ad-psgd")
    run = dure.train(
        "digits-mlp", strategy="ad-psgd", on=slow.cluster, timing_only=True, batch_size=32, steps=steps
    ).summary()
    assert found.bytes_per_step == pytest.approx(run["bytes_sent"] / 4 / steps, rel=0.5)
    assert found.seconds == pytest.approx(run["seconds"] / steps, rel=0.1)


def test_dropped_gradients_of_a_worker_that_is_always_late_count_once():
    """Its steps are no part of the speed, so their share of the gradients does not lower it."""
    kinds = (Machines(count=3, compute=COMPUTE), Machines(count=1, speed=0.1, compute=COMPUTE))
    here = scene(machines=kinds)
    run = dure.train(
        "digits-mlp", strategy="backup:backups=1 ps", on=here.cluster, timing_only=True, batch_size=32, steps=200
    ).summary()
    applied = run["updates_applied"] * 32 / run["seconds"]
    assert timed(here, "backup:backups=1 ps").samples_per_second == pytest.approx(applied, rel=0.03)


STATED = "machines: [{count: 4, compute: {seconds: 20 ms, call: 1 ms}}]"
UNSTATED = "machines: [{count: 4, compute: {flops_per_second: 1 GFLOP/s}}]"


@pytest.mark.parametrize("text", [STATED, UNSTATED])
@pytest.mark.parametrize("batch", [None, 128])
@pytest.mark.parametrize("strategy", ["bsp", "bsp tensor:ways=4", "bsp 1f1b:stages=2,micro=4"])
def test_a_plan_and_a_run_have_the_same_seconds_of_a_file(text, batch, strategy, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text(text)
    options = PlanOptions.of({"job": "digits-mlp", "on": str(file), "batch_size": batch})
    scene = scene_of(options, None, None, lambda *_: None)
    planned = timed(scene, strategy)

    def seconds(steps):
        given = {"strategy": strategy, "on": str(file), "batch_size": planned.batch_size}
        return dure.train("digits-mlp", steps=steps, timing_only=True, **given).summary()["seconds"]

    assert (seconds(5) - seconds(1)) / 4 == pytest.approx(planned.seconds, rel=1e-9)


def test_stated_seconds_are_those_of_the_jobs_own_mini_batch(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("machines: [{compute: {seconds: 20 ms, call: 1 ms}}]")

    def seconds(**given):
        run = dure.train("digits-mlp", on=str(file), steps=10, timing_only=True, **given)
        return run.summary()["seconds"] / 10

    own = load_job("digits-mlp").batch_size
    assert seconds() == pytest.approx(0.020)
    assert seconds(batch_size=4 * own) == pytest.approx(0.001 + 4 * 0.019)
    flops = 2 * load_job("digits-mlp").own_flops
    file.write_text(f"machines: [{{compute: {{seconds: 20 ms, call: 1 ms, flops: {flops!r}}}}}]")
    assert seconds() == pytest.approx(0.001 + 0.0095)


def test_a_plan_of_a_file_with_seconds_measures_nothing(tmp_path, monkeypatch):
    file = tmp_path / "cluster.yaml"
    file.write_text(STATED)
    monkeypatch.setattr("dure.planner.plan.profile_job", lambda job: pytest.fail("a job was measured"))
    scene = scene_of(PlanOptions.of({"job": "digits-mlp", "on": str(file)}), None, None, lambda *_: None)
    assert scene.times is None


def test_operations_without_their_seconds_are_refused():
    with raising(ClusterError, "compute.flops"):
        Cluster(machines=[{"compute": {"flops": 10.0}}])
