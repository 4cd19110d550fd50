"""Every order in which messages can arrive, for a few workers and two shards.

A service's state follows from the order of its arrivals alone, so two schedules in which every service saw the
same order are the same state: each such state is visited once, by playing its schedule from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from support.nodes import Channel, World
from support.purposes import soaked

from dure.core.node import Address, Ghost
from dure.errors import Superseded
from dure.job.optimizer import OptimizerSpec
from dure.topology.parameter_server.admission import Decision, Policy, Start
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.policies import AnyOf, Barrier, Bounded, FirstOf
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout, split

UPDATE = cast(torch.Tensor, Ghost(2))
KILL: Channel = ("kill", Address("", ""))
Histories = dict[object, tuple[str, ...]]


class WatchedBounded(Bounded):
    """Checks at every start, and at every update, what SSP promises."""

    def __init__(self, lead: float) -> None:
        super().__init__(lead)
        self.stamps: list[int] = []

    def _start(self, worker: int) -> Decision:
        clock = self.clocks[worker]
        assert clock - self.clocks.minimum <= self.lead
        start = super()._start(worker)
        assert isinstance(start, Start)
        assert all(stamp >= clock - self.lead for stamp in self.stamps[start.version :]), "a read misses an update"
        if self.lead == 0:
            assert all(stamp < clock for stamp in self.stamps[: start.version]), "a snapshot holds a later update"
        return start

    def staged(self, worker: int, group: int | None, seq: int) -> list[Decision]:
        self.stamps.append(self.clocks[worker])
        decisions = super().staged(worker, group, seq)
        assert self.clocks[worker] - self.clocks.minimum <= self.lead + 1
        return decisions


@dataclass
class Play:
    """Shards, a clock, and workers that each make `steps` updates; worker 0 may be killed at any moment."""

    policy: Callable[[], Policy]
    workers: int = 2
    steps: int = 1
    mortal: bool = False
    num_shards: int = 2
    leaves: bool = False
    ordered: bool = True
    exchanges: bool = False
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    killed: bool = False
    refused: int = 0

    def __post_init__(self) -> None:
        self.world = World()
        nodes = [self.world.node(f"server {shard}") for shard in range(self.num_shards)]
        part = cast(torch.Tensor, Ghost(1))
        self.shards = [Shard(node, part, OptimizerSpec(), log=True) for node in nodes]
        addresses = [node.serve("shard", shard) for node, shard in zip(nodes, self.shards, strict=True)]
        self.clock = ClockService(nodes[0], self.policy(), addresses, workers=range(self.workers))
        clock = nodes[0].serve("clock", self.clock)
        ranges = split([], self.num_shards, self.num_shards)
        may_refuse = self.policy().may_refuse
        self.servers = ServerLayout(
            addresses, ranges, clock, ordered=self.ordered, may_refuse=may_refuse, timing_only=True
        )
        self.tasks = [self.world.spawn(self.work(w), f"worker {w}") for w in range(self.workers)]
        self.world.run_ready()

    async def work(self, worker: int) -> None:
        client = ServerClient(self.world.node(f"worker {worker}"), worker, self.servers)
        if self.exchanges:
            await self.push_pull(client)
        for step in range(0 if self.exchanges else self.steps):
            version = await client.ask() if step or self.servers.may_refuse else 0
            try:
                await client.push(UPDATE, base=[version] * self.num_shards)
            except Superseded:
                self.refused += 1
            else:
                self.acknowledged.append((worker, client.sender.seq))
        if self.leaves:
            await client.leave()

    async def push_pull(self, client: ServerClient) -> None:
        """As `work`, with its question in the same call as the word of an update."""
        versions = [0] * self.num_shards
        for _ in range(self.steps - 1):
            pulled = await client.push_pull(UPDATE, UPDATE, base=versions)
            self.acknowledged.append((client.sender.worker, client.sender.seq))
            versions = pulled.versions
            assert len(set(versions)) == 1, "shards gave different versions"
        await client.push(UPDATE, base=versions)
        self.acknowledged.append((client.sender.worker, client.sender.seq))

    def choices(self) -> list[Channel]:
        mortal = self.mortal and not self.killed and not self.tasks[0].done
        return self.world.choices() + ([KILL] if mortal else [])

    def take(self, channel: Channel) -> None:
        if channel != KILL:
            self.world.deliver(channel)
            return
        self.killed = True
        self.world.kill("worker 0")
        assert self.servers.clock is not None
        told = self.world.channels.setdefault(("runtime", self.servers.clock), deque())
        told.append(lambda: self.clock.lost("worker 0"))

    def check_end(self) -> None:
        for worker, task in enumerate(self.tasks):
            assert task.done, f"worker {worker} hangs"
            if not (self.killed and worker == 0):
                task.result()
        first = self.shards[0]
        log = first.updater.log or []
        waiting = [(worker, seq) for worker, seqs in self.clock.state()["open"] for seq in seqs]  # for more of a group
        for shard in self.shards:
            assert shard.updater.log == log, "shards disagree"
            assert len(shard.staging) == len(waiting), "an update that no group will have is still staged"
        assert len(log) == len(set(log)), "an update was applied twice"
        known = {*waiting, *((worker, seq) for worker, _, seq in log)}
        assert set(self.acknowledged) <= known, "an acknowledged update was lost"
        assert not self.ordered or first.version == self.clock.state()["version"]


def explore(make: Callable[[], Play]) -> int:
    """Check the end of every schedule; how many states were visited."""
    seen: set[frozenset[tuple[object, tuple[str, ...]]]] = set()
    schedules: list[list[Channel]] = [[]]
    while schedules:
        schedule = schedules.pop()
        play, histories = make(), Histories()
        for channel in schedule:
            histories = arrived(histories, play, channel)
            play.take(channel)
        while choices := play.choices():
            fresh = []
            for channel in choices:
                state = frozenset(arrived(histories, play, channel).items())
                if state not in seen:
                    seen.add(state)
                    fresh.append(channel)
            if not fresh:
                break
            schedules.extend([*schedule, channel] for channel in fresh[1:])
            schedule = [*schedule, fresh[0]]
            histories = arrived(histories, play, fresh[0])
            play.take(fresh[0])
        else:
            play.check_end()
    return len(seen)


def arrived(histories: Histories, play: Play, channel: Channel) -> Histories:
    """What every service has heard, once `channel` has delivered; of a death, what the dead has said."""
    source, service = channel
    if channel != KILL:
        return {**histories, service: (*histories.get(service, ()), source)}
    on_the_way = sum(len(messages) for (name, _), messages in play.world.channels.items() if name == "worker 0")
    heard = sum(arrivals.count("worker 0") for arrivals in histories.values())
    known = sum(worker == 0 for worker, _ in play.acknowledged)
    return {**histories, KILL: (f"said {on_the_way + heard}, acknowledged {known}",)}


def first(k: int, *, distinct: bool = True) -> Policy:
    return FirstOf(lambda workers: k, distinct=distinct)


def any_of(k: int, *, distinct: bool = True) -> Policy:
    return AnyOf(lambda workers: k, distinct=distinct)


CASES = {
    "barrier, a death": (1000, lambda: Play(Barrier, mortal=True)),
    "barrier, a death and a second step": (5000, lambda: Play(Barrier, steps=2, mortal=True, num_shards=1)),
    "barrier, two steps": (20000, lambda: Play(Barrier, steps=2)),
    "barrier, exchanges and a death": (7000, lambda: Play(Barrier, steps=2, mortal=True, num_shards=1, exchanges=True)),
    "lead of one, exchanges": (5000, lambda: Play(lambda: WatchedBounded(1), steps=2, num_shards=1, exchanges=True)),
    "barrier, three workers": (1500, lambda: Play(Barrier, workers=3)),
    "barrier, workers leave": (900, lambda: Play(Barrier, leaves=True)),
    "snapshots, a death": (2000, lambda: Play(lambda: WatchedBounded(0), mortal=True)),
    "snapshots, two steps": (4000, lambda: Play(lambda: WatchedBounded(0), steps=2, num_shards=1)),
    "lead of one, a death": (2000, lambda: Play(lambda: WatchedBounded(1), mortal=True)),
    "lead of one, two steps": (5000, lambda: Play(lambda: WatchedBounded(1), steps=2, num_shards=1)),
    "lead of one, three workers": (600, lambda: Play(lambda: WatchedBounded(1), workers=3, num_shards=1)),
    "lead of one, three workers, two shards": (20000, lambda: Play(lambda: WatchedBounded(1), workers=3)),
    "first of two, a death": (9000, lambda: Play(lambda: first(1), mortal=True)),
    "first two of three": (9000, lambda: Play(lambda: first(2), workers=3, num_shards=1)),
    "any two, a death": (1500, lambda: Play(lambda: any_of(2), mortal=True)),
    "any two mini-batches, two steps": (1000, lambda: Play(lambda: any_of(2, distinct=False), steps=2, num_shards=1)),
}


SECONDS = "lead of one, three workers, two shards"
"""A case that `make soak` tries: three workers and one shard, and two of both, are tried without it."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [*(name for name in CASES if name != SECONDS), *soaked(SECONDS)])
def test_shards_agree_whatever_the_order(name: str) -> None:
    at_least, make = CASES[name]
    assert explore(make) >= at_least


def test_the_explorer_sees_that_updates_without_order_disagree() -> None:
    with pytest.raises(AssertionError, match="disagree"):
        explore(lambda: Play(lambda: Bounded(0), ordered=False))
