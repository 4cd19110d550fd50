"""Remedies for stale gradients: their closed forms, at a shard that does as a schedule says, and in whole runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from support.runs import virtual
from support.stale import Bench
from support.wording import raising

import dure
from dure.cli.methods import members
from dure.core.catalogue import combines, load
from dure.errors import StrategyError
from dure.job.optimizer import OptimizerSpec
from dure.run.strategy import REMEDY, Strategy, catalogue, make, member_text
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import LogNormal, ShiftedExponential
from dure.sync.base import traits_of
from dure.sync.corrected import server_optimizer, with_remedy
from dure.sync.remedies import DCASGD, MomentumCompensation, StalenessLR
from dure.topology.correction import Update

START = torch.tensor([1.0, -0.5, 2.0, 0.25], dtype=torch.float64)
CURVATURE = torch.tensor([1.0, 0.5, 0.25, 2.0], dtype=torch.float64)
LOWEST = torch.tensor([0.5, 1.0, -1.0, 0.125], dtype=torch.float64)
STALE = [name for name, place in catalogue("sync").items() if traits_of(load(place)()).stale_gradients]
OTHERS = [name for name in catalogue("sync") if name not in STALE]


def bowl(values: torch.Tensor) -> torch.Tensor:
    """The gradient of a parabola in each coordinate."""
    return CURVATURE * (values - LOWEST)


def slope(values: torch.Tensor) -> torch.Tensor:
    """The gradient of w^2 / 2."""
    return values.clone()


def schedule(workers: int, turns: int, seed: int = 0) -> list[int]:
    return [int(k) for k in np.random.default_rng(seed).integers(workers, size=turns)]


def trajectory(method: Any, workers: int, order: Sequence[int], **optimizer: Any) -> torch.Tensor:
    bench = Bench(method, workers, START, bowl, **{"lr": 0.1} | optimizer)
    seen = []
    for worker in order:
        bench.turn(worker)
        seen.append(bench.values)
    return torch.stack(seen)


@dataclass(frozen=True)
class TrueHessian(DCASGD):
    """DC-ASGD that knows the Hessian's diagonal."""

    def curvature(self, update: Update) -> torch.Tensor:
        return torch.ones_like(update.values) if update.values.numel() == 1 else CURVATURE.clone()


@dataclass(frozen=True)
class OneBackup:
    """What MXNet's optimizer does on a server: one past model for everybody, renewed at every update."""

    lambda_: float = 0.04
    compares: ClassVar[bool] = False

    def correct(self, update: Update) -> None:
        previous = update.keep("previous", None)
        update.gradient.add_(self.lambda_ * update.gradient**2 * (update.values - previous))
        previous.copy_(update.values)


# ---- in text and in Python


def test_text_and_objects_are_the_same_thing() -> None:
    joined = dure.Downpour(n_push=2) + dure.DCASGD(lambda_=0.1) + dure.StalenessLR()
    text = "downpour:n_push=2+dc-asgd:lambda=0.1+staleness-lr"
    assert Strategy.parse(f"ps:shards=2 {text}") == Strategy.of(joined, "ps:shards=2")
    assert member_text("sync", joined) == text
    assert make(text) == joined
    assert hash(make(text)) == hash(joined)
    assert (joined.n_push, traits_of(joined).lockstep, traits_of(joined).topologies) == (2, False, ("ps",))
    assert Strategy.of(joined).text()["sync"] == text
    with pytest.raises(AttributeError):
        _ = joined.no_such_thing


@pytest.mark.parametrize("remedy", catalogue(REMEDY))
def test_a_remedy_lists_exactly_the_methods_that_it_joins(remedy: str) -> None:
    assert set(combines(load(catalogue(REMEDY)[remedy]))) == set(STALE)
    for name in STALE:
        joined = make(f"{name}+{remedy}")
        assert make(member_text("sync", joined)) == joined
    with pytest.raises(StrategyError, match=f'{STALE[0]} does not run over collective: .*"{STALE[0]}.*{remedy}.* ps"'):
        Strategy.of(f"{STALE[0]}+{remedy}", "collective")


def test_remedies_are_listed_beside_the_axes() -> None:
    assert {row["name"] for row in members() if row["axis"] == REMEDY} == set(catalogue(REMEDY))
    (row,) = members("dc-asgd")
    first = row["parameters"][0]
    assert (first["name"], first["type"], first["default"]) == ("lambda", "float", "0.04")
    assert make("downpour+staleness-lr").remedies == (StalenessLR(),)


@pytest.mark.parametrize("name", OTHERS)
def test_a_method_without_stale_gradients_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(StrategyError, match=f'dc-asgd .* {name} has none: .* as "downpour\\+dc-asgd"') as refused:
        with_remedy(load(catalogue("sync")[name])(), DCASGD())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("make_it", "words"),
    [
        (lambda: DCASGD(lambda_=-1), "lambda"),
        (lambda: DCASGD(lambda0=math.nan), "lambda0"),
        (lambda: DCASGD(rho=1), "squares"),
        (lambda: DCASGD(eps=0), "keeps"),
        (lambda: MomentumCompensation(target=1), "momentum"),
    ],
)
def test_bad_parameters_are_named(make_it: Callable[[], Any], words: str) -> None:
    with raising(ValueError, words):
        make_it()


# ---- what must change nothing


@pytest.mark.parametrize("optimizer", [{}, {"momentum": 0.5}, {"name": "adagrad"}], ids=str)
def test_without_lambda_it_is_asynchronous_sgd_bit_for_bit(optimizer: dict[str, Any]) -> None:
    order = schedule(3, 40)
    plain = trajectory("downpour", 3, order, **optimizer)
    assert torch.equal(trajectory("downpour+dc-asgd:lambda=0", 3, order, **optimizer), plain)
    assert not torch.equal(trajectory("downpour+dc-asgd:lambda=1", 3, order, **optimizer), plain)


@pytest.mark.parametrize("method", ["downpour", "ssp:bound=2"])
def test_without_lambda_a_whole_run_is_the_plain_one_bit_for_bit(method: str) -> None:
    machines = Machines(count=3, compute=LogNormal(seconds=0.01, sigma=0.4))
    cluster = Cluster(machines=(machines,), gamma=0, beta=0)  # as fast with a remedy as without
    options: dict[str, Any] = {"cluster": cluster, "steps": 20, "topology": "ps:shards=2"}
    plain = virtual("digits-mlp", method, **options)
    assert plain.summary["staleness"]["mean"] > 0.5
    assert torch.equal(virtual("digits-mlp", f"{method}+dc-asgd:lambda=0", **options).params, plain.params)
    assert not torch.equal(virtual("digits-mlp", f"{method}+dc-asgd:lambda=9", **options).params, plain.params)


REMEDIES = ["dc-asgd:lambda=3", "dc-asgd:mode=adaptive", "staleness-lr", "momentum-compensation", "dc-asgd:clip=true"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("remedy", REMEDIES)
def test_one_worker_is_sgd_whatever_the_remedy(remedy: str) -> None:
    """A delay that does not exist is not compensated."""
    for optimizer in ({}, {"momentum": 0.5}):
        plain = trajectory("downpour", 1, [0] * 20, **optimizer)
        assert torch.equal(trajectory(f"downpour+{remedy}", 1, [0] * 20, **optimizer), plain)
    options: dict[str, Any] = {"workers": 1, "steps": 10, "dtype": "float64"}
    serial = virtual("digits-mlp", "bsp", **options).params
    assert torch.equal(virtual("digits-mlp", f"downpour+{remedy}", **options).params, serial)
    assert torch.equal(virtual("digits-mlp", f"ssp+{remedy}", **options).params, serial)


def test_nobody_in_between_means_no_correction() -> None:
    def run(method: str) -> torch.Tensor:
        bench = Bench(method, 3, START, bowl, lr=0.1)
        for worker in schedule(3, 30):
            bench.pull(worker)
            bench.push(worker)
        return bench.values

    assert torch.equal(run("downpour+dc-asgd:lambda=5"), run("downpour"))
    assert torch.equal(run("downpour+dc-asgd:mode=adaptive+staleness-lr"), run("downpour"))


def test_one_version_old_counts_in_full() -> None:
    order = [0, 1] * 20
    plain = trajectory("downpour", 2, order)
    assert torch.equal(trajectory("downpour+staleness-lr", 2, order), plain)
    assert not torch.equal(
        trajectory("downpour+staleness-lr", 3, [0, 1, 2] * 9), trajectory("downpour", 3, [0, 1, 2] * 9)
    )


# ---- DC-ASGD


def replayed(order: Sequence[int], workers: int, lr: float, correction: Callable[..., torch.Tensor]) -> torch.Tensor:
    """DC-ASGD as the paper prints it: a copy of the model per worker, made when it pulls."""
    values = START.clone()
    backups = [values.clone() for _ in range(workers)]
    squares = [torch.zeros_like(values) for _ in range(workers)]
    seen = []
    for worker in order:
        gradient = bowl(backups[worker])
        values = values - lr * (gradient + correction(gradient, values - backups[worker], squares[worker]))
        backups[worker] = values.clone()
        seen.append(values)
    return torch.stack(seen)


def constant(gradient: torch.Tensor, moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    return 0.5 * gradient * gradient * moved


def adaptive(gradient: torch.Tensor, moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    squares.mul_(0.95).add_(0.05 * gradient * gradient)
    return 2 / torch.sqrt(squares + 1e-7) * gradient * gradient * moved


def clipped(gradient: torch.Tensor, moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    raw = 40 * gradient * gradient * moved
    return torch.minimum(torch.maximum(raw, -gradient.abs()), gradient.abs())


FORMS = [("lambda=0.5", constant), ("mode=adaptive", adaptive), ("lambda=40,clip=true", clipped)]


@pytest.mark.parametrize(("form", "correction"), FORMS, ids=[form for form, _ in FORMS])
def test_it_is_the_paper_s_with_a_backup_per_worker(form: str, correction: Callable[..., torch.Tensor]) -> None:
    order = schedule(4, 60)
    ours = trajectory(f"downpour+dc-asgd:{form}", 4, order)
    torch.testing.assert_close(ours, replayed(order, 4, 0.1, correction), rtol=1e-12, atol=1e-14)


def test_squares_of_the_present_gradient_alone_make_the_correction_linear_in_it() -> None:
    def linear(gradient: torch.Tensor, moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        return 0.5 * gradient.abs() * moved

    order = schedule(3, 40)
    ours = trajectory("downpour+dc-asgd:mode=adaptive,lambda0=0.5,rho=0,eps=1e-300", 3, order)
    torch.testing.assert_close(ours, replayed(order, 3, 0.1, linear), rtol=1e-12, atol=1e-14)


def test_squares_of_each_worker_are_not_those_of_all() -> None:
    order = schedule(3, 40)
    apart, together = (
        trajectory(f"downpour+dc-asgd:mode=adaptive,squares={s}", 3, order) for s in ("worker", "shared")
    )
    assert not torch.allclose(apart, together)


def test_a_single_backup_for_everybody_is_another_method() -> None:
    """Nor does it leave one worker alone, whose gradients are never stale."""
    once = with_remedy(make("downpour"), OneBackup(lambda_=0.5))
    order = schedule(4, 60)
    assert not torch.allclose(trajectory(once, 4, order), trajectory("downpour+dc-asgd:lambda=0.5", 4, order))
    assert not torch.allclose(trajectory(once, 1, [0] * 20), trajectory("downpour", 1, [0] * 20))


@pytest.mark.parametrize("workers", [2, 5])
def test_with_the_true_hessian_asynchronous_is_sequential(workers: int) -> None:
    method = with_remedy(make("downpour"), TrueHessian())
    ours = trajectory(method, workers, schedule(workers, 60))
    serial = trajectory("downpour", 1, [0] * 60)
    torch.testing.assert_close(ours, serial, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(trajectory("downpour", workers, schedule(workers, 60)), serial, rtol=1e-3)


def test_several_gradients_on_one_pull_are_corrected_from_there() -> None:
    """With `n_fetch` above 1 a worker pushes more than once on what it has pulled."""
    bench = Bench("downpour+dc-asgd:lambda=0.5", 2, START, bowl, lr=0.1)
    values, backups = START.clone(), [START.clone(), START.clone()]
    for step, worker in enumerate(schedule(2, 30)):
        gradient = bowl(backups[worker])
        values = values - 0.1 * (gradient + 0.5 * gradient**2 * (values - backups[worker]))
        bench.push(worker)
        if step % 3 == 0:
            backups[worker] = values.clone()
            bench.pull(worker)
    torch.testing.assert_close(bench.values, values, rtol=1e-12, atol=1e-14)


def test_what_was_fetched_ahead_is_not_what_the_gradient_was_computed_on() -> None:
    bench = Bench("downpour+dc-asgd:lambda=0.5", 2, START, bowl, lr=0.1)
    old = bench.read[0]
    bench.turn(1)
    bench.pull(0)
    bench.read[0] = old
    before = bench.values
    bench.push(0)
    gradient = bowl(START)
    expected = before - 0.1 * (gradient + 0.5 * gradient**2 * (before - START))
    torch.testing.assert_close(bench.values, expected, rtol=1e-12, atol=1e-14)


# ---- memory and restarts


def test_workers_share_backups_and_leave_none_behind() -> None:
    bench = Bench("downpour+dc-asgd:mode=adaptive", 6, START, bowl, lr=0.1)
    assert bench.shard.versions.pool.made == 1, "six have read one version"
    for worker in [0, 1, 2, 3, 4, 5] * 20:
        bench.turn(worker)
    assert bench.shard.versions.pool.made <= 6 + 3
    for worker in range(6):
        bench.call(worker, "leave", keep=[])
    assert len(bench.shard.versions.pool._free) == bench.shard.versions.pool.made - 1, "only the newest is held"
    assert bench.shard.corrections is not None
    assert bench.shard.corrections._vectors == {}


def test_a_worker_that_comes_back_starts_anew_and_is_freed_again() -> None:
    bench = Bench("downpour+dc-asgd", 2, START, bowl, lr=0.1)
    bench.call(0, "pull", incarnation=1).release()
    bench.call(0, "leave", keep=[])
    assert bench.shard.corrections is not None
    assert set(bench.shard.corrections._readers) == {0, 1}, "the leave of a past life ends no present one"
    bench.call(0, "leave", incarnation=1, keep=[])
    assert set(bench.shard.corrections._readers) == {1}


def test_a_shard_that_is_restored_corrects_as_before() -> None:
    """In the middle of things: some read versions are gone, some updates are staged."""

    def begun() -> Bench:
        bench = Bench("k-batch-async:k=2+dc-asgd:mode=adaptive+staleness-lr", 3, START, bowl, lr=0.1)
        for worker in (0, 1):
            bench.push(worker, ordered=True)
        bench.close([(0, 1), (1, 1)])
        bench.pull(0)
        for worker in (0, 2):
            bench.push(worker, ordered=True)
        return bench

    def ended(bench: Bench) -> torch.Tensor:
        bench.close([(0, 2), (2, 1)])
        bench.push(1, ordered=True)
        bench.push(2, ordered=True)
        bench.close([(1, 2), (2, 2)])
        return bench.values

    one, other = begun(), Bench("k-batch-async:k=2+dc-asgd:mode=adaptive+staleness-lr", 3, START, bowl, lr=0.1)
    state = one.shard.state().cloned()
    fresh = Bench(one.method, 0, START, bowl, lr=0.1)
    fresh.shard.restore(state)
    fresh.read, fresh.seq = one.read, list(one.seq)
    assert torch.equal(ended(fresh), ended(one))
    assert not torch.equal(fresh.values, other.values)
    for worker in range(3):
        fresh.call(worker, "leave", keep=[])
    held = {fresh.shard.versions.current, *fresh.shard.versions._kept.values()}
    assert len(fresh.shard.versions.pool._free) == fresh.shard.versions.pool.made - len(held)


# ---- stability under a constant delay


def grows(method: Any, delay: int, rate: float, updates: int = 3000) -> bool:
    """Whether w leaves 0 on w^2 / 2 when every gradient is `delay` versions old."""
    bench = Bench(method, delay + 1, [1.0], slope, lr=rate)
    seen = torch.stack(bench.round_robin(updates)).abs()
    if not torch.isfinite(seen).all():
        return True
    half = updates // 2
    return bool(seen[half:].max() > seen[updates // 4 : half].max())


def delay_bound(delay: int) -> float:
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


@pytest.mark.long
@pytest.mark.parametrize(("delay", "bound"), [(0, 2.0), (1, 1.0), (2, 0.6180), (3, 0.4450), (7, 0.2091)])
def test_the_rate_that_a_constant_delay_allows(delay: int, bound: float) -> None:
    assert delay_bound(delay) == pytest.approx(bound, abs=1e-4)
    assert not grows("downpour", delay, 0.98 * bound)
    assert grows("downpour", delay, 1.02 * bound)
    assert not grows("downpour+dc-asgd:lambda=0", delay, 0.98 * bound)
    assert grows("downpour+dc-asgd:lambda=0", delay, 1.02 * bound)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("delay", "bound"), [(1, 1.0), (2, 1.236), (3, 1.335), (7, 1.463)])
def test_the_rate_that_a_constant_delay_allows_when_divided_by_it(delay: int, bound: float) -> None:
    assert delay * delay_bound(delay) == pytest.approx(bound, abs=1e-3)
    assert not grows("downpour+staleness-lr", delay, 0.98 * bound)
    assert grows("downpour+staleness-lr", delay, 1.02 * bound)


@pytest.mark.long
def test_a_rate_below_one_is_stable_for_every_delay_when_divided_by_it() -> None:
    for delay in (1, 2, 4, 11, 20):
        assert not grows("downpour+staleness-lr", delay, 0.97)
        assert delay < 2 or grows("downpour", delay, 0.97, updates=300)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("delay", [0, 1, 3, 7])
def test_with_the_true_hessian_the_bound_is_that_of_no_delay(delay: int) -> None:
    method = with_remedy(make("downpour"), TrueHessian())
    assert not grows(method, delay, 1.96)
    assert grows(method, delay, 2.04)


# ---- staleness-aware rate, in groups


def test_each_gradient_of_a_group_is_weighed_by_its_own_staleness() -> None:
    bench = Bench("k-batch-async:k=3+staleness-lr", 3, START, bowl, lr=0.1)
    plain = START.clone()
    for worker in (0, 1):  # two updates of one gradient each, so that worker 2 is two versions behind
        bench.close([(worker, bench.push(worker, ordered=True))])
    bench.pull(0)
    bench.close([(1, bench.push(1, ordered=True))])
    plain, versions = bench.values, {worker: bench.shard.version - bench.read[worker][0] for worker in range(3)}
    assert versions == {0: 1, 1: 3, 2: 3}
    gradients = [bowl(bench.read[worker][1]) for worker in range(3)]
    members = [(worker, bench.push(worker, ordered=True, weight=1 + worker)) for worker in range(3)]
    bench.close(members)
    mean = (1 * gradients[0] + 2 * gradients[1] / 3 + 3 * gradients[2] / 3) / 6
    torch.testing.assert_close(bench.values, plain - 0.1 * mean, rtol=1e-12, atol=1e-14)
    assert mean.norm() <= sum(g.norm() * (1 + w) for w, g in enumerate(gradients)) / 6


def test_it_weighs_before_momentum() -> None:
    """A gradient's weight stays with it in the velocity; the velocity of others is not touched."""
    bench = Bench("downpour+staleness-lr", 3, START, bowl, lr=0.1, momentum=0.5)
    values, velocity = START.clone(), torch.zeros_like(START)
    read, at = [START.clone()] * 3, [0] * 3
    for version, worker in enumerate(schedule(3, 20)):
        staleness = version - at[worker]
        velocity = 0.5 * velocity + bowl(read[worker]) / max(staleness, 1)
        values = values - 0.1 * velocity
        read[worker], at[worker] = values, version + 1
        bench.turn(worker)
    torch.testing.assert_close(bench.values, values, rtol=1e-12, atol=1e-14)


# ---- asynchrony is momentum


def schedules(workers: int, turns: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(workers), repeat=turns)


def expected_path(method: Any, workers: int, turns: int, lr: float = 0.3, **optimizer: Any) -> torch.Tensor:
    """The mean over all schedules in which each step's worker is drawn from all, with equal chances."""
    total = torch.zeros(turns, START.numel(), dtype=torch.float64)
    for order in schedules(workers, turns):
        total += trajectory(method, workers, order, lr=lr, **optimizer)
    return total / workers**turns


def with_momentum(implied: float, own: float, turns: int, lr: float = 0.3) -> torch.Tensor:
    """SGD with `own` momentum on top of a damped one: v' = (own + implied) v - own implied v_before - ..."""
    values, damped, velocity = START.clone(), bowl(START), torch.zeros_like(START)
    seen = []
    for turn in range(turns):
        if turn:
            damped = implied * damped + (1 - implied) * bowl(values)
        velocity = own * velocity + damped
        values = values - lr * velocity
        seen.append(values)
    return torch.stack(seen)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "turns"), [(1, 6), (2, 9), (3, 6), (4, 5)])
def test_in_expectation_asynchrony_is_momentum(workers: int, turns: int) -> None:
    """As torch's SGD with momentum = dampening = 1 - 1/K, exactly, on a quadratic."""
    implied = 1 - 1 / workers
    path = expected_path("downpour", workers, turns)
    torch.testing.assert_close(path, with_momentum(implied, 0.0, turns), rtol=1e-13, atol=1e-13)
    point = torch.nn.Parameter(START.clone())
    optimizer = torch.optim.SGD([point], lr=0.3, momentum=implied, dampening=implied)
    for step in range(turns):
        point.grad = bowl(point.detach())
        optimizer.step()
        torch.testing.assert_close(point.detach(), path[step], rtol=1e-13, atol=1e-13)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("workers", "turns"), [(2, 8), (3, 6)])
def test_the_servers_momentum_adds_to_it(workers: int, turns: int) -> None:
    implied = 1 - 1 / workers
    own = 0.2 - implied
    path = expected_path("downpour+momentum-compensation:target=0.2", workers, turns)
    torch.testing.assert_close(path, with_momentum(implied, own, turns), rtol=1e-13, atol=1e-13)
    moved = torch.diff(torch.cat([START[None], path]), dim=0)
    places = torch.cat([START[None], path])
    for t in range(2, turns):
        expected = (own + implied) * moved[t - 1] - own * implied * moved[t - 2] - (1 - implied) * 0.3 * bowl(places[t])
        torch.testing.assert_close(moved[t], expected, rtol=1e-12, atol=1e-13)


def test_a_constant_delay_is_no_momentum() -> None:
    """Everybody in turn has the mean staleness of random workers, and another path."""
    fixed = trajectory("downpour", 4, [0, 1, 2, 3] * 6, lr=0.3)
    assert (fixed - with_momentum(0.75, 0.0, 24)).abs().max() > 0.1
    assert grows("downpour", 3, 0.5)
    momentum = [float(v[0]) for v in with_momentum(0.75, 0.0, 400, lr=0.5)]
    assert abs(momentum[-1] - 0.5) < 1e-6


@pytest.mark.long
def test_exponential_workers_make_geometric_staleness() -> None:
    workers = 4
    compute = ShiftedExponential(seconds=0.1, shift=0)
    machines = Machines(count=workers, compute=compute)
    cluster = Cluster(machines=(machines,), link=Link(latency=0, bandwidth=1e15), alpha=0, beta=0, gamma=0)
    run = virtual("quadratic", "downpour", cluster, steps=4000, timing_only=True)
    histogram = {int(d): count for d, count in run.summary["staleness"]["histogram"].items()}
    total = sum(histogram.values())
    assert total == 4000 * workers
    assert sum(d * n for d, n in histogram.items()) / total == pytest.approx(workers - 1, rel=0.03)
    for d in range(8):
        assert histogram[d] / total == pytest.approx(0.25 * 0.75**d, abs=0.012)


TABLE = {1: 0.9, 2: 0.4, 4: 0.15, 8: 0.025, 16: -0.0375, 32: -0.06875}


@pytest.mark.parametrize(("workers", "momentum"), TABLE.items())
def test_the_momentum_that_is_left_to_the_servers(workers: int, momentum: float) -> None:
    job = OptimizerSpec("momentum", lr=0.1)
    for text in ("downpour+momentum-compensation", "ssp+momentum-compensation:target=0.9"):
        rule = server_optimizer(make(text), job, workers)
        assert rule.momentum == pytest.approx(momentum)
        assert rule.lr == 0.1


def test_workers_of_one_update_count_as_one() -> None:
    job = OptimizerSpec("momentum", lr=0.1)
    assert server_optimizer(make("k-batch-async:k=4+momentum-compensation"), job, 16).momentum == pytest.approx(0.15)
    assert server_optimizer(make("k-async:k=4+momentum-compensation"), job, 4).momentum == pytest.approx(0.9)


def test_momentum_of_exactly_nothing_is_plain_sgd() -> None:
    rule = server_optimizer(
        make("downpour+momentum-compensation:target=0.5"), OptimizerSpec("momentum", nesterov=True), 2
    )
    assert (rule.name, rule.momentum, rule.nesterov) == ("sgd", 0.0, False)


def test_momentum_is_for_sgd() -> None:
    with raising(StrategyError, "momentum"):
        virtual("digits-mlp", "downpour+momentum-compensation", workers=2, steps=2, optimizer="adam")
    with raising(StrategyError, "adagrad"):
        virtual("digits-mlp", "downpour:server=adagrad+momentum-compensation", workers=2, steps=2)


# ---- whole runs


def test_remedies_act_in_the_order_in_which_they_are_joined() -> None:
    order = schedule(4, 40)
    paths = [
        trajectory(f"downpour+{a}+{b}", 4, order)
        for a, b in itertools.permutations(["dc-asgd:lambda=1", "staleness-lr"])
    ]
    assert not torch.allclose(*paths)


@pytest.mark.parametrize(
    "text", ["dc-asgd:mode=adaptive", "staleness-lr", "dc-asgd+staleness-lr+momentum-compensation"]
)
def test_results_do_not_depend_on_how_the_model_is_cut(text: str) -> None:
    """Where messages take no time: otherwise several servers answer later than one, and orders differ."""
    machines = Machines(count=3, compute=LogNormal(seconds=0.01, sigma=0.4))
    cluster = Cluster(machines=(machines,), gamma=0, beta=0, alpha=0, link=Link(latency=1e-12, bandwidth=1e15))
    one, four = (virtual("digits-mlp", f"ssp+{text} ps:shards={n}", cluster, steps=15).params for n in (1, 4))
    assert torch.equal(one, four)
