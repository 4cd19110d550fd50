"""Policies of admission: decisions for what they are told."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from support.wording import raising

from dure.topology.parameter_server.admission import Abort, Accept, Clocks, Close, Decision, Policy, Refuse, Start, most
from dure.topology.parameter_server.policies import AnyOf, Barrier, Bounded, FirstOf

POLICIES = {
    "barrier": Barrier,
    "bounded 0": lambda: Bounded(0),
    "bounded 2": lambda: Bounded(2),
    "bounded inf": lambda: Bounded(math.inf),
    "backup": lambda: FirstOf(most, distinct=True),
    "2-sync": lambda: FirstOf(lambda workers: 2, distinct=True),
    "3-batch-sync": lambda: FirstOf(lambda workers: 3, distinct=False),
    "3-async": lambda: AnyOf(lambda workers: 3, distinct=True),
    "most-batch-async": lambda: AnyOf(most, distinct=False),
    "3-batch-async": lambda: AnyOf(lambda workers: 3, distinct=False),
}


class Run:
    """Workers in a random order of events, and what every policy owes them."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.idle: set[int] = set()
        self.waiting: set[int] = set()
        self.working: dict[int, int] = {}
        self.offering: dict[int, int] = {}
        self.accepted: dict[int, int] = {}
        self.aborted: set[int] = set()
        self.seqs: dict[int, int] = {}
        self.unclosed: set[tuple[int, int]] = set()
        self.versions = 0

    def join(self, worker: int) -> None:
        slowest = min((self.policy.clocks[w] for w in self.live), default=self.policy.clocks.minimum)
        self.idle.add(worker)
        self.heed(self.policy.join(worker))
        assert self.policy.clocks[worker] == slowest

    @property
    def live(self) -> set[int]:
        return self.idle | self.waiting | set(self.working) | set(self.offering) | set(self.accepted)

    def leave(self, worker: int) -> None:
        self.idle.discard(worker)
        self.waiting.discard(worker)
        for some in (self.working, self.offering, self.accepted):
            some.pop(worker, None)
        self.aborted.discard(worker)
        self.heed(self.policy.leave(worker))

    def step(self) -> None:
        worker = self.random.choice(sorted(self.idle | set(self.working) | set(self.accepted)))
        if worker in self.idle:
            self.idle.remove(worker)
            self.waiting.add(worker)
            self.aborted.discard(worker)
            self.heed(self.policy.ask(worker))
        elif worker in self.aborted and self.random.random() < 0.5:
            del self.working[worker]  # else it has not heard, and offers what it has
            self.idle.add(worker)
        elif worker in self.working and self.policy.may_refuse:
            self.offering[worker] = self.working.pop(worker)
            self.heed(self.policy.offer(worker, self.offering[worker]))
        else:
            self.stage(worker)

    def stage(self, worker: int) -> None:
        self.working.pop(worker, None)
        self.accepted.pop(worker, None)
        self.idle.add(worker)
        seq = self.seqs[worker] = self.seqs.get(worker, 0) + 1
        self.unclosed.add((worker, seq))
        self.heed(self.policy.staged(worker, None, seq))

    def heed(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Accept):
                assert decision.group == self.versions == self.offering[decision.worker]
                self.accepted[decision.worker] = self.offering.pop(decision.worker)
            elif isinstance(decision, Refuse):
                assert self.offering.pop(decision.worker) < self.versions
                self.idle.add(decision.worker)
            elif isinstance(decision, Abort):
                assert self.working[decision.worker] == decision.version == self.versions - 1
                self.aborted.add(decision.worker)
            elif isinstance(decision, Close):
                assert decision.group == self.versions
                assert not self.accepted, "what was accepted counts"
                assert list(decision.members) == sorted(decision.members)
                assert decision.members
                self.unclosed -= set(decision.members)
                self.versions += 1
            elif isinstance(decision, Start):
                self.waiting.remove(decision.worker)
                self.working[decision.worker] = decision.version
                assert decision.version == self.versions or decision.version == self.policy.floor
        assert self.policy.version == self.versions
        assert self.policy.clocks.minimum == min(
            (self.policy.clocks[worker] for worker in self.live), default=self.policy.clocks.minimum
        )


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_somebody_can_always_go_on_and_everything_counts_once(name: str, seed: int) -> None:
    run = Run(POLICIES[name](), seed)
    for worker in range(4):
        run.join(worker)
    newcomers = 4
    for _ in range(300):
        assert run.idle or run.working or run.accepted, "everybody waits"
        run.step()
        if run.random.random() < 0.03 and len(run.live) > 1:
            run.leave(run.random.choice(sorted(run.live)))
        if run.random.random() < 0.03:
            run.join(newcomers)
            newcomers += 1
    assert newcomers > 4
    for worker in sorted(run.live):
        run.leave(worker)
    assert not run.unclosed, "an update is in no group"
    assert run.versions > 5


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_goes_on_where_it_was_saved(name: str) -> None:
    run = Run(POLICIES[name](), 5)
    for worker in range(3):
        run.join(worker)
    for _ in range(40):
        run.step()
    while run.accepted:
        run.stage(min(run.accepted))
    assert not run.offering
    run.idle |= run.waiting | set(run.working)  # all ask again
    run.waiting, run.working, run.aborted = set(), {}, set()
    again = POLICIES[name]()
    again.restore(json.loads(json.dumps(run.policy.state())))
    assert again.state() == run.policy.state()
    run.policy = again
    for _ in range(40):
        run.step()
    assert run.versions > 5


def test_barrier_closes_when_the_last_live_worker_has_staged() -> None:
    policy = Barrier()
    for worker in (2, 0, 1):
        policy.join(worker)
    assert policy.ask(0) == [Start(0, 0)]
    assert policy.staged(2, None, 7) == []
    assert policy.ask(2) == []
    assert policy.staged(0, None, 3) == []
    assert policy.staged(1, None, 5) == [Close(0, ((0, 3), (1, 5), (2, 7))), Start(2, 1)]
    assert policy.ask(1) == [Start(1, 1)]


def test_barrier_goes_on_without_those_who_leave() -> None:
    policy = Barrier()
    for worker in range(3):
        policy.join(worker)
    policy.staged(0, None, 1)
    policy.staged(1, None, 1)
    policy.ask(1)
    assert policy.leave(0) == []
    assert policy.leave(2) == [Close(0, ((0, 1), (1, 1))), Start(1, 1)]


def test_bounded_releases_those_who_led_too_far() -> None:
    policy = Bounded(1)
    for worker in range(2):
        policy.join(worker)
    assert policy.ask(0) == [Start(0, 0)]
    assert policy.staged(0, None, 1) == [Close(0, ((0, 1),))]
    assert policy.ask(0) == [Start(0, 1)]
    policy.staged(0, None, 2)
    assert policy.ask(0) == []
    assert policy.staged(1, None, 1) == [Close(2, ((1, 1),)), Start(0, 3)]
    policy.staged(0, None, 3)
    assert policy.ask(0) == []
    assert policy.leave(1) == [Start(0, 4)]


def test_bounded_without_lead_serves_the_snapshot() -> None:
    policy = Bounded(0)
    for worker in range(3):
        policy.join(worker)
    for worker in range(3):
        policy.staged(worker, None, 1)
    assert policy.ask(0) == [Start(0, 3)]
    policy.staged(0, None, 2)
    assert policy.floor == 3
    assert policy.ask(1) == [Start(1, 3)], "worker 0's second update is of a later clock"


def test_without_bound_nobody_waits() -> None:
    policy = Bounded(math.inf)
    policy.join(0)
    policy.join(1)
    for seq in range(1, 50):
        policy.staged(0, None, seq)
        assert policy.ask(0) == [Start(0, seq)]


def test_a_newcomer_stands_with_the_slowest() -> None:
    policy = Bounded(3)
    policy.join(0)
    policy.join(1)
    for seq in (1, 2, 3):
        policy.staged(0, None, seq)
    policy.staged(1, None, 1)
    policy.join(2)
    assert policy.clocks[2] == 1


@pytest.mark.parametrize("name", POLICIES)
def test_a_newcomer_after_everybody_has_left_stands_with_the_fastest(name: str) -> None:
    run = Run(POLICIES[name](), 1)
    for worker in range(3):
        run.join(worker)
    fastest = 0
    while run.versions < 6:
        run.step()
        fastest = max(fastest, *(run.policy.clocks[worker] for worker in run.live))
    for worker in sorted(run.live):
        run.leave(worker)
    run.heed(run.policy.join(3))
    assert run.policy.clocks[3] == fastest


def test_bounds_that_make_no_sense_are_refused() -> None:
    for lead in (-1, math.nan):
        with raising(ValueError, "0"):
            Bounded(lead)


def test_the_slowest_clock_costs_the_same_for_any_number_of_workers() -> None:
    """Counted, not timed: a step may look at a few buckets, never at all workers."""
    clocks = Clocks()
    looked = 0

    class Counting(dict[int, int]):
        def __contains__(self, key: object) -> bool:
            nonlocal looked
            looked += 1
            return super().__contains__(key)

        def __iter__(self) -> Any:
            raise AssertionError("a scan")

        values = items = keys = __iter__

    clocks._of, clocks._at = Counting(), Counting()
    for worker in range(10_000):
        clocks.join(worker)
    for step in range(3):
        for worker in range(10_000):
            clocks.advance(worker)
        assert clocks.minimum == step + 1
    assert looked < 100
