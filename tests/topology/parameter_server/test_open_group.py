"""`FirstOf` and `AnyOf` in every order of events: a few workers that ask, offer, stage, die and come back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from support.purposes import soaked

from dure.topology.parameter_server.admission import Abort, Accept, Close, Decision, End, Policy, Refuse, Start, most
from dure.topology.parameter_server.policies import AnyOf, FirstOf

Event = tuple[str, int]


@dataclass
class Story:
    """What has happened so far. A worker is idle, waiting, working, offering or accepted; or it is gone."""

    policy: FirstOf | AnyOf
    workers: int
    steps: int
    deaths: int = 0
    returns: int = 0
    doing: dict[int, str] = field(default_factory=dict)
    on: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    seqs: dict[int, int] = field(default_factory=dict)
    open: list[tuple[int, int, int]] = field(default_factory=list)
    groups: int = 0
    finished: int = 0
    peak: int = 0
    told: set[int] = field(default_factory=set)
    reborn: set[int] = field(default_factory=set)

    def begin(self) -> None:
        for worker in range(self.workers):
            self.join(worker)

    def join(self, worker: int) -> None:
        self.doing[worker] = "idle"
        self.left[worker] = self.steps
        self.peak = max(self.peak, len(self.doing))
        if worker in [member for member, _, _ in self.open]:
            self.reborn.add(worker)
        self.heed(self.policy.join(worker))

    def choices(self) -> list[Event]:
        moves = {"idle": "ask", "working": "finish", "accepted": "stage"}
        found = [(moves[what], worker) for worker, what in sorted(self.doing.items()) if what in moves]
        found = [("leave" if move == "ask" and not self.left[worker] else move, worker) for move, worker in found]
        found += [("stop", worker) for worker in sorted(self.told) if self.doing[worker] == "working"]
        if self.deaths:
            found += [("die", worker) for worker in sorted(self.doing)]
        if self.returns:
            found += [("return", worker) for worker in range(self.workers) if worker not in self.doing]
        return found

    def take(self, event: Event) -> None:
        move, worker = event
        if move == "ask":
            self.doing[worker] = "waiting"
            self.told.discard(worker)
            self.heed(self.policy.ask(worker))
        elif move == "finish" and self.policy.may_refuse:
            self.doing[worker] = "offering"
            self.heed(self.policy.offer(worker, self.on[worker]))
        elif move in ("finish", "stage"):
            self.seqs[worker] = self.seqs.get(worker, 0) + 1
            self.spend(worker)
            self.open.append((worker, self.seqs[worker], self.on[worker]))
            self.heed(self.policy.staged(worker, None, self.seqs[worker]))
        elif move == "stop":
            self.spend(worker)
        elif move in ("leave", "die"):
            self.deaths -= move == "die"
            self.finished += move == "leave"
            del self.doing[worker]
            self.told.discard(worker)
            self.heed(self.policy.finish(worker) if move == "leave" else self.policy.leave(worker))
        else:
            self.returns -= 1
            self.join(worker)

    def spend(self, worker: int) -> None:
        self.doing[worker] = "idle"
        self.left[worker] -= 1

    def heed(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Close):
                self.close(decision)
            elif isinstance(decision, Start):
                assert self.doing[decision.worker] == "waiting"
                assert decision.version == self.groups
                self.doing[decision.worker], self.on[decision.worker] = "working", decision.version
            elif isinstance(decision, Accept):
                assert self.doing[decision.worker] == "offering"
                assert decision.group == self.on[decision.worker] == self.groups, "it is of another version"
                self.doing[decision.worker] = "accepted"
            elif isinstance(decision, Refuse):
                assert self.doing[decision.worker] == "offering"
                assert self.on[decision.worker] < self.groups or self.over, "its version is not over"
                self.spend(decision.worker)
            elif isinstance(decision, End):
                assert self.doing[decision.worker] == "waiting"
                assert self.over, "it could go on"
                self.doing[decision.worker], self.left[decision.worker] = "idle", 0
            else:
                assert isinstance(decision, Abort)
                assert self.doing[decision.worker] == "working"
                assert self.on[decision.worker] == decision.version == self.groups - 1
                self.told.add(decision.worker)
        assert self.policy.version == self.groups

    @property
    def over(self) -> bool:
        """Whether too few are left because others have finished."""
        needed = self.needed if self.policy.group.distinct else 1
        return self.finished > 0 and len(self.doing) < needed

    @property
    def needed(self) -> int:
        workers = len(self.doing) + self.finished if self.policy.group.distinct else self.peak
        return self.policy.group.quorum(workers)

    def close(self, decision: Close) -> None:
        assert decision.group == self.groups
        assert sorted(decision.members) == sorted((worker, seq) for worker, seq, _ in self.open), "some are left behind"
        assert "accepted" not in self.doing.values(), "what was accepted counts"
        members = [worker for worker, _ in decision.members]
        if self.policy.group.distinct:
            assert len(members) == len(set(members)), "a worker is in one group twice"
        if self.policy.may_refuse:
            assert {base for _, _, base in self.open} == {decision.group}, "a stale gradient counts"
        free = [worker for worker in self.doing if not (self.policy.group.distinct and worker in members)]
        free = [worker for worker in free if worker not in self.reborn]
        assert len(members) >= self.needed or not free, "it closed before it was complete"
        assert not self.over, "it closed for too few"
        self.groups += 1
        self.open, self.reborn = [], set()

    def check_end(self) -> None:
        assert not self.doing, f"these wait for ever: {self.doing}"
        assert not self.open or self.over, "an update is in no group"

    def state(self) -> str:
        inner = {name: value for name, value in vars(self.policy).items() if isinstance(value, (int, list, set))}
        inner |= {"group": self.policy.group.state(), "spent": self.policy.group.spent}
        inner |= {"waiting": self.policy._roster.waiting}
        mine = [sorted(each.items()) for each in (self.doing, self.on, self.left, self.seqs)]
        rest = (self.open, self.told, self.reborn, self.deaths, self.returns, self.finished, self.peak)
        return repr((sorted(inner.items(), key=str), mine, rest))


def explore(make: Callable[[], Story]) -> int:
    """Every story to its end; how many states were visited."""
    first = make()
    first.begin()
    seen: set[str] = set()
    stack = [first]
    while stack:
        story = stack.pop()
        choices, saved = story.choices(), pickle.dumps(story)
        if not [move for move, _ in choices if move not in ("die", "return")]:
            story.check_end()
        for event in choices:
            after = pickle.loads(saved)
            after.take(event)
            if after.state() not in seen:
                seen.add(after.state())
                stack.append(after)
    return len(seen)


@dataclass(frozen=True)
class At:
    """A fixed K."""

    k: int

    def __call__(self, workers: int) -> int:
        return self.k


POLICIES: dict[str, Callable[[], FirstOf | AnyOf]] = {
    "1-sync": lambda: FirstOf(At(1), distinct=True),
    "2-sync": lambda: FirstOf(At(2), distinct=True),
    "backup": lambda: FirstOf(most, distinct=True),
    "2-batch-sync": lambda: FirstOf(At(2), distinct=False),
    "3-batch-sync": lambda: FirstOf(At(3), distinct=False),
    "2-async": lambda: AnyOf(At(2), distinct=True),
    "most-async": lambda: AnyOf(most, distinct=True),
    "2-batch-async": lambda: AnyOf(At(2), distinct=False),
    "3-batch-async": lambda: AnyOf(At(3), distinct=False),
}


TWO_STEPS, A_DEATH = (3, 2, 0, 0), (3, 1, 1, 1)
SECONDS = [("1-sync", *TWO_STEPS), ("1-sync", *A_DEATH)]
"""Stories with so many orders that `make soak` tells them; `make test` has shorter ones of that policy."""

STORIES = [(name, *story) for name in POLICIES for story in (TWO_STEPS, A_DEATH) if (name, *story) not in SECONDS]
STORIES += [("1-sync", 2, 2, 0, 0), ("1-sync", 2, 1, 1, 1)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "workers", "steps", "deaths", "returns"), [*STORIES, *soaked(*SECONDS)])
def test_every_order_of_events_ends_with_all_that_was_staged_in_one_group(name, workers, steps, deaths, returns):
    assert explore(lambda: Story(POLICIES[name](), workers, steps, deaths, returns)) > 100


class Forgetful(FirstOf):
    """Takes late gradients for the version that comes after theirs."""

    def offer(self, worker: int, base: int) -> list[Decision]:
        return super().offer(worker, self.version)


class Hasty(FirstOf):
    """Does not wait for what it has accepted."""

    def _has_room(self) -> bool:
        self._accepted.clear()
        return super()._has_room()


class Endless(AnyOf):
    """Waits for a K that cannot be had any more."""

    def leave(self, worker: int) -> list[Decision]:
        self.group.leave(worker)
        return []


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (Forgetful, "of another version"),
        (Hasty, "what was accepted counts|left behind"),
        (Endless, "for ever|no group"),
    ],
)
def test_the_explorer_sees_faults(policy, complaint):
    with pytest.raises(AssertionError, match=complaint):
        explore(lambda: Story(policy(At(2), distinct=True), 3, 2, 1, 0))


# ---- single stories


def start(policy: Policy, workers: int) -> None:
    for worker in range(workers):
        policy.join(worker)
    for worker in range(workers):
        assert policy.ask(worker) == [Start(worker, 0)]


def test_the_slowest_is_told_to_stop():
    policy = FirstOf(At(2), distinct=True)
    start(policy, 3)
    assert policy.offer(2, 0) == [Accept(2, 0)]
    assert policy.offer(0, 0) == [Accept(0, 0)]
    assert policy.staged(2, 0, 1) == []
    assert policy.ask(2) == []
    assert policy.staged(0, 0, 1) == [Close(0, ((0, 1), (2, 1))), Abort(1, 0), Start(2, 1)]
    assert policy.offer(1, 0) == [Refuse(1, "version 0 was complete without it.")]
    assert policy.ask(1) == [Start(1, 1)]


def test_an_offer_beyond_the_places_waits_for_a_death_or_the_end():
    policy = FirstOf(At(1), distinct=True)
    start(policy, 3)
    assert policy.offer(0, 0) == [Accept(0, 0)]
    assert policy.offer(1, 0) == []
    assert policy.offer(2, 0) == []
    assert policy.leave(0) == [Accept(1, 0)]
    assert policy.staged(1, 0, 1) == [Close(0, ((1, 1),)), Refuse(2, "version 0 is complete without it.")]


def test_a_fast_worker_gives_several_mini_batches_to_one_version():
    policy = FirstOf(At(3), distinct=False)
    start(policy, 2)
    for seq in (1, 2):
        assert policy.offer(0, 0) == [Accept(0, 0)]
        assert policy.staged(0, 0, seq) == []
        assert policy.ask(0) == [Start(0, 0)]
    assert policy.offer(0, 0) == [Accept(0, 0)]
    assert policy.staged(0, 0, 3) == [Close(0, ((0, 1), (0, 2), (0, 3))), Abort(1, 0)]
    assert [policy.clocks[worker] for worker in range(2)] == [3, 1]


def test_contributors_wait_for_the_update_and_the_others_go_on():
    policy = AnyOf(At(2), distinct=True)
    start(policy, 3)
    assert policy.staged(1, None, 1) == []
    assert policy.ask(1) == []
    assert policy.staged(2, None, 1) == [Close(0, ((1, 1), (2, 1))), Start(1, 1)]
    assert policy.staged(0, None, 1) == [], "of version 0, in the group that makes version 2"
    assert policy.staged(1, None, 2) == [Close(1, ((0, 1), (1, 2)))]


def test_nobody_waits_where_any_mini_batch_counts():
    policy = AnyOf(At(3), distinct=False)
    start(policy, 2)
    assert policy.staged(0, None, 1) == []
    assert policy.ask(0) == [Start(0, 0)]
    assert policy.staged(0, None, 2) == []
    assert policy.staged(1, None, 1) == [Close(0, ((0, 1), (0, 2), (1, 1)))]
    assert [policy.clocks[worker] for worker in range(2)] == [2, 1]


@pytest.mark.parametrize("policy", [FirstOf, AnyOf])
def test_who_has_given_to_the_open_group_gives_no_more_after_a_restart(policy):
    saved, again = (policy(At(2), distinct=True) for _ in range(2))
    start(saved, 3)
    saved.offer(1, 0)
    assert saved.staged(1, 0, 1) == []
    again.restore(pickle.loads(pickle.dumps(saved.state())))
    assert again.ask(1) == []
    assert again.ask(0) == [Start(0, 0)]
    again.offer(0, 0)
    assert again.staged(0, 0, 1) == [Close(0, ((0, 1), (1, 1))), Start(1, 1)]


def test_when_fewer_than_k_are_left_they_are_enough():
    policy = FirstOf(At(3), distinct=True)
    start(policy, 3)
    for worker in (0, 1):
        policy.offer(worker, 0)
        assert policy.staged(worker, 0, 1) == []
    assert policy.leave(2) == [Close(0, ((0, 1), (1, 1)))]
    assert policy.ask(0) == [Start(0, 1)]


def test_the_work_is_over_when_k_have_not_more_to_do():
    policy = AnyOf(At(2), distinct=True)
    start(policy, 3)
    assert policy.staged(0, None, 1) == []
    assert policy.ask(0) == []
    assert policy.finish(1) == []
    assert policy.finish(2) == [End(0)], "its update alone would be a noisy last one"
    assert policy.leave(0) == []
    assert policy.version == 0


def test_who_is_left_makes_up_for_the_others_where_one_may_give_several():
    policy = AnyOf(most, distinct=False)
    start(policy, 3)
    assert policy.finish(0) == policy.finish(1) == []
    assert policy.staged(2, None, 1) == []
    assert policy.ask(2) == [Start(2, 0)]
    assert policy.staged(2, None, 2) == [Close(0, ((2, 1), (2, 2)))]


def test_all_but_a_few_follows_the_living():
    policy = FirstOf(most, distinct=True)
    start(policy, 4)
    for worker in (0, 1):
        policy.offer(worker, 0)
        policy.staged(worker, 0, 1)
    assert policy.leave(3) == [Close(0, ((0, 1), (1, 1))), Abort(2, 0)]
