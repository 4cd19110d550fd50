"""Periodic averaging: which mean, when, and what of the optimizers; against closed forms and plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import attached
from support.runs import Finished, bowls, resolved, virtual
from support.wording import raising
from torch import Tensor, nn

from dure.errors import StrategyError, UsageError
from dure.job.data.stream import Stream
from dure.job.job import Job
from dure.run.prebuilt import Callbacks
from dure.run.strategy import Strategy
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Link, Machines
from dure.runtime.virtual.compute import Constant
from dure.sync.averaging import Averaging
from dure.sync.local_sgd import FisherWeights, LocalSGD, Rounds
from dure.sync.worker import Worker

TOPOLOGIES = ["collective", "ps"]
A, B, LR = (0.2, 1.8), (1.0, 0.0), 0.5
TWO = list(zip(A, B, strict=True))


def steady(*speeds: float, seconds: float = 0.1, events: tuple[Event, ...] = (), link: Link | None = None) -> Cluster:
    machines = Machines(count=len(speeds), compute=Constant(seconds=seconds), speed=speeds)
    return Cluster(machines=(machines,), events=events, **({"link": link} if link else {}))


@pytest.fixture
def meetings(monkeypatch):
    """The rounds that workers come to, by rank."""
    seen: dict[int, list[Rounds]] = {}
    begin = LocalSGD.begin

    def noted(self: LocalSGD, worker: Worker, rhythm: Rounds) -> None:
        seen.setdefault(worker.rank, []).append(rhythm)
        begin(self, worker, rhythm)

    monkeypatch.setattr(LocalSGD, "begin", noted)
    return seen


def agreed(meetings: dict[int, list[Rounds]]) -> list[Rounds]:
    """Everybody's, who must be in one rhythm."""
    periods = [[(rhythm.began, rhythm.period) for rhythm in mine] for mine in meetings.values()]
    assert all(other == periods[0] for other in periods)
    return meetings[0]


# ---- the schedule, as a function of what is said


def note(rhythm: Rounds, **said: float) -> dict[str, float]:
    known = {name: getattr(rhythm, name) for name in Rounds.__dataclass_fields__}
    return (
        known
        | {"clock": rhythm.began + rhythm.period, "weight": 1.0, "round loss": 1.0, "round step": 0.1, "last sync": 0.2}
        | said
    )


def follow(method: Averaging, losses: list[float], **said: float) -> list[int]:
    """Its periods, if workers say these losses."""
    rhythm, periods = Rounds(method.period), []
    for loss in losses:
        periods.append(rhythm.period)
        rhythm = method.algorithm.after([note(rhythm, **{"round loss": loss}, **said)])
    return periods


def test_a_fixed_period_is_fixed():
    assert follow(Averaging(7), [3.0, 2.0, 1.0, 5.0]) == [7, 7, 7, 7]


def test_a_decaying_period_is_multiplied_every_interval():
    assert follow(Averaging(16, schedule="decay", interval=1), [1.0] * 7) == [16, 8, 4, 2, 1, 1, 1]
    assert follow(Averaging(8, schedule="decay", interval=16), [1.0] * 8) == [8, 8, 4, 4, 4, 4, 2, 2]
    assert follow(Averaging(5, schedule="decay", interval=1, factor=0.9), [1.0] * 6) == [5, 4, 3, 2, 1, 1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("schedule", ["decay", "adaptive"])
def test_intervals_are_counted_from_the_start(schedule, topology, meetings):
    """A loss that stays as it is shortens by `factor` under both schedules, at the first meeting after 20, 40, 60."""
    text = f"averaging:period=16,schedule={schedule},factor=0.75,interval=20 {topology}"
    virtual(bowls(TWO, lr=0.0, start=1.0), text, workers=2, steps=70)
    assert [rhythm.began for rhythm in agreed(meetings)] == [0, 16, 32, 44, 53, 62, 68, 70]


def test_a_period_is_rounded_down():
    assert follow(Averaging(100, schedule="decay", interval=1, factor=0.29), [1.0] * 4) == [100, 29, 8, 2]
    assert follow(Averaging(50, schedule="decay", interval=10), [1.0] * 3) == [50, 25, 12], "once, past five multiples"


@pytest.mark.parametrize("share", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("sync", [0.001, 0.2, 3.0])
def test_the_overhead_is_met_by_the_least_period_that_meets_it(share, sync):
    method = Averaging(4, schedule="overhead", overhead=share)
    *first, tau = follow(method, [1.0] * 3, **{"last sync": sync})
    assert first == [4, 4], "the first meeting's seconds are only known at the second"
    assert sync / (tau * 0.1 + sync) <= share
    assert tau == 1 or sync / ((tau - 1) * 0.1 + sync) > share


def test_the_slowest_counts_for_the_overhead():
    method = Averaging(4, schedule="overhead", overhead=0.5)
    rhythm = Rounds(4, rounds=2, step=0.1, sync=0.3)
    said = [note(rhythm, **{"last sync": 0.3}), note(rhythm, **{"round step": 0.4, "last sync": 0.1})]
    after = method.algorithm.after(said)
    assert (after.step, after.sync) == (pytest.approx(0.2), pytest.approx(0.3)), "means over rounds of the largest"
    assert after.period == 2


def test_adacomm():
    """ceil(sqrt(F / F_0) tau_0), or half the last where that is no less; never longer, and never below one."""
    method = Averaging(16, schedule="adaptive", interval=1)
    losses = [4.0, 2.0, 1.0, 1.0, 9.0, 0.01, 0.01]
    periods = follow(method, losses)
    assert periods[:2] == [16, 8], "the first loss is the measure, so that it cannot shorten: half"
    assert periods[2:] == [4, 2, 1, 1, 1], "sqrt(1/2) 16 is 12, no less than 8; sqrt(1/4) 16 is 8, no less than 4; ..."
    slow = follow(Averaging(100, schedule="adaptive", interval=1, factor=0.99), [1.0, 0.81, 0.64, 0.5, 0.6, 0.3])
    assert slow == [100, 99, 90, 80, 71, 70]


def test_adacomm_never_lengthens_a_period():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        losses = (torch.rand(30, generator=generator) * 3).tolist()
        periods = follow(Averaging(64, schedule="adaptive", interval=1, factor=0.9), losses)
        assert periods == sorted(periods, reverse=True)
        assert periods[-1] >= 1


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_adacomm_without_progress_and_gamma_of_one_is_a_fixed_period(topology, meetings):
    job = bowls(TWO, lr=0.0, start=1.0)
    text = f"averaging:period=4,schedule=adaptive,interval=1,factor=1 {topology}"
    virtual(job, text, workers=2, steps=16)
    assert [(rhythm.began, rhythm.period) for rhythm in agreed(meetings)] == [(c, 4) for c in (0, 4, 8, 12, 16)]


# ---- the schedule in a run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("schedule", ["decay", "adaptive", "overhead"])
def test_all_are_in_one_rhythm(schedule, topology, meetings):
    method = f"averaging:period=12,schedule={schedule},interval=20,overhead=0.03"
    cluster = steady(1.0, 0.7, 0.3, seconds=0.001)
    run = virtual("digits-mlp", f"{method} {topology}", cluster, steps=80, lr=0.05)
    rounds = agreed(meetings)
    assert rounds[0].period == 12
    assert len({rhythm.period for rhythm in rounds}) > 1
    assert [rhythm.began for rhythm in rounds[1:-1]] == [rhythm.began + rhythm.period for rhythm in rounds[:-2]]
    assert rounds[-1].began == 80
    if schedule != "overhead":
        assert run.summary["accuracy"] > 0.8
        periods = [rhythm.period for rhythm in rounds]
        assert periods == sorted(periods, reverse=True)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_overhead_of_a_run_is_what_was_asked_for(topology, meetings):
    """One worker is slow, and the others' waiting is no overhead of meeting: the slow one's share is measured."""
    cluster = steady(1.0, 1.0, 0.5, seconds=0.01, link=Link(bandwidth=1e6))
    text = f"averaging:period=3,schedule=overhead,overhead=0.1 {topology}"
    setup, cluster = resolved("digits-mlp", text, cluster, on="virtual", steps=200, eval_every=1000)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    last = agreed(meetings)[-1]
    assert last.step == pytest.approx(0.02)
    assert last.sync / (last.period * last.step + last.sync) <= 0.1
    assert last.sync / ((last.period - 1) * last.step + last.sync) > 0.1
    meter = segment.runtime.nodes["worker 2"].meter.seconds
    assert 0.07 < meter["communicate"] / segment.totals.seconds < 0.13


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_workers_meet_once_an_epoch(topology, meetings):
    """1,437 samples in mini-batches of 32 are 22.45 steps of two workers, rounded up; `period=23` has the same bits."""
    run = virtual("digits-mlp", f"averaging:schedule=epoch {topology}", workers=2, steps=50)
    assert [(rhythm.began, rhythm.period) for rhythm in agreed(meetings)] == [(0, 23), (23, 23), (46, 23), (50, 23)]
    said = virtual("digits-mlp", f"averaging:period=23 {topology}", workers=2, steps=50)
    assert torch.equal(run.params, said.params)


def test_an_epoch_of_random_windows_has_as_many_as_fit_into_the_text():
    """As `Stream.steps`: 63 windows of 4 tokens, 4 workers with 5 windows each; 252 windows begin somewhere."""
    text = Stream(torch.arange(256) % 7, block=4)
    job = Job(model=lambda: nn.Embedding(7, 7), loss=lambda outputs, targets: outputs.square().mean(), train=text)
    setup, _ = resolved(job, "averaging:schedule=epoch", on="virtual", workers=4, batch_size=5, steps=10)
    assert setup.period == math.ceil(63 / 20)


@pytest.mark.parametrize("schedule", ["decay,factor=0.7", "adaptive,factor=0.7"])
def test_newcomers_and_returned_workers_fall_in(schedule, meetings):
    events = (
        Event(at=1.05, kind="crash", worker=0),
        Event(at=3.0, kind="join", worker=0),
        Event(at=4.0, kind="pause", worker=1, duration=70.0),
        Event(at=5.0, kind="join", worker=3),
    )
    cluster = steady(1.0, 1.0, 1.0, 1.0, events=events)
    text = f"averaging:period=16,schedule={schedule},interval=30 ps"
    setup, cluster = resolved("digits-mlp", text, cluster, on="virtual", steps=150, eval_every=1000)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    assert [worker.clock for worker in segment.workers.values()] == [150] * 4
    assert segment.clock is not None
    assert 1 in segment.clock.lost_workers
    everybody = {rhythm.began: rhythm.period for rhythm in meetings[2]}
    assert len(set(everybody.values())) > 2
    for rank, rounds in meetings.items():
        for rhythm in rounds:
            assert everybody[rhythm.began] == rhythm.period, f"worker {rank}, clock {rhythm.began}"


@pytest.mark.parametrize("strategy", ["averaging:period=9,schedule=decay,interval=10", "averaging:schedule=adaptive"])
def test_with_a_limit_of_time_a_group_ends_at_one_step(strategy):
    cluster = steady(1.0, 0.5, seconds=0.03)
    setup, cluster = resolved("digits-mlp", f"{strategy} collective", cluster, on="virtual", seconds=1.0)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    fast, slow = (worker.clock for worker in segment.workers.values())
    assert fast == slow >= 16


# ---- which mean


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_uniform_weights_do_not_look_at_batches(topology):
    job = bowls([(0.5, 1.0), (1.0, -2.0), (1.0, -2.0), (1.0, -2.0)], lr=LR)
    options: dict[str, Any] = {"workers": 2, "batch_sizes": (1, 3), "steps": 5}
    job.split = Shares((1, 3))  # type: ignore[assignment]
    mine, other = (b / a * (1 - (1 - LR * a) ** 5) for a, b in ((0.5, 1.0), (1.0, -2.0)))
    samples = virtual(job, f"averaging:period=5 {topology}", **options)
    assert float(samples.params) == pytest.approx((mine + 3 * other) / 4, abs=1e-14)
    uniform = virtual(job, f"averaging:period=5,weights=uniform {topology}", **options)
    assert float(uniform.params) == pytest.approx((mine + other) / 2, abs=1e-14)


class Shares:
    """Worker k has the next `sizes[k]` samples, every time."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes

    def samplers(self, targets: Tensor, batch_sizes: Any, *, seed: int) -> list[Any]:
        return [Always(part) for part in torch.arange(len(targets)).split(self.sizes)]


@dataclass
class Always:
    indices: Tensor

    def next(self) -> Tensor:
        return self.indices

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("temperature", [0.5, 3.0, 1e-2, 1e-4])
def test_by_loss_the_better_half_counts_for_more(topology, temperature):
    job = bowls(TWO, lr=LR, start=0.0)
    begun = 0.0
    for _ in range(2):
        weights, ends = [], []
        for a, b in TWO:
            places = [b / a + (begun - b / a) * (1 - LR * a) ** t for t in range(5)]
            loss = sum(0.5 * a * w * w - b * w for w in places[:4]) / 4
            weights.append(-loss / temperature)
            ends.append(places[4])
        weights = [math.exp(each - max(weights)) for each in weights]
        begun = sum(c * w for c, w in zip(weights, ends, strict=True)) / sum(weights)
    text = f"averaging:period=4,weights=loss,temperature={temperature} {topology}"
    assert float(virtual(job, text, workers=2, steps=8).params) == pytest.approx(begun, abs=1e-6)


def test_at_infinite_temperature_all_count_alike():
    options = {"workers": 3, "steps": 6, "dtype": "float64"}
    one = virtual("digits-mlp", "averaging:period=3,weights=loss,temperature=inf", **options)
    other = virtual("digits-mlp", "averaging:period=3,weights=uniform", **options)
    assert float((one.params - other.params).abs().max()) < 1e-15


@pytest.mark.long
def test_curvatures_as_weights_recover_the_optimum(monkeypatch):
    """Each worker at its own optimum after a long period: sum of a_k (b_k / a_k) / sum of a_k is the true one."""

    def curvature(self: FisherWeights, worker: Worker, gradient: Tensor) -> None:
        worker.keep("fisher").fill_(A[worker.rank])

    plain = virtual(bowls(TWO, lr=LR), "averaging:period=400", workers=2, steps=400)
    assert float(plain.params) == pytest.approx(2.5, abs=1e-9)
    monkeypatch.setattr(FisherWeights, "add", curvature)
    run = virtual(bowls(TWO, lr=LR), "averaging:period=400,weights=fisher", workers=2, steps=400)
    assert float(run.params) == pytest.approx(0.5, abs=1e-9)


def test_fisher_weights_are_mean_squared_gradients_of_the_round():
    steps, period = 6, 3
    w = 0.0
    for _ in range(steps // period):
        top = bottom = 0.0
        for a, b in TWO:
            place, squares = w, 0.0
            for _ in range(period):
                gradient = a * place - b
                squares += gradient * gradient
                place -= LR * gradient
            top, bottom = top + squares * place, bottom + squares
        w = top / bottom
    run = virtual(bowls(TWO, lr=LR), f"averaging:period={period},weights=fisher", workers=2, steps=steps)
    assert float(run.params) == pytest.approx(w, rel=1e-9)


def test_what_no_gradient_touches_has_the_plain_mean():
    run = virtual(bowls([(0.0, 0.0), (0.0, 0.0)], lr=LR, start=3.0), "averaging:weights=fisher", workers=2, steps=20)
    assert float(run.params) == 3.0


# ---- rounds of equal time


def test_in_a_round_of_equal_time_the_fast_do_more_and_none_waits():
    text = "averaging:period=10,pace=time ps"
    cluster = steady(1.0, 1.0, 1.0, 0.2)
    setup, cluster = resolved("digits-mlp", text, cluster, on="virtual", steps=101, eval_every=1000)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    assert [worker.clock for worker in segment.workers.values()] == [101, 101, 101, 21], "one to measure, then 10 to 2"
    assert 10.5 < segment.totals.seconds < 10.6, "the first round is one step of the slowest"
    waiting = [segment.runtime.nodes[f"worker {rank}"].meter.seconds["wait"] for rank in range(4)]
    assert max(waiting) < 0.45
    plain = virtual("digits-mlp", "averaging:period=10 ps", cluster, steps=101)
    assert plain.seconds > 50


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_unequal_steps_are_normalised(weights):
    """FedNova: w + tau sum of c_k (w_k - w) / tau_k; the plain mean would lean towards the fast worker's optimum."""
    run = virtual(bowls(TWO, lr=LR), f"averaging:period=8,pace=time,weights={weights} ps", steady(1.0, 0.5), steps=25)
    w = 0.0
    for taus in ((1, 1), (12, 6), (12, 6)):  # the median of paces 0.1 and 0.2 is 0.15
        ends = [b / a + (w - b / a) * (1 - LR * a) ** tau for (a, b), tau in zip(TWO, taus, strict=True)]
        w += sum(taus) / 2 * sum((end - w) / tau for end, tau in zip(ends, taus, strict=True)) / 2
    assert float(run.params) == pytest.approx(w, abs=1e-12)


@pytest.mark.long
def test_without_normalisation_the_fast_would_count_for_more():
    """At a small rate all bowls are slopes, and the fixed point is that of equal steps, not that of two to one."""
    job = bowls([(1.0, 1.0), (1.0, -1.0)], lr=0.001)
    run = virtual(job, "averaging:period=8,pace=time ps", steady(1.0, 0.5), steps=4001)
    assert abs(float(run.params)) < 0.01, "and not 1/3"


@pytest.mark.parametrize("stop", ["crash", "pause"])
def test_rounds_of_equal_time_go_on_without_whoever_is_missing(stop):
    events = (
        Event(at=2.05, kind=stop, worker=0, **({"duration": 70.0} if stop == "pause" else {})),
        Event(at=4.0, kind="join", worker=3),
    )
    cluster = steady(1.0, 1.0, 0.5, 1.0, events=events)
    setup, cluster = resolved("digits-mlp", "averaging:pace=time ps", cluster, on="virtual", steps=300)
    segment = VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None)
    assert segment.run() is None
    outcome = segment.outcome()
    assert outcome.totals.failures_survived == 1
    assert outcome.history[-1]["accuracy"] > 0.9
    assert segment.workers[1].clock == 300


def test_a_checkpoint_while_waiting_for_the_others_changes_no_round(meetings, tmp_path):
    """Who has given its model and waits is stopped there, and neither steps nor gives it again."""
    text = "averaging:period=10,pace=time ps"
    setup, cluster = resolved(
        "digits-mlp", text, steady(1.0, 1.0, 0.2), on="virtual", steps=51, checkpoint_every=21, out=tmp_path
    )
    steps: list[int] = []
    VirtualRun(setup, cluster, Callbacks(checkpoint=lambda step, state: steps.append(step))).run()
    assert steps == [21, 42]
    assert sorted({rhythm.rounds for rhythm in meetings[0]}) == [0, 1, 2, 3, 4, 5, 6]
    assert sorted({rhythm.began for rhythm in meetings[2]}) == [0, 1, 11, 21, 31, 41, 51]


def test_rounds_of_equal_time_need_servers_and_weights_known_beforehand():
    with raising(StrategyError, "different"):
        Strategy.parse("averaging:pace=time")
    with raising(ValueError, "beforehand"):
        Averaging(pace="time", weights="loss")


# ---- the state of the optimizers


def momentum(w: list[float], v: list[float], rounds: int, at_meeting: Callable[[list[float]], None]) -> float:
    """Rounds of three steps of two workers with momentum 0.9, and what becomes of the velocities when they meet."""
    for _ in range(rounds):
        for k, (a, b) in enumerate(TWO):
            for _ in range(3):
                v[k] = 0.9 * v[k] + a * w[k] - b
                w[k] -= 0.1 * v[k]
        w[:] = [sum(w) / 2] * 2
        at_meeting(v)
    return w[0]


def average(v: list[float]) -> None:
    v[:] = [sum(v) / 2] * 2


def forget(v: list[float]) -> None:
    v[:] = [0.0, 0.0]


@pytest.mark.parametrize(("state", "rule"), [("keep", lambda v: None), ("average", average), ("reset", forget)])
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_what_becomes_of_momentum(state, rule, topology):
    text = f"averaging:period=3,state={state} {topology}"
    if (state, topology) == ("average", "ps"):
        with raising(StrategyError, "optimizer"):
            Strategy.parse(text)
        return
    run = virtual(bowls(TWO, lr=0.1), text, workers=2, steps=12, optimizer="momentum")
    assert float(run.params) == pytest.approx(momentum([0.0, 0.0], [0.0, 0.0], 4, rule), abs=1e-13)


def test_the_three_choices_differ_and_adam_can_have_them_too():
    ends: dict[str, Finished] = {}
    for state in ("keep", "average", "reset"):
        options = {"workers": 3, "steps": 9, "dtype": "float64", "optimizer": "adam"}
        ends[state] = virtual("digits-mlp", f"averaging:period=3,state={state}", **options)
    assert len({run.summary["params_sha256"] for run in ends.values()}) == 3
    nbytes = ends["keep"].summary["bytes_sent"]
    assert ends["average"].summary["bytes_sent"] == 3 * nbytes, "Adam has two more vectors"
    assert ends["reset"].summary["bytes_sent"] == nbytes


def test_adam_reset_at_every_step_is_a_first_step_each_time():
    """Corrected for their start, the moments of a first step make it lr times the gradient's sign."""
    run = virtual(bowls([(0.0, 3.0)], lr=0.1), "averaging:period=1,state=reset", workers=1, steps=7, optimizer="adam")
    assert float(run.params) == pytest.approx(7 * run.setup.job.optimizer.lr, rel=1e-6)


# ---- what cannot be


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"period": 0}, "mini-batches"),
        ({"factor": 0.0}, "shortens"),
        ({"factor": 1.5}, "got 1"),
        ({"overhead": 1.0}, "overhead"),
        ({"interval": 0}, "mini-batches"),
        ({"temperature": 0.0}, "temperature"),
        ({"schedule": "often"}, "often"),
    ],
)
def test_bad_parameters_are_refused(given, words):
    with raising(ValueError, words):
        Averaging(**given)


def test_over_servers_weights_are_numbers():
    with raising(StrategyError, "weights=fisher"):
        Strategy.parse("averaging:weights=fisher ps")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("averaging:schedule=adaptive", "stays"),
        ("averaging:schedule=epoch", "samples"),
        ("averaging:weights=loss", "stays"),
        ("averaging:state=average", "state=keep"),
    ],
)
def test_a_loop_of_ones_own_refuses_what_it_cannot_give(text, words):
    module = attached.model()
    with raising(UsageError, words):
        attached.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), text)


@pytest.mark.parametrize("text", ["averaging:schedule=decay,interval=1,weights=fisher", "averaging:schedule=overhead"])
def test_a_loop_of_ones_own_can_have_the_rest(text):
    module, other = attached.model(), attached.model()
    with attached.attach(module, torch.optim.SGD(module.parameters(), lr=0.1), text) as replica:
        for batch in attached.batches(9):
            attached.loss_of(module, batch).backward()
            replica.step()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for batch in attached.batches(9):
        plain.zero_grad()
        attached.loss_of(other, batch).backward()
        plain.step()
    assert attached.flat(module) == pytest.approx(attached.flat(other), abs=1e-6)
