"""Policies of admission: verdicts for what they are told."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from dure.sync.clock import Accept, Barrier, Bounded, Clocks, Close, Policy, Start, Verdict


class KBatchAsync:
    """Any K mini-batches make a version; nobody waits (Dutta et al. 2018). A last group closes short."""

    may_refuse = False
    floor = None

    def __init__(self, k: int) -> None:
        self.k, self.version, self.clocks, self.open = k, 0, Clocks(), list[tuple[int, int]]()

    def join(self, worker: int) -> list[Verdict]:
        self.clocks.join(worker)
        return []

    def leave(self, worker: int) -> list[Verdict]:
        self.clocks.leave(worker)
        return [] if len(self.clocks) or not self.open else self.close()

    def ask(self, worker: int) -> list[Verdict]:
        return [Start(worker, self.version)]

    def offer(self, worker: int, base: int) -> list[Verdict]:
        return [Accept(worker, self.version)]

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self.clocks.advance(worker)
        self.open.append((worker, seq))
        return self.close() if len(self.open) == self.k else []

    def close(self) -> list[Verdict]:
        self.version, members, self.open = self.version + 1, tuple(sorted(self.open)), []
        return [Close(self.version - 1, members)]

    def state(self) -> dict[str, Any]:
        return {"version": self.version, "clocks": self.clocks.state(), "open": self.open}

    def restore(self, state: Any) -> None:
        self.version, self.open = state["version"], [tuple(member) for member in state["open"]]
        self.clocks.restore(state["clocks"])


POLICIES = {
    "barrier": Barrier,
    "bounded 0": lambda: Bounded(0),
    "bounded 2": lambda: Bounded(2),
    "bounded inf": lambda: Bounded(math.inf),
    "3-batch-async": lambda: KBatchAsync(3),
}


class Run:
    """Workers in a random order of events, and what every policy owes them."""

    def __init__(self, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.idle: set[int] = set()
        self.waiting: set[int] = set()
        self.working: dict[int, int] = {}
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
        return self.idle | self.waiting | set(self.working)

    def leave(self, worker: int) -> None:
        self.idle.discard(worker)
        self.waiting.discard(worker)
        self.working.pop(worker, None)
        self.heed(self.policy.leave(worker))

    def step(self) -> None:
        worker = self.random.choice(sorted(self.idle | set(self.working)))
        if worker in self.idle:
            self.idle.remove(worker)
            self.waiting.add(worker)
            self.heed(self.policy.ask(worker))
        else:
            del self.working[worker]
            self.idle.add(worker)
            seq = self.seqs[worker] = self.seqs.get(worker, 0) + 1
            self.unclosed.add((worker, seq))
            self.heed(self.policy.staged(worker, None, seq))

    def heed(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Close):
                assert verdict.group == self.versions
                assert list(verdict.members) == sorted(verdict.members)
                assert verdict.members
                self.unclosed -= set(verdict.members)
                self.versions += 1
            elif isinstance(verdict, Start):
                self.waiting.remove(verdict.worker)
                self.working[verdict.worker] = verdict.version
                assert verdict.version == self.versions or verdict.version == self.policy.floor
        assert self.policy.version == self.versions
        assert self.policy.clocks.minimum == min(
            (self.policy.clocks[worker] for worker in self.live), default=self.policy.clocks.minimum
        )


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("seed", range(10))
def test_somebody_can_always_go_on_and_everything_counts_once(name: str, seed: int) -> None:
    run = Run(POLICIES[name](), seed)
    for worker in range(4):
        run.join(worker)
    newcomers = 4
    for _ in range(300):
        assert run.idle or run.working, "everybody waits"
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
    for worker in sorted(run.waiting):
        run.waiting.remove(worker)
        run.idle.add(worker)
    again = POLICIES[name]()
    again.restore(json.loads(json.dumps(run.policy.state())))
    assert again.state() == run.policy.state()
    run.policy = again
    for _ in range(40):
        run.step()
    assert run.versions > 10


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


def test_bounds_that_make_no_sense_are_refused() -> None:
    for lead in (-1, math.nan):
        with pytest.raises(ValueError, match="must be >= 0"):
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
