"""One server that has model and clock: what a step asks of both in one call is what it asks of them one by one."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes import World
from support.raw_caller import CREDENTIALS
from support.runs import bowls, local, virtual
from support.wording import raising

from dure.core.node import Address, EndOfWork, Operation, Suspend
from dure.errors import Evicted, Refused
from dure.job.optimizer import OptimizerSpec
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.process.node import ProcessNode
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant, LogNormal
from dure.runtime.wire import Identity, WireLimits
from dure.topology.parameter_server.admission import Policy
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.policies import Barrier, Bounded, FirstOf
from dure.topology.parameter_server.shard import NAME, Shard, clocked_at, serve_clock
from dure.topology.parameter_server.topology import ServerLayout

NUMEL = 7
FAR = Link(bandwidth=1e12, latency=5e-3)


def machines(workers: int, seconds: float = 0.01, **kinds: Any) -> Cluster:
    """Steps of `seconds`, and messages that take 5 ms and nothing else."""
    compute = Constant(seconds=seconds)
    kind = Machines(count=workers, compute=compute, **kinds)
    return Cluster(machines=(kind,), link=FAR, alpha=0.0, beta=0.0, gamma=0.0)


class One:
    """A world with one server."""

    def __init__(self, policy: Policy, workers: int = 2) -> None:
        self.world = World()
        self.policy = policy
        node = self.world.node("server 0")
        self.shard = Shard(node, torch.zeros(NUMEL), OptimizerSpec(lr=1.0), log=True)
        shards = [node.serve("shard", self.shard)]
        self.clock = ClockService(node, policy, shards, workers=range(workers), reduce="sum")
        serve_clock(node, self.clock, self.shard)
        self.servers = ServerLayout(
            shards,
            [[(0, NUMEL)]],
            Address("server 0", "clock"),
            may_refuse=policy.may_refuse,
            clocked=clocked_at(shards, policy),
        )
        self.clients = [ServerClient(self.world.node(f"worker {rank}"), rank, self.servers) for rank in range(workers)]

    def run(self, coroutine: Any) -> Any:
        return self.world.run(coroutine)

    def start(self, coroutine: Any, name: str) -> Any:
        task = self.world.spawn(coroutine, name)
        task.when_done(lambda: None)
        self.world.settle()
        return task


def update(size: float) -> torch.Tensor:
    return torch.full((NUMEL,), size)


def room() -> torch.Tensor:
    return torch.full((NUMEL,), math.nan)


# ---- what one call does


def test_an_exchange_is_answered_once_the_others_have_come_with_what_all_have_made() -> None:
    one = One(Barrier())
    first, second = one.clients
    for client in one.clients:
        begun = one.run(client.next_version(room()))
        assert (begun.values.tolist(), begun.versions) == ([0.0] * NUMEL, [0])
    early = one.start(first.push_pull(update(1.0), room(), base=[0]), "worker 0")
    assert (early.done, one.shard.version, one.policy.clocks[0]) == (False, 0, 1)
    late = one.run(second.push_pull(update(2.0), room(), base=[0]))
    assert early.result().values.tolist() == late.values.tolist() == [-3.0] * NUMEL
    assert early.result().versions == late.versions == [1]
    assert (first.slowest, second.slowest, one.shard.updater.log) == (1, 1, [(0, 0, 1), (1, 0, 1)])


def test_an_exchange_sent_again_counts_once_and_is_answered_alike() -> None:
    one = One(Bounded(3))
    client = one.clients[0]
    one.run(client.next_version(room()))
    for _ in range(2):
        client.sender.seq = 0  # as if the answer had been lost
        again = one.run(client.push_pull(update(1.0), room(), base=[0]))
        assert (again.values.tolist(), again.versions) == ([-1.0] * NUMEL, [1])
    assert (one.shard.applied, one.policy.clocks[0], len(one.shard.staging)) == (1, 1, 0)


def test_a_call_made_again_while_the_first_waits_gets_the_answer_too() -> None:
    one = One(Barrier())
    waiting = []
    for client in (one.clients[0], one.clients[0]):
        client.sender.seq = 0
        waiting.append(one.start(client.push_pull(update(1.0), room()), f"attempt {len(waiting)}"))
    one.run(one.clients[1].push_pull(update(1.0), room()))
    assert [each.result().values.tolist() for each in waiting] == [[-2.0] * NUMEL] * 2
    assert one.shard.versions.current.holders == 1, "what was lent for an answer was given back"


def test_a_bad_update_moves_neither_model_nor_clock() -> None:
    one = One(Bounded(3))
    client = one.clients[0]
    with raising(Refused, "NaN"):
        one.run(client.push_pull(update(math.nan), room()))
    with raising(Refused, "weight"):
        one.run(client.push(update(1.0), weight=0.0))
    assert (one.shard.version, len(one.shard.staging), one.policy.clocks[0]) == (0, 0, 0)
    one.run(client.push_pull(update(1.0), room()))
    assert (one.shard.version, one.policy.clocks[0]) == (1, 1)


def test_who_was_taken_off_the_clock_hears_so_and_what_it_had_pushed_counts() -> None:
    one = One(Barrier())
    waiting = one.start(one.clients[0].push_pull(update(1.0), room()), "worker 0")
    one.clock.evict(0)
    one.world.settle()
    with raising(Evicted, "again"):
        waiting.result()
    one.run(one.clients[1].push_pull(update(2.0), room()))
    assert one.shard.values.tolist() == [-3.0] * NUMEL
    with pytest.raises(Evicted):
        one.run(one.clients[0].push_pull(update(1.0), room()))
    assert one.run(one.clients[0].join()).clock == 1
    one.run(one.clients[0].next_version(room()))


def test_the_end_of_work_is_told_to_who_asks_and_to_who_waits() -> None:
    one = One(FirstOf(lambda workers: 2, distinct=True))
    for client in one.clients:
        one.run(client.next_version(room()))
    one.run(one.clients[0].push(update(1.0), base=[0]))
    waiting = one.start(one.clients[0].next_version(room()), "worker 0")
    assert not waiting.done
    one.run(one.clients[1].leave())
    with pytest.raises(EndOfWork):
        waiting.result()
    with pytest.raises(EndOfWork):
        one.run(one.clients[0].next_version(room()))


def test_notes_travel_with_an_update_and_come_with_the_admission() -> None:
    one = One(Barrier())
    for rank, client in enumerate(one.clients):
        one.run(client.push(update(1.0), note={"clock": rank}))
    one.run(one.clients[1].next_version(room()))
    assert one.clients[1].stats == [{"clock": 0}, {"clock": 1}]
    for client in one.clients:
        one.run(client.push(update(1.0)))
    one.run(one.clients[1].next_version(room()))
    assert one.clients[1].stats == []


def test_an_unknown_method_is_named() -> None:
    one = One(Barrier())
    with raising(Refused, "pull"):
        one.run(call_of(one, "pull"))


async def call_of(one: One, method: str) -> Any:
    return await one.clients[0].node.call(Address("server 0", NAME), method)


def test_several_shards_and_updates_without_order_have_no_clocked_shard() -> None:
    here, there = Address("server 0", "shard"), Address("server 1", "shard")
    assert clocked_at([here], Bounded(3)) == Address("server 0", NAME)
    assert clocked_at([here, there], Bounded(3)) is None
    assert clocked_at([here], None) is None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_of_messages_all_updates_count_once(seed: int) -> None:
    """Three workers make five steps each; one of them loses every second answer and asks again."""
    one, draw = One(Bounded(1), workers=3), random.Random(seed)

    async def work(client: ServerClient) -> None:
        await client.next_version(room())
        for _ in range(5):
            await client.push_pull(update(1.0), room())
            if client.sender.worker == 2:
                client.sender.seq -= 1
                await client.push_pull(update(1.0), room())
        await client.leave()

    tasks = [one.world.spawn(work(client), f"worker {client.sender.worker}") for client in one.clients]
    one.world.settle(draw.choice)
    assert [task.done for task in tasks] == [True] * 3
    assert sorted(one.shard.updater.log or ()) == [(worker, 0, seq) for worker in range(3) for seq in range(1, 6)]
    assert one.shard.values.tolist() == [-15.0] * NUMEL


# ---- across processes


class Processes:
    """A server and three workers of BSP, each on a node of its own, to be closed; `limits` are the server's."""

    def __init__(self, numel: int, limits: WireLimits | None = None) -> None:
        server = ProcessNode(Identity("job", "server 0"), CREDENTIALS, limits=limits)
        self.shard = Shard(server, torch.zeros(numel), OptimizerSpec(lr=1.0), log=True)
        shards = [server.serve("shard", self.shard)]
        serve_clock(server, ClockService(server, Barrier(), shards, workers=range(3), reduce="sum"), self.shard)
        address = "127.0.0.1", server.wire.listen()
        self.numel = numel
        self.servers = ServerLayout(
            shards, [[(0, numel)]], Address("server 0", "clock"), clocked=clocked_at(shards, Barrier())
        )
        self.nodes = [ProcessNode(Identity("job", f"worker {rank}", rank), CREDENTIALS) for rank in range(3)]
        for node in self.nodes:
            node.directory["server 0"] = address
        self.all = [server, *self.nodes]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.all:
            node.wire.close(timeout=0.0)

    def push_pull(self, rank: int, **options: Any) -> Any:
        """Start one of worker `rank`."""
        client = ServerClient(self.nodes[rank], rank, self.servers, **options)
        task = self.nodes[rank].spawn(client.push_pull(torch.ones(self.numel), torch.empty(self.numel)))
        task.when_done(lambda: None)
        return task

    def turn(self, tasks: Sequence[Any], seconds: float) -> None:
        """Until all `tasks` are done, or for so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(task.done for task in tasks):
            for node in self.all:
                node.loop.turn(0.001)

    def pass_time(self, seconds: float) -> None:
        self.turn([Operation(self.nodes[0].loop)], seconds)

    def ended(self, task: Any) -> Any:
        """What comes of `task`."""
        task.when_done(lambda: None)
        self.turn([task], 20.0)
        return task.result()


def test_updates_of_more_bytes_than_a_server_takes_at_once_all_come_in_before_anybody_goes_on() -> None:
    """Who waits for the others holds no memory that their updates need."""
    with Processes(100_000, WireLimits(staging_nbytes=410_000)) as world:
        tasks = [world.push_pull(rank) for rank in range(3)]
        world.turn(tasks, 20.0)
        assert [task.result().values.unique().tolist() for task in tasks] == [[-3.0]] * 3


def test_who_is_not_answered_in_time_asks_for_as_long_as_it_takes() -> None:
    with Processes(10) as world:
        early = [world.push_pull(rank, timeout=0.05, attempts=2) for rank in range(2)]
        world.turn(early, 0.5)
        assert not any(task.done for task in early)
        late = world.push_pull(2)
        world.turn([*early, late], 20.0)
        assert [task.result().values.unique().tolist() for task in (*early, late)] == [[-3.0]] * 3
        assert world.shard.updater.log == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_who_is_stopped_while_it_waits_leaves_nothing_borrowed() -> None:
    """Its answer would come when nobody is there to give back what it lends."""
    with Processes(1_000_000) as world:
        client = ServerClient(world.nodes[0], 0, world.servers)
        assert world.ended(world.nodes[0].spawn(client.push(torch.ones(1_000_000)))) == [0]
        for _ in range(2):
            waiting = world.nodes[0].spawn(client.next_version(None))
            waiting.when_done(lambda: None)
            world.turn([waiting], 0.2)
            waiting.throw(Suspend())
            assert waiting.done
        again = world.nodes[0].spawn(client.next_version(None))
        others = [world.push_pull(rank) for rank in (1, 2)]
        borrowed = world.ended(again)
        world.turn(others, 20.0)
        world.pass_time(0.2)
        assert (borrowed.values.unique().tolist(), borrowed.versions) == ([-3.0], [1])
        assert world.shard.versions.current.holders == 2, "the shard itself, and worker 0"
        borrowed.release()
        world.pass_time(0.2)
        assert world.shard.versions.current.holders == 1


# ---- whole runs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("method", ["ssp:bound=0", "ssp:bound=3", "bsp", "k-async:k=2", "k-batch-async:k=2"])
def test_a_step_takes_one_latency_there_and_one_back(method: str) -> None:
    """Of the three times two that several servers take: a gradient takes 10 ms, a message 5 ms."""
    workers = 1 if method.startswith("ssp") else 2
    one, two = (
        virtual("quadratic", f"{method} {where}", machines(workers), steps=50) for where in ("ps", "ps:shards=2")
    )
    assert one.seconds == pytest.approx(50 * 0.020, abs=0.04)
    assert two.seconds == pytest.approx(50 * 0.040, abs=0.06)
    share = one.outcome.totals.time
    assert share["communicate"] == pytest.approx(share["compute"], rel=0.05)


@pytest.mark.parametrize("method", ["backup:backups=1", "k-sync:k=2", "k-batch-sync:k=2"])
def test_where_updates_may_be_refused_they_are_offered_first(method: str) -> None:
    one, two = (virtual("quadratic", f"{method} {where}", machines(3), steps=30) for where in ("ps", "ps:shards=2"))
    assert one.summary["updates_refused"] > 0
    assert one.summary["bytes_sent"] == one.summary["updates_applied"] * one.params.nbytes
    assert one.seconds < 0.8 * two.seconds


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "method", ["bsp {} fp16", "bsp {}", "averaging:period=3 {}", "bmuf:period=2 {}", "one-shot {}"]
)
def test_one_server_makes_what_two_make_bit_for_bit_with_fewer_messages(method: str) -> None:
    cuts = (method.format(cut) for cut in ("ps", "ps:shards=2,split=layer"))
    one, two = (virtual("digits-mlp", cut, workers=3, steps=12, lr=0.05) for cut in cuts)
    assert torch.equal(one.params, two.params)
    assert one.summary["updates_applied"] == two.summary["updates_applied"]
    assert one.summary["messages"] < two.summary["messages"]


def test_the_wait_for_others_is_told_apart_from_the_way(tmp_path: Path) -> None:
    """One worker is three times as fast; a message takes 5 ms each way, so it waits for all the rest of the time."""
    cluster = machines(2, 0.03, speed=(1.0, 3.0))
    run = virtual("quadratic", "bsp ps", cluster, steps=100, trace=True, out=tmp_path)
    spent = run.outcome.totals.time
    assert run.seconds == pytest.approx(100 * 0.040, rel=0.02)
    assert spent["compute"] == pytest.approx(100 * 0.040, rel=0.02)
    assert spent["communicate"] == pytest.approx(2 * 100 * 0.010, rel=0.05)
    assert spent["wait"] == pytest.approx(100 * 0.020, rel=0.05)
    assert_spans(run, [0.010, 0.005, 0.020, 0.005])


def test_the_clocks_answer_is_part_of_the_wait_where_several_servers_have_the_model(tmp_path: Path) -> None:
    """As above, and there is one call more: 10 ms of it."""
    cluster = machines(2, 0.03, speed=(1.0, 3.0))
    run = virtual("quadratic", "bsp ps:shards=2", cluster, steps=100, trace=True, out=tmp_path)
    assert run.seconds == pytest.approx(100 * 0.060, rel=0.02)
    assert_spans(run, [0.010, 0.010, 0.030, 0.010])


def assert_spans(run: Any, seconds: Sequence[float]) -> None:
    """A step of worker 1: gradient, push, wait, pull."""
    step = [span for span in run.outcome.spans if span.rank_name == "worker 1"][-8:-4]
    assert [span.detail or span.kind for span in step] == ["compute", "push", "wait", "pull"]
    assert [span.end - span.start for span in step] == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_checkpoint_finds_every_update_where_its_worker_says_it_is(bound: int, tmp_path: Path) -> None:
    """Whoever stops while it waits for others has heard first that its update is there."""
    speeds = itertools.islice(itertools.cycle((1.0, 4.0)), 4)
    compute = LogNormal(seconds=0.01, sigma=0.5)
    cluster = Cluster(machines=(Machines(count=4, compute=compute, speed=tuple(speeds)),))
    job = bowls([(0.0, 1.0)] * 8, lr=1.0)  # every update moves the model by one
    run = virtual(job, f"ssp:bound={bound} ps", cluster, steps=23, checkpoint_every=5, out=tmp_path)
    assert float(run.params) == run.summary["updates_applied"] == 4 * 23


@pytest.mark.parametrize(("method", "calls"), [("ssp:bound=1", 2), ("bsp", 1)])
def test_who_may_be_stopped_while_it_waits_is_told_before_that_its_update_is_there(
    method: str, calls: int, tmp_path: Path
) -> None:
    """On processes a push that is cut off may not have arrived when the servers save. BSP stops at its steps only."""
    run = virtual("quadratic", f"{method} ps", machines(2), steps=40, checkpoint_every=1000, out=tmp_path)
    for row in run.outcome.totals.per_worker.values():
        assert row["messages"] == pytest.approx(40 * calls, abs=4)


@pytest.mark.parametrize("method", ["ssp:bound=1", "bsp"])
def test_for_real_every_gradient_counts(method: str, fork_server: ForkServer) -> None:
    run = local("digits-mlp", f"{method} ps", fork_server=fork_server, workers=2, steps=40, lr=0.05)
    assert run.outcome.totals.counts["updates_applied"] == 80
    workers = run.outcome.totals.per_worker.values()
    assert all(row["messages"] < 40 + 20 for row in workers), "a request a step, and some to come and to go"
