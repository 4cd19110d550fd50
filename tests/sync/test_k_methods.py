"""K-sync, K-batch-sync, K-async, K-batch-async and backup workers: what they equal, and how long they take."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.runs import bowls, local, virtual
from support.wording import raising

from dure.errors import UsageError
from dure.job.gradient_engine import GradientEngine
from dure.job.job import load_job
from dure.run.strategy import make
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal, ShiftedExponential, Trace
from dure.sync.quorum import Backup, KAsync, KBatchAsync, KBatchSync, KSync

UNEVEN = Cluster(machines=(Machines(count=4, compute=LogNormal(sigma=0.5)),))
OPTIONS: dict[str, Any] = {"steps": 8, "batch_size": 8, "split": "striped", "optimizer": "momentum", "lr": 0.05}


def digest(strategy: str, cluster: Cluster, **options: Any) -> str:
    text: str = virtual("digits-mlp", strategy, cluster, **(OPTIONS | options)).summary["params_sha256"]
    return text


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def turns(workers: int, steps: int) -> Cluster:
    """Worker k's first step ends k / workers later, and every other one takes as long."""
    kinds = [
        Machines(compute=Trace(durations=(1 + rank / workers, *[1.0] * steps), start="first"))
        for rank in range(workers)
    ]
    return Cluster(machines=tuple(kinds))


# ---- what equals what, to the bit


@pytest.mark.sampled(4)
@pytest.mark.parametrize("topology", ["ps", "ps:shards=3,split=layer"])
@pytest.mark.parametrize("method", ["k-sync:k=4", "k-async:k=4", "backup:backups=0"])
def test_with_everybody_it_is_bsp(method, topology):
    assert digest(f"{method} {topology}", UNEVEN) == digest(f"bsp {topology}", UNEVEN)


@pytest.mark.parametrize("method", ["k-sync:k=3", "k-async:k=3", "backup:backups=1"])
def test_with_fewer_it_is_not(method):
    assert digest(f"{method} ps", UNEVEN) != digest("bsp ps", UNEVEN)


@pytest.mark.parametrize("backups", [1, 2, 3])
def test_backup_workers_are_k_sync(backups):
    assert digest(f"backup:backups={backups} ps", UNEVEN) == digest(f"k-sync:k={4 - backups} ps", UNEVEN)


def test_the_first_worker_is_the_first_mini_batch():
    assert digest("k-sync:k=1 ps", UNEVEN) == digest("k-batch-sync:k=1 ps", UNEVEN)


def test_one_at_a_time_is_asynchronous_sgd():
    asynchronous = digest("ssp:bound=inf ps:shards=2", UNEVEN)
    assert digest("k-async:k=1 ps:shards=2", UNEVEN) == asynchronous
    assert digest("k-batch-async:k=1 ps:shards=2", UNEVEN) == asynchronous


def test_one_at_a_time_in_turns_is_downpour():
    assert digest("k-batch-async:k=1 ps", turns(4, 8)) == digest("downpour ps", turns(4, 8))


def test_k_mini_batches_are_bsp_only_where_all_are_equally_fast():
    """With one fast worker, it contributes twice to a version."""
    equal = Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01)),))
    assert digest("k-batch-sync:k=4 ps", equal) == digest("bsp ps", equal)
    one_fast = Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01), speed=(3.0, 1.0, 1.0, 1.0)),))
    assert digest("k-batch-sync:k=4 ps", one_fast) != digest("bsp ps", one_fast)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("method", ["backup", "k-sync:k=2", "k-batch-sync", "k-async", "k-batch-async"])
def test_one_worker_alone_is_sgd(method):
    alone = Cluster(machines=(Machines(),))
    assert digest(f"{method.partition(':')[0]}:{'backups=0' if method == 'backup' else 'k=1'} ps", alone) == digest(
        "bsp ps", alone
    )
    if ":" not in method:
        assert digest(f"{method} ps", alone) == digest("bsp ps", alone)


def test_a_worker_that_never_ends_is_as_if_it_were_not_there():
    machines = (Machines(count=3, compute=LogNormal(seconds=0.01)), Machines(compute=Constant(seconds=1e6)))
    options = {"split": "whole"}
    backup = digest("backup:backups=1 ps", Cluster(machines=machines), **options)
    assert backup == digest("bsp ps", Cluster(machines=machines[:1]), **options)


# ---- n-softsync (Zhang, Gupta, Lian, Liu 2016)


@pytest.mark.parametrize(
    ("workers", "splits", "remedy"), [(4, 2, ""), (4, 2, "+staleness-lr"), (5, 5, "+staleness-lr")]
)
def test_n_softsync_is_k_batch_async_with_a_part_of_the_workers(workers, splits, remedy):
    """By hand: workers take turns; c gradients make an update, each divided by how many updates it is behind."""
    k, steps, lr = workers // splits, 6, 0.1
    pairs = [(1.0 + 0.25 * rank, 0.5 * rank) for rank in range(workers)]
    run = virtual(bowls(pairs, lr=lr, start=1.0), f"k-batch-async:k={k}{remedy} ps", turns(workers, steps), steps=steps)
    model, version, read, gathered = 1.0, 0, [(1.0, 0)] * workers, []
    for turn in range(steps * workers):
        rank = turn % workers
        point, base = read[rank]
        gathered.append((pairs[rank][0] * point - pairs[rank][1], base))
        if len(gathered) == k:
            rates = [1 / max(1, version - base) if remedy else 1.0 for _, base in gathered]
            model -= lr / k * sum(rate * gradient for rate, (gradient, _) in zip(rates, gathered, strict=True))
            version, gathered = version + 1, []
        read[rank] = (model, version)
    if gathered:
        rates = [1 / max(1, version - base) if remedy else 1.0 for _, base in gathered]
        model -= lr / len(gathered) * sum(r * g for r, (g, _) in zip(rates, gathered, strict=True))
    assert float(run.params) == pytest.approx(model, rel=1e-12)


# ---- what is dropped, and what is sent


@pytest.mark.parametrize(("method", "k"), [("backup:backups=2", 3), ("k-sync:k=1", 1), ("k-batch-sync:k=3", 3)])
def test_nothing_stale_counts_and_what_does_not_count_is_not_sent(method, k):
    cluster = Cluster(machines=(Machines(count=5, compute=LogNormal(seconds=0.01, sigma=0.5)),))
    run = virtual("digits-mlp", f"{method} ps:shards=2", cluster, steps=20, eval_every=1000)
    facts = run.summary
    assert list(facts["staleness"]["histogram"]) == ["0"]
    left = 20 * 5 - facts["updates_applied"] - facts["updates_refused"]
    assert 0 <= left < (k if "batch" in method else 1), "of a last group that no more came for"
    assert facts["bytes_sent"] == (facts["updates_applied"] + left) * run.params.nbytes
    if "batch" not in method:
        assert facts["updates_refused"] == (5 - k) * 20, "so many a step"
        assert facts["bytes_received"] == 5 * (20 + 1) * run.params.nbytes, "all fetch every version, and the last"


def test_a_gradient_that_is_stopped_is_never_computed_and_its_data_are_used_up(monkeypatch):
    computed = []
    evaluate = GradientEngine.evaluate

    def counting(self: GradientEngine, works: Any) -> Any:
        computed.extend(work.rank for work in works)
        return evaluate(self, works)

    monkeypatch.setattr(GradientEngine, "evaluate", counting)
    machines = (Machines(count=3, compute=Constant(seconds=0.01)), Machines(compute=Constant(seconds=0.05)))
    options = {"steps": 10, "split": "whole", "exact": True}
    run = virtual("digits-mlp", "backup:backups=1 ps", Cluster(machines=machines), **options)
    assert [computed.count(rank) for rank in range(4)] == [10, 10, 10, 0]
    assert run.summary["samples"] == 30 * 32
    slow_later = Event(at=0.055, kind="slow", worker=0, factor=50)
    again = virtual(
        "digits-mlp", "backup:backups=1 ps", Cluster(machines=machines[:1], events=(slow_later,)), **options
    )
    assert again.summary["updates_refused"] == 10


def test_samples_come_from_the_whole_set_unless_asked_otherwise():
    def indices(strategy: str, **options: Any) -> set[int]:
        setup = virtual("digits-mlp", f"{strategy} ps", workers=4, steps=1, **options).setup
        return set(setup.data.source(3).sampler.indices.tolist())  # type: ignore[union-attr]

    everything = len(load_job("digits-mlp").train)
    for method in ("backup", "k-sync", "k-batch-sync", "k-async", "k-batch-async"):
        assert len(indices(method)) == everything
    assert len(indices("bsp")) == pytest.approx(everything / 4, abs=1)
    assert len(indices("backup", split="iid")) == pytest.approx(everything / 4, abs=1)


def test_a_group_that_closes_short_divides_by_its_members():
    """Of four workers two die: w <- w - lr mean(b), over two, where k says three."""
    crashes = tuple(Event(at=0.001, kind="crash", worker=rank) for rank in (2, 3))
    machines = Machines(count=4, compute=Constant(seconds=0.01))
    job = bowls([(0.0, 1.0), (0.0, 3.0), (0.0, 100.0), (0.0, 100.0)], lr=0.5)
    for method in ("k-sync:k=3", "k-async:k=3", "backup:backups=0"):
        run = virtual(job, f"{method} ps", Cluster(machines=(machines,), events=crashes), steps=1)
        assert float(run.params) == 0.5 * (1.0 + 3.0) / 2
        assert run.summary["failures_survived"] == 2


@pytest.mark.parametrize("method", ["k-batch-sync:k=3", "k-batch-async:k=3", "k-sync:k=1", "k-async:k=1"])
def test_one_of_four_is_enough(method):
    """Three die; where an update takes three mini-batches, the one who is left makes all of them."""
    crashes = tuple(Event(at=0.001, kind="crash", worker=rank) for rank in (0, 2, 3))
    cluster = Cluster(machines=(Machines(count=4, compute=Constant(seconds=0.01)),), events=crashes)
    run = virtual(bowls([(1.0, 2.0)] * 4, lr=0.25), f"{method} ps", cluster, steps=12)
    updates = 4 if "batch" in method else 12
    assert run.summary["updates_applied"] == 12
    assert run.summary["staleness"]["max"] == 0
    assert float(run.params) == pytest.approx(2 * (1 - 0.75**updates), rel=1e-12)


@pytest.mark.parametrize("method", ["k-sync:k=1", "backup:backups=3"])
def test_who_was_away_goes_on_where_everybody_is(method):
    """Worker 0 stands still for a third of the run: it has no steps to make up for when the others have done theirs."""
    machines = Machines(count=4, compute=LogNormal(seconds=0.01, sigma=0.3))
    pause = Event(at=0.06, kind="pause", worker=0, duration=0.2)
    run = virtual("quadratic", f"{method} ps", Cluster(machines=(machines,), events=(pause,)), steps=60)
    assert run.summary["updates_applied"] == 60
    assert run.summary["per_worker"]["worker 0"]["steps"] < 45, "it was never away"


# ---- how long an update takes, and how stale it is


OF_A_SAMPLE = {"seconds": 1.0, "flops": load_job("quadratic").flops_per_sample}
"""A step of one sample takes 1 s."""


def exponential(workers: int) -> Cluster:
    """Steps of 1 s on average, and messages that cost nothing to speak of."""
    machines = Machines(count=workers, compute=ShiftedExponential(**OF_A_SAMPLE, shift=0.0))
    return Cluster(machines=(machines,), link=Link(bandwidth=1e15, latency=1e-9), alpha=0.0, beta=0.0, gamma=0.0)


def seconds_per_update(method: str, seconds: float, k: int, workers: int = 8) -> tuple[float, int]:
    options = {"seconds": seconds, "timing_only": True, "batch_size": 1}
    run = virtual("quadratic", f"{method} ps", exponential(workers), **options)
    updates = run.summary["updates_applied"] / k
    return run.seconds / updates, round(updates)


def check(measured: tuple[float, int], mean: float, variance: float) -> None:
    seconds, updates = measured
    assert abs(seconds - mean) < 3 * math.sqrt(variance / updates), f"{seconds} after {updates} updates"


@pytest.mark.long
@pytest.mark.parametrize("method", ["k-sync:k=5", "backup:backups=3", "k-async:k=5"])
def test_an_update_takes_as_long_as_the_fifth_of_eight(method):
    """H_8 - H_3; for exponential times K-async's too, since the rest of a step is as long as a whole one."""
    mean = harmonic(8) - harmonic(3)
    assert mean == pytest.approx(0.88452, abs=5e-6)
    check(seconds_per_update(method, 1000, 5), mean, sum(1 / i**2 for i in range(4, 9)))


@pytest.mark.long
def test_where_the_rest_of_a_step_is_shorter_than_a_whole_one_k_async_is_faster_than_k_sync():
    """Half of each step is fixed: K-sync takes 1/2 + (H_8 - H_3) / 2, K-async less."""
    machines = Machines(count=8, compute=ShiftedExponential(**OF_A_SAMPLE, shift=0.5))
    free = {"link": Link(bandwidth=1e15, latency=1e-9), "alpha": 0.0, "beta": 0.0, "gamma": 0.0}
    cluster = Cluster(machines=(machines,), **free)
    options = {"seconds": 500, "timing_only": True, "batch_size": 1}
    seconds = {}
    for method in ("k-sync", "k-async"):
        run = virtual("quadratic", f"{method}:k=5 ps", cluster, **options)
        seconds[method] = run.seconds * 5 / run.summary["updates_applied"]
    assert seconds["k-sync"] == pytest.approx(0.5 + (harmonic(8) - harmonic(3)) / 2, rel=0.02)
    assert 0.625 < seconds["k-async"] < 0.9 * seconds["k-sync"]


@pytest.mark.long
@pytest.mark.parametrize("method", ["k-batch-sync:k=5", "k-batch-async:k=5"])
def test_five_mini_batches_of_eight_workers_take_five_eighths(method):
    check(seconds_per_update(method, 1000, 5), 0.625, 5 / 64)


def test_bsp_takes_as_long_as_the_last():
    assert harmonic(8) == pytest.approx(2.71786, abs=5e-6)
    check(seconds_per_update("k-sync:k=8", 2000, 8), harmonic(8), sum(1 / i**2 for i in range(1, 9)))


@pytest.mark.parametrize("compute", [Constant(**OF_A_SAMPLE), ShiftedExponential(**OF_A_SAMPLE, shift=0.3)])
def test_any_k_mini_batches_take_k_steps_over_p_whatever_the_times(compute):
    machines = Machines(count=8, compute=compute)
    cluster = Cluster(machines=(machines,), link=Link(bandwidth=1e15, latency=1e-9), alpha=0.0, beta=0.0, gamma=0.0)
    run = virtual("quadratic", "k-batch-async:k=5 ps", cluster, seconds=500, timing_only=True, batch_size=1)
    assert run.seconds * 5 / run.summary["updates_applied"] == pytest.approx(0.625, rel=0.03)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("workers", "k"), [(8, 5), (8, 1), (5, 5), (4, 8)])
def test_a_gradient_is_behind_by_the_others_over_k(workers, k):
    """Each worker has one gradient in flight, so P - 1 others come between its read and its push."""
    options = {"seconds": 800, "timing_only": True, "batch_size": 1}
    run = virtual("quadratic", f"k-batch-async:k={k} ps", exponential(workers), **options)
    assert run.summary["staleness"]["mean"] == pytest.approx((workers - 1) / k, rel=0.03)


@pytest.mark.long
def test_five_times_slower_workers_cost_nothing_up_to_the_backups():
    """And the one too many costs everything."""

    def seconds(slow: int) -> float:
        kinds = (
            Machines(count=8 - slow, compute=Constant(seconds=0.01)),
            *([Machines(count=slow, compute=Constant(seconds=0.05))] if slow else []),
        )
        return virtual("quadratic", "backup:backups=2 ps", Cluster(machines=kinds), steps=50).seconds

    assert seconds(2) == pytest.approx(seconds(0), rel=0.05)
    assert seconds(3) > 4 * seconds(0)


# ---- for real


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["backup", "k-batch-sync:k=1"])
def test_on_processes_too_nothing_stale_counts(method, fork_server):
    run = local("digits-mlp", f"{method} ps:shards=2", fork_server=fork_server, workers=2, steps=60)
    totals = run.outcome.totals
    assert set(totals.staleness.histogram) == {0}
    assert totals.counts["updates_applied"] + totals.counts["updates_refused"] >= 60
    assert totals.counts["bytes_sent"] == totals.counts["updates_applied"] * run.params.nbytes
    assert run.outcome.history[-1]["accuracy"] > 0.7


# ---- parameters


@pytest.mark.parametrize("kind", [KSync, KBatchSync, KAsync, KBatchAsync])
def test_k_is_a_number_of_at_least_one(kind):
    with raising(ValueError, "got 0."):
        kind(k=0)
    assert [kind().quorum(workers) for workers in (1, 2, 16, 40)] == [1, 1, 15, 38]
    assert kind(k=3).quorum(16) == 3


def test_backups_are_a_number_of_at_least_none():
    with raising(ValueError, "Use 0"):
        Backup(backups=-1)
    assert [Backup(backups=2).quorum(workers) for workers in (1, 2, 3, 16)] == [1, 1, 1, 14]
    assert make("backup:backups=none") == Backup()


def test_the_scaled_rate_is_that_of_the_members_of_an_update():
    rates = [
        virtual("digits-mlp", f"{method} ps", workers=8, steps=1, lr=0.01, scale_lr=True).summary["lr"]
        for method in ("bsp", "backup:backups=2", "k-async:k=3")
    ]
    assert rates == pytest.approx([0.08, 0.06, 0.03])


def test_collectives_are_refused():
    with raising(ValueError, "backup:backups=none ps"):
        virtual("digits-mlp", "backup collective", workers=2, steps=1)


def test_uneven_batches_weigh_by_their_size():
    options = {"batch_sizes": (4, 8, 20), "split": "striped", "dtype": "float64", "steps": 6}
    k_sync = virtual("digits-mlp", "k-sync:k=3 ps", workers=3, **options)
    assert torch.equal(k_sync.params, virtual("digits-mlp", "bsp ps", workers=3, **options).params)


@pytest.mark.parametrize("method", ["k-async:k=3", "k-sync:k=3", "k-batch-async:k=3"])
def test_a_last_group_of_few_does_not_count(method):
    """Whether it ends by steps or by seconds, with a slow worker left over or not: every update has three members."""
    machines = (Machines(count=3, compute=LogNormal(seconds=0.01)), Machines(compute=Constant(seconds=0.05)))
    for end in ({"steps": 21}, {"seconds": 0.2}):
        run = virtual("digits-mlp", f"{method} ps", Cluster(machines=machines), **end)
        assert run.summary["updates_applied"] % 3 == 0
        assert run.summary["updates_applied"] > 20
        if method == "k-async:k=3":
            assert run.seconds < 0.4, "the slow one need not make up for what others cannot give"


@pytest.mark.parametrize(("method", "fewest"), [("k-sync:k=5", 5), ("k-async:k=5", 5), ("backup:backups=4", 5)])
def test_more_than_there_are_cannot_be_waited_for(method, fewest):
    with pytest.raises(UsageError, match=f"{method}.*needs at least {fewest} workers, and there are 4"):
        virtual("digits-mlp", f"{method} ps", UNEVEN, steps=2)
    virtual("digits-mlp", f"{method} ps", workers=fewest, steps=2)
