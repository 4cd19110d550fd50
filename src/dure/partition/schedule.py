"""The schedule of a pipeline as data: the ticks of all workers' actions, and the weights that each reads.

The tick scheduler plays the orders of all workers, and refuses a wrong one.

    F of a stage          after F of the stage before, for the same micro-batch
    B, I of a stage       after its F, and after B or I of the next stage
    W of a stage          after its I
    U of a worker         after all B and W of its mini-batch; takes no time

Each worker takes its actions one after another. A message travels in no time. The messages of one border and one
direction arrive in the order in which they were sent. Weights are read when an action starts, and an update ends with
the action before it, so the result does not depend on the order in which the scheduler visits the workers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from dure.errors import DeadlockError, StrategyError
from dure.partition.orders import Action, Kind

if TYPE_CHECKING:
    from torch import Tensor

    from dure.job.gradient import Requester
    from dure.partition.pipeline import Pipeline


TICK: Mapping[Kind, float] = {"F": 1, "B": 1, "I": 1, "W": 1}
"""One tick for each action but an update."""

KINDS: tuple[Kind, ...] = ("F", "B", "I", "W", "U")
"""The kinds of the actions of an order."""

Place = tuple[str, int, int, int]
"""The pass ("F", "B" or "W"), mini-batch, micro-batch and stage of an action. I is the pass "B"."""


@dataclass(frozen=True)
class Orders:
    """The orders of all workers of a pipeline, by rank, for `batches` of `micro` micro-batches each.

    Each worker has `chunks` chunks of the model; `stage_of` gives the stage of a rank's chunk.
    """

    workers: Sequence[Sequence[Action]]
    batches: range
    stage_of: Callable[[int, int], int] = lambda rank, chunk: rank
    micro: int = 1
    chunks: int = 1

    @classmethod
    def of(cls, pipeline: Pipeline, batches: range) -> Orders:
        """The orders of a pipeline method."""
        workers = [_actions(pipeline, rank, batches) for rank in range(pipeline.stages)]
        return cls(workers, batches, pipeline.stage_of, pipeline.micro_batches, pipeline.chunks)

    @cached_property
    def ranks(self) -> Mapping[int, int]:
        """The rank of the worker that holds each stage."""
        return {self.stage_of(rank, chunk): rank for rank in range(len(self.workers)) for chunk in range(self.chunks)}

    @property
    def depth(self) -> int:
        """The stages of the model."""
        return len(self.workers) * self.chunks

    def place(self, rank: int, action: Action) -> Place:
        """The pass and the stage of an action of worker `rank`."""
        passed = "B" if action.kind == "I" else action.kind
        return passed, action.batch, action.micro, self.stage_of(rank, action.chunk)

    def needs(self, rank: int, action: Action) -> Iterator[Place]:
        """The actions that must end before an action of worker `rank` starts."""
        _, batch, micro, stage = self.place(rank, action)
        if action.kind == "F" and stage > 0:
            yield "F", batch, micro, stage - 1
        elif action.kind in ("B", "I"):
            yield "F", batch, micro, stage
            if stage < self.depth - 1:
                yield "B", batch, micro, stage + 1
        elif action.kind == "W":
            yield "B", batch, micro, stage


def _actions(pipeline: Pipeline, rank: int, batches: range) -> list[Action]:
    """The actions of one worker. Raises `StrategyError` if the order of a user's pipeline has anything else."""
    found: object = pipeline.order(rank, batches)
    actions: list[Action] = list(found) if isinstance(found, Iterable) else [found]  # type: ignore[list-item]
    for each in actions:
        if not isinstance(each, Action):
            raise StrategyError(f"{type(pipeline).__name__}.order must yield dure.Action, got {each!r}.")
    return actions


class Timed(NamedTuple):
    """An action from `start` to `end`. `version` counts the updates of its worker before it."""

    action: Action
    start: float
    end: float
    version: int


@dataclass(frozen=True)
class Timetable:
    """The actions of each worker of a pipeline over time, by rank."""

    workers: Sequence[Sequence[Timed]]

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last."""
        return max((each.end for row in self.workers for each in row), default=0)

    def idle(self, rank: int) -> float:
        """The time in which a worker has no action, until the last worker has ended."""
        return self.makespan - sum(each.end - each.start for each in self.workers[rank])

    @property
    def bubble(self) -> float:
        """The share of idle time in the time of all workers."""
        total = self.makespan * len(self.workers)
        return sum(map(self.idle, range(len(self.workers)))) / total if total else 0.0

    @property
    def steady_bubble(self) -> float:
        """The idle share of all workers between the first backward and the last forward of the first worker."""
        first = self.workers[0]
        begin = min(timed.start for timed in first if timed.action.kind != "F")
        end = max(timed.end for timed in first if timed.action.kind == "F")
        if end <= begin:
            return self.bubble
        busy = sum(
            max(0.0, min(timed.end, end) - max(timed.start, begin)) for worker in self.workers for timed in worker
        )
        return 1 - busy / (end - begin) / len(self.workers)

    def most_sets(self, rank: int) -> int:
        """The largest number of micro-batches, of all chunks of a worker, between F and the end of B or W."""
        held = most = 0
        for each in self.workers[rank]:
            held += (each.action.kind == "F") - (each.action.kind in ("B", "W"))
            most = max(most, held)
        return most

    def staleness(self, rank: int) -> Mapping[int, int]:
        """For each mini-batch, the updates of a worker between its first F and the update by its gradient."""
        read: dict[int, int] = {}
        found = {}
        for each in self.workers[rank]:
            if each.action.kind == "F":
                read.setdefault(each.action.batch, each.version)
            elif each.action.kind == "U":
                found[each.action.batch] = each.version - read[each.action.batch]
        return found


def check(orders: Orders) -> None:
    """Raise for orders that cannot run: `StrategyError`, or `DeadlockError` where workers wait for each other.

    A `StrategyError` names a missing, doubled or foreign action, an update before its backwards, or a border whose two
    sides have their messages in different orders.
    """
    schedule(orders)


def schedule(orders: Orders, durations: Mapping[Kind, float] = TICK) -> Timetable:
    """Play `orders`, with the duration of each kind of action. Raises as `check` does."""
    for rank, order in enumerate(orders.workers):
        _check_kinds(rank, order)
        _check_complete(orders, rank, order)
        _check_updates(rank, order)
    _check_borders(orders)
    return _Play(orders, durations).run()


# ---- what an order must have


def _check_kinds(rank: int, order: Sequence[Action]) -> None:
    """Raise `StrategyError` for what is no action of an order; S belongs to programs (`Programmed`)."""
    for action in order:
        if not isinstance(action, Action) or action.kind not in KINDS:
            raise StrategyError(
                f"worker {rank} has {action!r} in its order: write actions such as Action('F', 0), with a kind of "
                f"{', '.join(KINDS[:-1])} or {KINDS[-1]}."
            )


def _check_complete(orders: Orders, rank: int, order: Sequence[Action]) -> None:
    """Raise `StrategyError` unless an order has each F, each B (or I and W) and each U exactly once."""
    counts = Counter(order)
    for action, count in counts.items():
        if count > 1:
            raise StrategyError(f"worker {rank} has {action} {count} times in its order, and each action comes once.")
    split = {(each.batch, each.micro, each.chunk) for each in order if each.kind in ("I", "W")}
    needed = {Action("U", batch) for batch in orders.batches}
    for batch in orders.batches:
        for micro in range(orders.micro):
            for chunk in range(orders.chunks):
                kinds: tuple[Kind, ...] = ("F", "I", "W") if (batch, micro, chunk) in split else ("F", "B")
                needed |= {Action(kind, batch, micro, chunk) for kind in kinds}
    missing, foreign = sorted(needed - counts.keys(), key=_place), sorted(counts.keys() - needed, key=_place)
    if missing:
        raise StrategyError(
            f"worker {rank} has no {missing[0]} in its order. Each micro-batch needs F and B, or F, I and W, at each "
            "chunk, and each mini-batch needs U."
        )
    if foreign:
        raise StrategyError(
            f"worker {rank} has {foreign[0]} in its order, which belongs to no micro-batch there: mini-batches "
            f"{orders.batches.start} to {orders.batches.stop - 1} have {orders.micro} micro-batches each, and the "
            f"worker has {orders.chunks} chunks. A backward is one B, or one I and one W."
        )


def _place(action: Action) -> tuple[int, int, int, int]:
    return action.batch, KINDS.index(action.kind), action.micro, action.chunk


def _check_updates(rank: int, order: Sequence[Action]) -> None:
    """Raise `StrategyError` if an update comes before one of its backwards."""
    updated: set[int] = set()
    for action in order:
        if action.kind == "U":
            updated.add(action.batch)
        elif action.batch in updated:
            raise StrategyError(
                f"worker {rank} has U{action.batch} before {action} in its order: an update comes after all forwards "
                "and backwards of its mini-batch."
            )


def _check_borders(orders: Orders) -> None:
    """Raise `StrategyError` if the two sides of a border have their messages in different orders."""
    passed: dict[tuple[str, int], list[Action]] = {}
    for rank, order in enumerate(orders.workers):
        for action in order:
            kind, _, _, stage = orders.place(rank, action)
            passed.setdefault((kind, stage), []).append(action)
    for border in range(orders.depth - 1):
        for kind, source, target in (("F", border, border + 1), ("B", border + 1, border)):
            ranks = orders.ranks[source], orders.ranks[target]
            for sent, taken in zip(passed[kind, source], passed[kind, target], strict=True):
                if ranks[0] != ranks[1] and sent[1:3] != taken[1:3]:
                    raise StrategyError(
                        f"worker {ranks[1]} takes {taken} from worker {ranks[0]} where worker {ranks[0]} sends {sent}: "
                        f"messages between stages {source} and {target} arrive in the order in which they were sent. "
                        "Give both workers one order."
                    )


# ---- playing


class _Play:
    """One pass over `orders`. `ends` has the end of each action so far, `rows` the actions so far of each worker."""

    def __init__(self, orders: Orders, durations: Mapping[Kind, float]) -> None:
        self.orders = orders
        self.durations = durations
        self.ends: dict[Place, float] = {}
        self.rows: list[list[Timed]] = [[] for _ in orders.workers]
        self.versions = [0] * len(orders.workers)
        self.waiting: dict[Place, list[int]] = {}

    def run(self) -> Timetable:
        able = deque(range(len(self.rows)))
        while able:
            rank = able.popleft()
            for action in self.orders.workers[rank][len(self.rows[rank]) :]:
                missing = self._missing(rank, action)
                if missing is not None:
                    self.waiting.setdefault(missing, []).append(rank)
                    break
                able += self.waiting.pop(self._play(rank, action), ())
        if self.waiting:
            raise DeadlockError(self._cycle())
        return Timetable(self.rows)

    def _missing(self, rank: int, action: Action) -> Place | None:
        return next((need for need in self.orders.needs(rank, action) if need not in self.ends), None)

    def _play(self, rank: int, action: Action) -> Place:
        row, place = self.rows[rank], self.orders.place(rank, action)
        start = max([row[-1].end if row else 0, *(self.ends[need] for need in self.orders.needs(rank, action))])
        end = start + (0 if action.kind == "U" else self.durations[action.kind])
        row.append(Timed(action, start, end, self.versions[rank]))
        self.versions[rank] += action.kind == "U"
        self.ends[place] = end
        return place

    def _cycle(self) -> str:
        """The sentence that names the workers which wait for each other."""
        chain: list[int] = []
        needs = {rank: need for need, ranks in self.waiting.items() for rank in ranks}
        rank = min(needs)
        while rank not in chain:
            chain.append(rank)
            rank = self.orders.ranks[needs[rank][3]]
        links = [self._link(each, needs[each]) for each in chain[chain.index(rank) :]]
        return f"the order of actions is a deadlock: {'; '.join(links)}. Each action waits for one that comes later."

    def _link(self, rank: int, need: Place) -> str:
        holder = self.orders.ranks[need[3]]
        action = self.orders.workers[rank][len(self.rows[rank])]
        awaited = next(each for each in self.orders.workers[holder] if self.orders.place(holder, each) == need)
        owner = "its own" if holder == rank else f"worker {holder}'s"
        return f"worker {rank} waits at {action} for {owner} {awaited}"


class Read(NamedTuple):
    """The weights after `version` updates of a worker, or a prediction of those after `ahead` more.

    `own` counts, from 1, the versions of a model with several, which are updated apart; 0 where there is a single one.

    >>> str(Read(3)), str(Read(3, 2)), str(Read(1, own=7))
    ('w3', 'w3+2', 'v7 w1')
    """

    version: int
    ahead: int = 0
    own: int = 0

    def __str__(self) -> str:
        weights = f"w{self.version}+{self.ahead}" if self.ahead else f"w{self.version}"
        return f"v{self.own} {weights}" if self.own else weights


@dataclass(frozen=True)
class WeightsRead:
    """The weights that the actions of one worker read.

    `reads` has those of each action, None for an update. `staleness` has, for each mini-batch, the updates between the
    weights of its first forward and its update. `most_versions` is the largest number of weights that the worker keeps
    at once, the newest included.
    """

    reads: Sequence[Read | None]
    staleness: Mapping[int, int]
    most_versions: int


def weights_read(pipeline: Pipeline, rank: int, row: Sequence[Timed]) -> WeightsRead:
    """The weights that the actions of worker `rank` read, in the order of its `row` of a timetable."""
    versions = VersionLog(pipeline, rank)
    versions.begin(min((each.action.batch for each in row), default=0))
    reads: list[Read | None] = []
    first: dict[int, int] = {}
    staleness: dict[int, int] = {}
    most = 1
    for each in row:
        batch = each.action.batch
        if each.action.kind == "U":
            reads.append(None)
            staleness[batch] = versions.updates(batch) - first.pop(batch)
            versions.updated(batch)
        else:
            read = versions.read(each.action)
            first.setdefault(batch, read.version)
            reads.append(read)
            most = max(most, versions.kept)
    return WeightsRead(reads, staleness, most)


class VersionLog:
    """The versions of the weights of worker `rank`, as the rules of its pipeline read them.

    To the rules it is a stage whose weights are a `Read` as a tensor: the updates before them, those predicted, and
    which version of the model it is.
    """

    requester: Requester

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self.pipeline = pipeline
        self.rank = rank
        self.version = 0
        self._first = 0
        self._stashed: dict[int, Tensor] = {}
        self._updated: Counter[int] = Counter()

    # ---- the actions of the worker

    def begin(self, first: int) -> None:
        """Begin with the mini-batch `first`, after an update by each one before it; nothing is in flight."""
        self._first = self.version = first
        self._updated = Counter(batch % self.pipeline.versions for batch in range(first))
        self._stashed.clear()

    def read(self, action: Action) -> Read:
        """The weights that a forward or a backward reads now."""
        rule = self.pipeline.forward_reads if action.kind == "F" else self.pipeline.backward_reads
        return Read(*map(int, rule(self, action.batch).tolist()))

    def updated(self, batch: int) -> None:
        """Count the update by a mini-batch, and drop its weights."""
        self._stashed.pop(batch, None)
        self._updated[batch % self.pipeline.versions] += 1
        self.version += 1

    def updates(self, batch: int) -> int:
        """The updates so far of the version that a mini-batch reads."""
        return self._updated[batch % self.pipeline.versions]

    @property
    def kept(self) -> int:
        """The number of weights kept now, the newest included. With a lag, so are those for mini-batches to come."""
        if self.pipeline.versions > 1:
            return self.pipeline.versions
        kept = {int(each[0]) for each in self._stashed.values()} | {self.version}
        return len(range(min(kept), self.version + 1)) if self.pipeline.lag else len(kept)

    # ---- the weights of a stage

    @property
    def newest(self) -> Tensor:
        return torch.tensor([self.version, 0])

    def fixed(self, batch: int) -> Tensor:
        return self.stash(batch)

    def stash(self, batch: int) -> Tensor:
        lag = self.pipeline.lag
        version = max(self._first, batch - lag) if lag else self.version
        return self._stashed.setdefault(batch, torch.tensor([version, 0]))

    def ahead(self, steps: Callable[[float], float]) -> Tensor:
        """The newest weights and the updates that `steps` predicts if each is as large as the last."""
        return torch.tensor([self.version, round(steps(1.0))])

    def version_for(self, batch: int) -> Tensor:
        return torch.tensor([self.updates(batch), 0, batch % self.pipeline.versions + 1])

    def average(self) -> None:
        """Do nothing: a mean leaves each version with the updates that it had."""
