"""Every order in which messages can arrive, for a few workers and two shards.

A service's state follows from the order of its arrivals alone, so two schedules in which every service saw the
same order are the same state: each such state is visited once, by playing its schedule from the start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from support.nodes import Channel, World

from dure.optim import OptimizerSpec
from dure.runtime.base import Address
from dure.sync.clock import Barrier, Bounded, Policy, Start, Verdict
from dure.topology.parameter_server import ClockService, ServerClient, Servers, Shard
from dure.topology.sharding import gather, split

RUNTIME = "runtime"
KILL: Channel = ("kill", Address("", ""))


class Watched(Bounded):
    """Checks at every start what SSP promises."""

    def _start(self, worker: int) -> Verdict:
        assert self.clocks[worker] - self.clocks.minimum <= self.lead
        start = super()._start(worker)
        assert isinstance(start, Start)
        stamped = [clock for clock in self.history[: start.version] if clock < self.clocks[worker] - self.lead]
        due = [clock for clock in self.history if clock < self.clocks[worker] - self.lead]
        assert stamped == due, "a read misses an update"
        if self.lead == 0:
            assert all(clock < self.clocks[worker] for clock in self.history[: start.version])
        return start

    def __init__(self, lead: float) -> None:
        super().__init__(lead)
        self.history: list[int] = []

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]:
        self.history.append(self.clocks[worker])
        spread = self.clocks[worker] + 1 - self.clocks.minimum
        assert spread <= self.lead + 1
        return super().staged(worker, group, seq)


@dataclass
class Play:
    """Two shards, a clock, and workers that each make `steps` updates; worker 0 may be killed."""

    policy: Callable[[], Policy]
    workers: int
    steps: int
    mortal: bool
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    killed: bool = False

    def __post_init__(self) -> None:
        self.world = World()
        home = self.world.node("server 0")
        ranges = split([], 2, 2)
        values = torch.zeros(2)
        self.shards = [
            Shard(self.world.node(f"server {s}"), gather(values, ranges[s]), OptimizerSpec(lr=1.0), log=True)
            for s in range(2)
        ]
        addresses = [self.world.node(f"server {s}").serve("shard", shard) for s, shard in enumerate(self.shards)]
        self.clock = ClockService(home, self.policy(), addresses, workers=range(self.workers), reduce="sum")
        self.clock_address = home.serve("clock", self.clock)
        self.servers = Servers(addresses, ranges, self.clock_address)
        self.strands = [self.world.spawn(self.work(w), f"worker {w}") for w in range(self.workers)]
        self.world.run_ready()

    async def work(self, worker: int) -> None:
        client = ServerClient(self.world.node(f"worker {worker}"), worker, self.servers)
        for step in range(self.steps):
            version = await client.ask()
            await client.push(torch.full((2,), 8.0 ** (worker + self.workers * step)), base=[version, version])
            self.acknowledged.append((worker, client.seq))
        await client.leave()

    def choices(self) -> list[Channel]:
        kill = [KILL] if self.mortal and not self.killed and not self.strands[0].done else []
        return self.world.choices() + kill

    def take(self, channel: Channel) -> None:
        if channel != KILL:
            self.world.deliver(channel)
            return
        self.killed = True
        self.world.kill("worker 0")
        told = self.world.channels.setdefault((RUNTIME, self.clock_address), deque())
        told.append(lambda: self.clock.lost("worker 0"))

    def check_end(self) -> None:
        dead = {0} if self.killed else set()
        for worker, strand in enumerate(self.strands):
            assert strand.done, f"worker {worker} hangs"
            if worker not in dead:
                strand.result()
        first, second = self.shards
        assert first.log == second.log, "shards disagree"
        assert torch.equal(first.values, second.values)
        counted = [(worker, seq) for worker, _, seq in first.log or []]
        assert len(counted) == len(set(counted)), "an update was applied twice"
        assert set(self.acknowledged) <= set(counted), "an acknowledged update was lost"
        assert first.num_staged == second.num_staged == 0
        assert first.version == second.version == self.clock.policy.version


Key = tuple[tuple[str, ...], ...]


def explore(make: Callable[[], Play]) -> tuple[int, int]:
    """Visit every state; how many there are, and how many of them are final."""
    seen: set[frozenset[tuple[object, tuple[str, ...]]]] = set()
    stack: list[list[Channel]] = [[]]
    final = 0
    while stack:
        path = stack.pop()
        play = make()
        histories: dict[object, tuple[str, ...]] = {}
        for channel in path:
            record(histories, play, channel)
        while True:
            fresh = []
            for channel in play.choices():
                key = frozenset(preview(histories, play, channel).items())
                if key not in seen:
                    seen.add(key)
                    fresh.append(channel)
            if not fresh:
                if not play.choices():
                    final += 1
                    play.check_end()
                break
            stack.extend([*path, channel] for channel in fresh[1:])
            path = [*path, fresh[0]]
            record(histories, play, fresh[0])
    return len(seen), final


def preview(histories: dict[object, tuple[str, ...]], play: Play, channel: Channel) -> dict[object, tuple[str, ...]]:
    source, service = channel
    if channel == KILL:
        told = sum(len(messages) for (name, _), messages in play.world.channels.items() if name == "worker 0")
        heard = sum(arrivals.count("worker 0") for arrivals in histories.values())
        return {**histories, KILL: (f"sent {told + heard}, acknowledged {play.acknowledged.count((0, 1))}",)}
    return {**histories, service: (*histories.get(service, ()), source)}


def record(histories: dict[object, tuple[str, ...]], play: Play, channel: Channel) -> None:
    histories.update(preview(histories, play, channel))
    play.take(channel)


@pytest.mark.parametrize(
    ("policy", "workers", "steps", "mortal"),
    [
        (Barrier, 2, 1, True),
        (Barrier, 2, 2, False),
        (lambda: Watched(0), 2, 2, False),
        (lambda: Watched(0), 2, 1, True),
        (lambda: Watched(1), 2, 1, True),
    ],
)
def test_shards_agree_whatever_the_order(policy: Callable[[], Policy], workers: int, steps: int, mortal: bool) -> None:
    import time; t=time.time()
    states, final = explore(lambda: Play(policy, workers, steps, mortal))
    print(states, final, time.time()-t)
    assert states > 100
