"""Shards, the clock's service and the client, over nodes without time."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.nodes import World
from support.stale import Bench
from support.wording import raising

from dure.core.node import Address, Call, Ghost, Operation, Reply, Work
from dure.core.sequence import SequenceTracker
from dure.core.state import State
from dure.core.vectors import gather
from dure.errors import CallTimeout, Evicted, PeerLost, Refused
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec, restrict
from dure.topology.parameter_server.admission import Policy
from dure.topology.parameter_server.choice import SPLITS
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.policies import Barrier, Bounded
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout, split
from dure.topology.replica import Pulled

NUMEL = 41
SPECS = [
    OptimizerSpec("sgd", lr=0.1, weight_decay=0.01),
    OptimizerSpec("momentum", lr=0.1, nesterov=True),
    OptimizerSpec("adagrad", lr=0.1),
    OptimizerSpec("adam", lr=0.1),
    OptimizerSpec("assign"),
]


class Layer:
    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop


LAYERS = [Layer(0, 3), Layer(3, 20), Layer(20, 21), Layer(21, 30), Layer(30, 41)]


def vector(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Fleet:
    """A world with shards, a clock and clients."""

    def __init__(
        self,
        shards: int = 2,
        by: str = "memory",
        spec: OptimizerSpec = SPECS[0],
        policy: Policy | None = None,
        workers: int = 2,
        reduce: str = "mean",
        values: torch.Tensor | None = None,
        segments: Sequence[GroupRange] = (),
        layers: Sequence[Layer] = LAYERS,
    ) -> None:
        self.world = World()
        self.values = vector(0) if values is None else values
        ranges = split(layers, self.values.numel(), shards, by, bound=10)  # type: ignore[arg-type]
        nodes = [self.world.node(f"server {shard}") for shard in range(shards)]
        self.shards = [
            Shard(node, gather(self.values, part), spec, ranges=part, segments=restrict(segments, part), log=True)
            for node, part in zip(nodes, ranges, strict=True)
        ]
        addresses = [node.serve("shard", shard) for node, shard in zip(nodes, self.shards, strict=True)]
        self.clock = ClockService(nodes[0], policy, addresses, workers=range(workers), reduce=reduce)
        clock = nodes[0].serve("clock", self.clock)
        self.servers = ServerLayout(addresses, ranges, clock, ordered=policy is not None)
        self.clients = [self.client(worker) for worker in range(workers)]

    def client(self, worker: int) -> ServerClient:
        return ServerClient(self.world.node(f"worker {worker}"), worker, self.servers)

    def run(self, coroutine: Any) -> Any:
        return self.world.run(coroutine)

    def model(self) -> torch.Tensor:
        pulled: Pulled = self.run(self.clients[-1].pull(torch.empty_like(self.values)))
        return pulled.values


def serial(spec: OptimizerSpec, values: torch.Tensor, gradients: Sequence[torch.Tensor], **kwargs: Any) -> torch.Tensor:
    optimizer = FlatOptimizer(spec, values.numel(), values.dtype, **kwargs)
    values = values.clone()
    for gradient in gradients:
        optimizer.apply(values, gradient, values)
    return values


# ---- results do not depend on how the model is cut


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("shards", "by"),
    [(1, "memory"), (2, "memory"), (3, "memory"), (2, "layer"), (4, "layer"), (3, "keys"), (3, "hybrid")],
)
def test_updates_on_arrival_equal_no_server_bit_for_bit(spec: OptimizerSpec, shards: int, by: str) -> None:
    segments = [GroupRange(5, 25, {"lr": 0.3})]
    fleet = Fleet(shards, by, spec, workers=2, segments=segments)
    gradients = [vector(seed) for seed in range(1, 6)]
    for step, gradient in enumerate(gradients):
        versions = fleet.run(fleet.clients[step % 2].push(gradient, base=[0] * shards))
        assert versions == [step + 1] * shards
    assert torch.equal(fleet.model(), serial(spec, fleet.values, gradients, segments=segments))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_groups_are_bitwise_the_same_for_every_cut(spec: OptimizerSpec, reduce: str) -> None:
    def result(shards: int, by: str) -> torch.Tensor:
        fleet = Fleet(shards, by, spec, Barrier(), workers=3, reduce=reduce)
        for step in range(3):
            for worker, client in enumerate(fleet.clients):
                fleet.run(client.push(vector(10 * step + worker), weight=16 + 8 * (worker == 1), base=[step] * shards))
        return fleet.model()

    one = result(1, "memory")
    cuts = [(2, "memory"), (3, "memory"), (2, "layer"), (5, "layer"), (7, "layer"), (2, "keys"), (4, "hybrid")]
    for shards, by in cuts:
        assert torch.equal(result(shards, by), one)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 1, 2, 3, 9, 10, 11, 40]), max_size=7),
    shards=st.integers(1, 6),
    by=st.sampled_from(SPLITS),
    spec=st.sampled_from(SPECS),
)
def test_whatever_the_tensors_every_cut_gives_the_same_bits(
    sizes: list[int], shards: int, by: str, spec: OptimizerSpec
) -> None:
    """Tensors without elements and of one are among them, models of none, and more servers than elements."""
    stops = list(accumulate(sizes, initial=0))
    layers = [Layer(*bounds) for bounds in pairwise(stops)]
    draw = torch.Generator().manual_seed(len(sizes))
    values, *gradients = (torch.randn(stops[-1], generator=draw) for _ in range(5))
    fleet = Fleet(shards, by, spec, values=values, layers=layers)
    for step, gradient in enumerate(gradients):
        fleet.run(fleet.clients[step % 2].push(gradient, base=[0] * shards))
    assert torch.equal(fleet.model(), serial(spec, values, gradients))


@pytest.mark.parametrize(("shards", "by"), [(1, "memory"), (3, "memory"), (2, "layer")])
@pytest.mark.parametrize("weights", [(8, 8, 8), (4, 16, 12)])
def test_bsp_equals_one_worker_on_all_the_samples(shards: int, by: str, weights: tuple[int, ...]) -> None:
    values = vector(0, torch.float64)
    spec = SPECS[3]
    fleet = Fleet(shards, by, spec, Barrier(), workers=3, values=values)
    means = []
    for step in range(4):
        samples = [[vector(1000 * step + 50 * k + i, torch.float64) for i in range(b)] for k, b in enumerate(weights)]
        for k in (2, 0, 1):
            push = fleet.clients[k].push(torch.stack(samples[k]).mean(0), weight=weights[k], base=[step] * shards)
            fleet.run(push)
        means.append(torch.stack([sample for part in samples for sample in part]).mean(0))
    torch.testing.assert_close(fleet.model(), serial(spec, values, means), rtol=1e-12, atol=1e-12)


def test_members_are_combined_in_rank_order_whatever_order_they_came_in() -> None:
    def result(order: Sequence[int]) -> torch.Tensor:
        fleet = Fleet(policy=Barrier(), workers=4)
        for worker in order:
            fleet.run(fleet.clients[worker].push(vector(worker), weight=worker + 1.5, base=[0, 0]))
        assert fleet.shards[0].updater.log == [(worker, 0, 1) for worker in range(4)]
        return fleet.model()

    assert torch.equal(result([0, 1, 2, 3]), result([3, 1, 0, 2]))


def test_snapshots_without_lead_are_bsp_with_summed_updates() -> None:
    """Dyadic numbers make every order of summation exact."""
    integers = [torch.randint(-64, 64, (NUMEL,), generator=torch.Generator().manual_seed(seed)) for seed in range(10)]
    dyadic = [drawn.double() / 64 for drawn in integers]

    async def work(client: ServerClient) -> None:
        for step in range(3):
            pulled = await client.pull(torch.empty_like(dyadic[0]), await client.ask())
            gradient = pulled.values / 4 + dyadic[3 * client.sender.worker + step]
            await client.push(gradient, base=pulled.versions)
        await client.leave()

    def result(policy: Policy, reduce: str, seed: int) -> torch.Tensor:
        fleet = Fleet(2, spec=OptimizerSpec(lr=1 / 16), policy=policy, workers=3, reduce=reduce, values=dyadic[9])
        tasks = [fleet.world.spawn(work(client), f"worker {client.sender.worker}") for client in fleet.clients]
        fleet.world.settle(random.Random(seed).choice)
        assert all(task.done for task in tasks)
        return torch.cat([shard.values for shard in fleet.shards])

    expected = result(Barrier(), "sum", 0)
    for seed in range(20):
        assert torch.equal(result(Bounded(0), "sum", seed), expected)
    assert any(not torch.equal(result(Bounded(2), "sum", seed), expected) for seed in range(5))


@pytest.mark.parametrize("ordered", [True, False])
def test_all_shards_are_asked_before_any_has_answered(ordered: bool) -> None:
    fleet = Fleet(4, policy=Barrier() if ordered else None)
    client, into = fleet.clients[0], torch.empty(NUMEL)
    for begun in (client.push(vector(1), base=[0] * 4), client.pull(into), client.status()):
        task = fleet.world.spawn(begun, "a call of every shard")
        fleet.world.run_ready()
        asked = fleet.world.choices()
        assert [address.node for _, address in asked] == [f"server {shard}" for shard in range(4)]
        fleet.world.settle(lambda choices: choices[-1])
        assert task.done


# ---- versions are values


def test_a_pull_gets_exactly_the_version_it_asks_for() -> None:
    fleet = Fleet(policy=Bounded(5), spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    one = torch.ones(NUMEL)
    reader, writer = fleet.clients
    assert fleet.run(reader.ask()) == 0
    ahead = fleet.world.spawn(reader.pull(torch.empty(NUMEL), version=2), "ahead")
    fleet.run(writer.push(one, base=[0, 0]))
    assert not ahead.done
    for _ in range(3):
        fleet.run(writer.push(one, base=[0, 0]))
    assert ahead.result().values.tolist() == [-2.0] * NUMEL
    assert fleet.run(reader.pull(torch.empty(NUMEL), version=0)).values.tolist() == [0.0] * NUMEL
    assert fleet.run(reader.pull(torch.empty(NUMEL))).versions == [4, 4]
    assert fleet.run(reader.ask()) == 4
    fleet.run(writer.push(one, base=[0, 0]))
    with raising(Refused, "version 0"):
        fleet.run(reader.pull(torch.empty(NUMEL), version=0))
    assert fleet.run(reader.pull(torch.empty(NUMEL), version=4)).values[0] == -4.0


def test_an_exchange_brings_the_version_it_was_admitted_on_whatever_others_push_meanwhile() -> None:
    fleet = Fleet(2, policy=Bounded(5), spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL), reduce="sum")
    one, world = torch.ones(NUMEL), fleet.world
    reader, writer = fleet.clients
    going = world.spawn(reader.push_pull(one, torch.empty(NUMEL), base=[0, 0]), "exchange")
    world.run_ready()
    for _ in range(3):  # two pushes, and the word of them, which orders both shards to apply
        world.deliver(next(channel for channel in world.choices() if channel[0] == "worker 0"))
    late = world.spawn(writer.push(one, base=[0, 0]), "push")
    world.run_ready()
    while others := [channel for channel in world.choices() if channel[0] != "worker 0"]:
        world.deliver(others[0])
    assert late.done
    assert [shard.version for shard in fleet.shards] == [2, 2]
    world.settle()
    pulled = going.result()
    assert pulled.versions == [1, 1]
    assert pulled.values.tolist() == [-1.0] * NUMEL


def test_buffers_are_used_again() -> None:
    fleet = Fleet(policy=Bounded(2))
    for step in range(50):
        for client in fleet.clients:
            version = fleet.run(client.ask())
            fleet.run(client.pull(torch.empty(NUMEL), version))
            fleet.run(client.push(vector(step), base=[version, version]))
    status = fleet.run(fleet.clients[0].status())
    assert status[0]["applied"] == 100
    assert all(shard["buffers"] <= 5 for shard in status), "two versions, one made, one staged, and one pinned"


def test_a_reader_never_sees_a_later_version_in_its_buffer() -> None:
    fleet = Fleet(1, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    shard, writer = fleet.shards[0], fleet.clients[0]
    reply = shard.handle(Call("reader", "pull", {}, ()))
    assert isinstance(reply, Reply)
    for _ in range(5):
        fleet.run(writer.push(torch.ones(NUMEL), base=[0]))
    assert reply.tensors[0].tolist() == [0.0] * NUMEL
    reply.release()
    another = shard.handle(Call("reader", "pull", {}, ()))
    assert isinstance(another, Reply)
    fleet.run(writer.push(torch.ones(NUMEL), base=[0]))
    assert another.tensors[0].tolist() == [-5.0] * NUMEL
    assert reply.tensors[0].tolist() == [-6.0] * NUMEL, "what was released is used again"
    assert shard.versions.pool.made == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_a_push_brings_back_what_it_has_made(shards: int) -> None:
    fleet = Fleet(shards, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    first, second = fleet.clients
    fleet.run(second.push(torch.ones(NUMEL), base=[0] * shards))
    into = torch.empty(NUMEL)
    pulled = fleet.run(first.push_pull(torch.ones(NUMEL), into, base=[0] * shards))
    assert pulled.values is into
    assert (into.tolist(), pulled.versions) == ([-2.0] * NUMEL, [2] * shards)
    first.sender.seq -= 1  # as if the answer had been lost
    fleet.run(second.push(torch.ones(NUMEL), base=[0] * shards))
    again = fleet.run(first.push_pull(torch.ones(NUMEL), into, base=[0] * shards))
    assert (into.tolist(), again.versions) == ([-3.0] * NUMEL, [3] * shards)
    with raising(Refused, "NaN"):
        fleet.run(first.push_pull(torch.full((NUMEL,), math.nan), into, base=[0] * shards))
    assert fleet.model().tolist() == [-3.0] * NUMEL


def test_where_nobody_reads_updates_are_applied_in_place() -> None:
    fleet = Fleet(1, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    shard, place = fleet.shards[0], fleet.shards[0].values.data_ptr()
    for _ in range(3):
        fleet.run(fleet.clients[0].push(torch.ones(NUMEL), base=[0]))
    assert (shard.values.data_ptr(), shard.versions.pool.made, shard.version) == (place, 1, 3)
    assert fleet.model().tolist() == [-3.0] * NUMEL


def test_updates_do_not_alias_what_the_worker_pushed() -> None:
    fleet = Fleet(policy=Barrier(), workers=2, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    gradient = torch.ones(NUMEL)
    fleet.run(fleet.clients[0].push(gradient, base=[0, 0]))
    gradient.fill_(100.0)
    fleet.run(fleet.clients[1].push(torch.full((NUMEL,), 3.0), base=[0, 0]))
    assert fleet.model().tolist() == [-2.0] * NUMEL


class Slow:
    """A node on which work takes until `finish` is called."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.name, self.promise = node.name, node.promise
        self.pending: list[tuple[Work, Operation[Any]]] = []

    def compute(self, work: Work) -> Operation[Any]:
        self.pending.append((work, self.promise("slow work")))
        return self.pending[-1][1]

    def finish(self) -> None:
        ((work, operation),) = self.pending
        self.pending = []
        operation.resolve(work.run())
        self.node.world.run_ready()


@pytest.mark.parametrize("ordered", [True, False])
def test_a_shard_applies_one_update_at_a_time_and_readers_do_not_wait(ordered: bool) -> None:
    values, one = torch.zeros(NUMEL), torch.ones(NUMEL)
    fleet = Fleet(1, spec=OptimizerSpec(lr=1.0), values=values, policy=Bounded(9) if ordered else None)
    shard = fleet.shards[0]
    slow = shard.node = shard.updater._node = cast(Any, Slow(shard.node))
    pushes = [fleet.world.spawn(client.push(one, base=[0]), f"push {client.sender.worker}") for client in fleet.clients]
    fleet.world.settle()
    fleet.clients[0].sender.seq -= 1
    again = fleet.world.spawn(fleet.clients[0].push(one, base=[0]), "push 0 again")
    fleet.world.settle()
    assert fleet.model().tolist() == [0.0] * NUMEL
    if not ordered:
        assert not pushes[0].done
        assert not again.done, "acknowledged before it was applied"
    slow.finish()
    assert fleet.model().tolist() == [-1.0] * NUMEL
    slow.finish()
    assert fleet.model().tolist() == [-2.0] * NUMEL
    assert pushes[0].done
    assert pushes[1].done
    assert again.done
    assert fleet.shards[0].applied == 2


# ---- updates count once


class Flaky:
    """A node that loses requests or replies, as a list of what happens to the next calls says."""

    def __init__(self, node: Any, fates: list[str]) -> None:
        self.node, self.fates = node, fates
        self.name, self.promise = node.name, node.promise

    def call(self, service: Address, method: str, *tensors: Any, **fields: Any) -> Operation[Reply]:
        fate = self.fates.pop() if self.fates else "well"
        lost: Operation[Reply] = self.node.promise("a lost message")
        if fate != "request lost":
            operation = self.node.call(service, method, *tensors, **fields)
            if fate == "well":
                return cast(Operation[Reply], operation)
        lost.fail(CallTimeout(f"{method} was not answered"))
        return lost


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_lost_messages_change_nothing(ordered: bool, seed: int) -> None:
    def result(rate: float) -> torch.Tensor:
        fleet = Fleet(2, policy=Barrier() if ordered else None, workers=1)
        chance = random.Random(seed)
        fates = [
            chance.choice(["request lost", "reply lost"]) if chance.random() < rate else "well" for _ in range(200)
        ]
        client = fleet.clients[0]
        client.node = cast(Any, Flaky(client.node, fates))
        client.attempts = 50
        for step in range(10):
            versions = fleet.run(fleet.clients[0].pull(torch.empty(NUMEL))).versions
            fleet.run(fleet.clients[0].push(vector(step), base=versions))
        assert fleet.shards[0].updater.log == fleet.shards[1].updater.log == [(0, 0, seq) for seq in range(1, 11)]
        assert len(fates) < 200 - 20 * (1 + rate)
        return fleet.model()

    assert torch.equal(result(0.3), result(0.0))


@pytest.mark.parametrize("make", [lambda: Barrier(), lambda: Bounded(3)])
@pytest.mark.parametrize("seed", range(3))
def test_lost_messages_change_nothing_of_an_exchange(make: Any, seed: int) -> None:
    """Word of an update and the next question are one call: it counts once, and is answered for the next step."""

    def result(rate: float) -> torch.Tensor:
        fleet = Fleet(2, policy=make(), workers=1, reduce="sum")
        chance = random.Random(seed)
        fates = [chance.choice(["request lost", "reply lost"]) if chance.random() < rate else "well" for _ in range(99)]
        client = fleet.clients[0]
        client.node = cast(Any, Flaky(client.node, fates))
        client.attempts = 50
        client.node.now = fleet.world.node("worker 0").now
        versions = [0, 0]
        for step in range(10):
            pulled = fleet.run(client.push_pull(vector(step), torch.empty(NUMEL), base=versions))
            versions = pulled.versions
            assert versions == [step + 1] * 2
            assert torch.equal(pulled.values, fleet.model())
        assert fleet.shards[0].updater.log == fleet.shards[1].updater.log == [(0, 0, seq) for seq in range(1, 11)]
        assert fleet.clock.handle(Call("driver", "status", {}, ())).fields["clocks"] == {"0": 10}
        assert len(fates) < 99 - 50 * (1 + rate)
        return fleet.model()

    assert torch.equal(result(0.3), result(0.0))


def test_a_repeated_update_is_acknowledged_and_not_applied() -> None:
    fleet = Fleet(1, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    client = fleet.clients[0]
    fleet.run(client.push(torch.ones(NUMEL), base=[0]))
    client.sender.seq -= 1
    assert fleet.run(client.push(torch.ones(NUMEL), base=[0])) == [1]
    assert fleet.model()[0] == -1.0
    assert fleet.shards[0].applied == 1


def test_the_ledger_knows_what_is_missing() -> None:
    ledger = SequenceTracker()
    assert [ledger.first_time(0, 0, seq) for seq in (1, 2, 5, 2, 4, 4, 3, 6, 3)] == [
        True, True, True, False, True, False, True, True, False,
    ]  # fmt: skip
    again = SequenceTracker()
    ledger.first_time(0, 0, 9)
    again.restore(json.loads(json.dumps(ledger.state())))
    assert [again.first_time(0, 0, seq) for seq in (9, 7, 7, 10)] == [False, True, False, True]
    assert again.first_time(0, 2, 1)
    with raising(Refused, "incarnation 1"):
        again.first_time(0, 1, 2)
    with raising(Refused, "than 1000"):
        again.first_time(0, 2, 5000)


class Gone:
    """A node that loses its server at each call, and whose time passes while it sleeps."""

    def __init__(self, node: Any) -> None:
        self.promise, self.seconds, self.calls = node.promise, 0.0, 0

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> Operation[None]:
        self.seconds += seconds
        slept: Operation[None] = self.promise("a sleep")
        slept.resolve()
        return slept

    def call(self, service: Address, method: str, **fields: Any) -> Operation[Reply]:
        self.calls += 1
        assert self.calls < 100, "the time of a server that is gone begins anew"
        lost: Operation[Reply] = self.promise("a lost server")
        lost.fail(PeerLost("server 0 is gone"))
        return lost


def test_a_server_that_is_gone_is_called_again_for_the_seconds_of_its_return() -> None:
    fleet = Fleet(1)
    client = fleet.clients[0]
    node = Gone(client.node)
    client.node, client.return_seconds, client.attempts = cast(Any, node), 0.35, 2
    with pytest.raises(PeerLost, match="gone"):
        fleet.run(client.status())
    assert node.calls == 5


# ---- what is refused


def test_an_update_that_one_shard_refuses_is_taken_back_from_all_others() -> None:
    fleet = Fleet(3, policy=Barrier(), workers=1)
    update = torch.ones(NUMEL)
    update[0] = torch.nan
    with pytest.raises(Refused, match="update 1"):
        fleet.run(fleet.clients[0].push(update, base=[0] * 3))
    assert [shard.refused for shard in fleet.shards] == [1, 0, 0]
    assert [len(shard.staging) for shard in fleet.shards] == [0, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("ordered", [True, False])
def test_nan_is_refused_and_its_other_slices_taken_back(bad: float, ordered: bool) -> None:
    fleet = Fleet(2, policy=Barrier() if ordered else None, workers=1)
    update = torch.ones(NUMEL)
    update[-1] = bad
    with raising(Refused, "update 1"):
        fleet.run(fleet.clients[0].push(update, base=[0, 0]))
    assert [shard.refused for shard in fleet.shards] == [0, 1]
    assert [len(shard.staging) for shard in fleet.shards] == [0, 0]
    assert [shard.version for shard in fleet.shards] == ([0, 0] if ordered else [1, 0])
    fleet.run(fleet.clients[0].push(torch.ones(NUMEL), base=[0, 0]))
    assert [shard.version for shard in fleet.shards] == ([1, 1] if ordered else [2, 1])


@pytest.mark.parametrize("exponent", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused(exponent: float) -> None:
    fleet = Fleet(1, policy=Barrier(), workers=1)
    with pytest.raises(Refused, match=f"has weight 1.0 times e to the {exponent}"):
        fleet.run(fleet.clients[0].push(torch.ones(NUMEL), exponent=exponent, base=[0]))


def test_a_refused_update_sent_again_is_refused_again() -> None:
    fleet = Fleet(1, policy=Barrier(), workers=1)
    for _ in range(2):
        fleet.clients[0].sender.seq = 0
        with raising(Refused, "holds"):
            fleet.run(fleet.clients[0].push(torch.full((NUMEL,), torch.nan), base=[0]))


@pytest.mark.parametrize("ordered", [True, False])
def test_who_is_refused_three_times_in_a_row_must_join_again(ordered: bool) -> None:
    fleet = Fleet(1, policy=Barrier() if ordered else None, workers=2)
    bad, good, (client, other) = torch.full((NUMEL,), torch.nan), torch.ones(NUMEL), fleet.clients
    life = fleet.run(client.join()).incarnation
    for update in (bad, bad, good, bad, bad, good, bad, bad):
        if update is good:
            fleet.run(client.push(good, base=[0]))
        else:
            with raising(Refused, "holds"):
                fleet.run(client.push(bad, base=[0]))
    with raising(Refused, "holds"):
        fleet.run(client.push(bad, base=[0]))
    before = len(fleet.shards[0].staging) + fleet.shards[0].applied
    with pytest.raises(Evicted, match=rf"incarnation {life} of worker 0 is over.*join again"):
        fleet.run(client.push(good, base=[0]))
    fleet.run(other.push(good, base=[0]))
    assert fleet.run(client.join()).incarnation == life + 1
    fleet.run(client.push(good, base=[0]))
    assert len(fleet.shards[0].staging) + fleet.shards[0].applied == before + 2
    assert fleet.shards[0].refused == 8


def test_large_finite_numbers_are_no_infinity() -> None:
    fleet = Fleet(1, spec=OptimizerSpec("assign"))
    fleet.run(fleet.clients[0].push(torch.full((NUMEL,), 3e38), base=[0]))
    assert fleet.shards[0].version == 1


def test_nonsense_is_refused_with_a_reason() -> None:
    fleet = Fleet(policy=Barrier())
    for weight in (0.0, -1.0, float("nan")):
        with raising(Refused, "positive"):
            fleet.run(fleet.clients[0].push(vector(1), weight=weight, base=[0, 0]))
    for service in (fleet.shards[0], fleet.clock):
        with raising(Refused, "frobnicate"):
            service.handle(Call("x", "frobnicate", {}, ()))
    with raising(Refused, "version 3"):
        fleet.shards[0].handle(Call("clock", "close", {"version": 3, "group": 2, "members": [[0, 9]]}, ()))
    unordered = Fleet(policy=None)
    with raising(Refused, "order"):
        unordered.run(unordered.clients[0].ask())


# ---- workers come and go


def test_a_dead_worker_is_left_out_on_every_shard() -> None:
    fleet = Fleet(2, policy=Barrier(), workers=3, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    half = fleet.world.spawn(fleet.clients[0].push(torch.full((NUMEL,), 50.0), base=[0, 0]), "worker 0")
    fleet.world.run_ready()
    fleet.world.deliver(("worker 0", fleet.servers.shards[0]))
    fleet.world.kill("worker 0")
    assert half.done
    for client in fleet.clients[1:]:
        fleet.run(client.push(torch.ones(NUMEL) * client.sender.worker, base=[0, 0]))
    assert [len(shard.staging) for shard in fleet.shards] == [3, 3], "the late slice arrives after death"
    fleet.clock.lost("worker 0")
    fleet.world.settle()
    assert fleet.model().tolist() == [-1.5] * NUMEL
    assert fleet.shards[0].updater.log == fleet.shards[1].updater.log == [(1, 0, 1), (2, 0, 1)]
    assert [len(shard.staging) for shard in fleet.shards] == [0, 0]


def test_a_past_incarnation_is_refused_everywhere() -> None:
    fleet = Fleet(policy=Barrier(), workers=2)
    zombie, other = fleet.clients
    fleet.run(zombie.push(vector(1), base=[0, 0]))
    fleet.clock.lost("worker 0")
    fleet.run(other.push(vector(2), base=[0, 0]))
    assert fleet.shards[0].updater.log == [(0, 0, 1), (1, 0, 1)], "what was staged in full counts"
    with raising(Refused, "incarnation 0"):
        fleet.run(zombie.push(vector(3), base=[1, 1]))
    with raising(Refused, "first"):
        fleet.run(zombie.ask())
    joined = fleet.run(zombie.join())
    assert joined == (1, 1, 1)
    with raising(Evicted, "incarnation 0"):
        fleet.clock.handle(Call("worker 0", "ask", {"worker": 0, "incarnation": 0}, ()))
    fleet.run(zombie.push(vector(3), base=[1, 1]))
    fleet.run(other.push(vector(4), base=[1, 1]))
    assert (fleet.shards[0].updater.log or [])[2:] == [(0, 1, 1), (1, 0, 2)]


def test_a_newcomer_takes_part_and_the_others_wait_for_it() -> None:
    fleet = Fleet(policy=Barrier(), workers=1)
    fleet.run(fleet.clients[0].push(vector(1), base=[0, 0]))
    newcomer = fleet.client(7)
    assert fleet.run(newcomer.join()) == (1, 1, 0)
    fleet.run(fleet.clients[0].push(vector(2), base=[1, 1]))
    waiting = fleet.world.spawn(fleet.clients[0].ask(), "worker 0")
    fleet.world.settle()
    assert not waiting.done
    fleet.run(newcomer.push(vector(3), base=[1, 1]))
    assert waiting.result() == 2


def test_leaving_releases_those_who_wait() -> None:
    fleet = Fleet(policy=Bounded(0), workers=2)
    fleet.run(fleet.clients[0].push(vector(1), base=[0, 0]))
    waiting = fleet.world.spawn(fleet.clients[0].ask(), "worker 0")
    fleet.world.settle()
    assert not waiting.done
    assert fleet.clock.waits == 1
    fleet.run(fleet.clients[1].leave())
    assert waiting.result() == 1


def test_an_answer_asked_for_twice_is_given_twice() -> None:
    fleet = Fleet(policy=Bounded(0), workers=2)
    fleet.run(fleet.clients[0].push(vector(1), base=[0, 0]))
    twice = [fleet.world.spawn(fleet.clients[0].ask(), f"question {q}") for q in range(2)]
    fleet.world.settle()
    fleet.run(fleet.clients[1].push(vector(1), base=[0, 0]))
    assert [task.result() for task in twice] == [2, 2]


# ---- counters, and runs without numbers


def test_staleness_is_counted_in_versions() -> None:
    fleet = Fleet(2, policy=None)
    for base in (0, 0, 1, 3):
        fleet.run(fleet.clients[0].push(vector(1), base=[base, 0]))
    first, second = fleet.run(fleet.clients[0].status())
    assert first["staleness"] == {"0": 2, "1": 2}
    assert second["staleness"] == {"0": 1, "1": 1, "2": 1, "3": 1}
    assert first["last"] == {"0": 4}


def test_timing_only_runs_move_sizes_and_versions() -> None:
    world = World()
    ranges = split(LAYERS, NUMEL, 2, "layer")
    nodes = [world.node(f"server {shard}") for shard in range(2)]
    sizes = [sum(b - a for a, b in part) for part in ranges]
    ghosts = [cast(torch.Tensor, Ghost(size)) for size in sizes]
    shards = [
        Shard(node, ghost, SPECS[3], ranges=part) for node, ghost, part in zip(nodes, ghosts, ranges, strict=True)
    ]
    addresses = [node.serve("shard", shard) for node, shard in zip(nodes, shards, strict=True)]
    clock = ClockService(nodes[0], Barrier(), addresses, workers=range(2))
    servers = ServerLayout(addresses, ranges, nodes[0].serve("clock", clock), timing_only=True)
    for worker in range(2):
        client = ServerClient(world.node(f"worker {worker}"), worker, servers)
        assert world.run(client.pull(cast(torch.Tensor, Ghost(NUMEL)), 0)).versions == [0, 0]
        world.run(client.push(cast(torch.Tensor, Ghost(NUMEL)), base=[0, 0]))
    assert [shard.version for shard in shards] == [1, 1]
    reply = shards[0].handle(Call("x", "pull", {}, ()))
    assert isinstance(reply, Reply)
    assert sum(tensor.nbytes for tensor in reply.tensors) == 4 * sizes[0]
    assert [shard.applied for shard in shards] == [2, 2]


# ---- checkpoints


def drive(fleet: Fleet, steps: Sequence[tuple[int, int]]) -> None:
    """Pushes, one after another, by a worker and of a seed."""
    for worker, seed in steps:
        fleet.run(fleet.clients[worker].push(vector(seed), weight=worker + 1, base=[0, 0]))


def restarted(saved: Fleet, policy: Policy) -> Fleet:
    """A fresh fleet that goes on from the state of `saved`."""
    again = Fleet(2, spec=SPECS[3], policy=policy, values=torch.zeros(NUMEL))
    clock = json.loads(json.dumps(saved.clock.state()))
    again.clock.restore(clock)
    for old, new in zip(saved.shards, again.shards, strict=True):
        state = old.state(keep=[clock["floor"]])
        new.restore(State(state.cloned().tensors, json.loads(json.dumps(state.plain))))
    for old_client, new_client in zip(saved.clients, again.clients, strict=True):
        new_client.restore(old_client.state())
    return again


@pytest.mark.parametrize("make", [lambda: Barrier(), lambda: Bounded(0), lambda: Bounded(3)])
def test_a_fleet_goes_on_where_it_was_saved(make: Any) -> None:
    """Saved while one update is staged, or one version pinned, and another worker lags."""
    first, second = [(0, 1), (1, 2), (1, 3)], [(0, 4), (0, 5), (1, 6)]
    whole = Fleet(2, spec=SPECS[3], policy=make())
    drive(whole, [*first, *second])

    saved = Fleet(2, spec=SPECS[3], policy=make())
    drive(saved, first)
    again = restarted(saved, make())
    asked = again.run(again.clients[0].ask())
    assert asked == saved.run(saved.clients[0].ask())
    pulled = [fleet.run(fleet.clients[0].pull(torch.empty(NUMEL), asked)).values for fleet in (saved, again)]
    assert torch.equal(*pulled)
    repeated = Call("worker 1", "staged", {"worker": 1, "incarnation": 0, "seq": 2}, ())
    again.clock.handle(repeated)
    drive(again, second)
    assert torch.equal(again.model(), whole.model())
    for resumed, straight in zip(again.shards, whole.shards, strict=True):
        assert resumed.updater.log == straight.updater.log
        assert resumed.staleness == straight.staleness
        assert resumed.version == straight.version


def test_a_shard_that_comes_back_alone_forgets_what_came_later_and_takes_nothing_twice() -> None:
    fleet = Fleet(1, spec=OptimizerSpec(lr=1.0), values=torch.zeros(NUMEL))
    client, one = fleet.clients[0], torch.ones(NUMEL)
    for _ in range(2):
        fleet.run(client.push(one, base=[0]))
    state = fleet.shards[0].state().cloned()
    for _ in range(1500):
        seen = fleet.run(client.push(one, base=[2]))
    assert seen == [1502]
    fresh = Shard(fleet.shards[0].node, torch.zeros(NUMEL), OptimizerSpec(lr=1.0), log=True)
    fresh.restore(State(state.tensors, json.loads(json.dumps(state.plain))))
    fresh.start_generation(1)
    fleet.world.services[fleet.servers.shards[0]] = fresh
    assert fresh.values.tolist() == [-2.0] * NUMEL
    assert fleet.run(client.pull(one.clone())).versions > seen, "a version went backwards"
    client.sender.seq = 1
    fleet.run(client.push(one, base=seen))
    assert fresh.applied == 2, "an update that the snapshot has was applied again"
    client.sender.seq = 1502
    again = fleet.run(client.push(one, base=seen))
    client.sender.seq = 1502
    assert fleet.run(client.push(one, base=seen)) == again
    assert fresh.updater.log == [(0, 0, 1), (0, 0, 2), (0, 0, 1503)]
    assert fresh.staleness == {**dict(state.plain["staleness"]), 0: 2}, (
        "staleness across epochs is counted from the return"
    )
    (status,) = fleet.run(client.status())
    assert (status["epoch"], status["version"]) == (1, 3)
    fresh.restore(fresh.state())
    fresh.start_generation(2)
    assert fleet.run(client.pull(one.clone())).versions > again


def test_the_clock_tells_a_shard_that_comes_back_who_is_gone() -> None:
    fleet = Fleet(2, workers=2)
    state = fleet.shards[1].state()
    fleet.clock.lost("worker 1")
    fleet.world.settle()
    fleet.shards[1].restore(state)
    fleet.shards[1].staging.sequences = SequenceTracker()
    fleet.run(fleet.clock.returned(fleet.servers.shards[1]))
    with raising(Evicted, "incarnation 0"):
        fleet.shards[1].staging.sequences.check(1, 0)
    fleet.shards[1].staging.sequences.check(0, 0)


def test_what_the_dead_have_staged_counts_after_a_restart_too() -> None:
    """Worker 1 has staged its update for the open group, and dies before worker 0 completes it."""
    saved = Fleet(2, spec=SPECS[3], policy=Barrier())
    drive(saved, [(0, 1), (1, 2), (1, 3)])
    again = restarted(saved, Barrier())
    for fleet in (saved, again):
        fleet.clock.lost("worker 1")
        drive(fleet, [(0, 4)])
    assert torch.equal(again.model(), saved.model())
    assert [shard.updater.log for shard in again.shards] == [shard.updater.log for shard in saved.shards]
    assert again.shards[0].version == 2


@pytest.mark.parametrize("voids", [(True, True), (True, False)])
def test_a_group_of_void_updates_alone_makes_no_step(voids):
    """Momentum 0.5, rate 0.1, from 1: a void member of a group with others counts as a zero in its mean."""
    bench = Bench("k-async:k=2", 2, [1.0], lambda w: w, lr=0.1, momentum=0.5)
    for worker in range(2):
        bench.push(worker, ordered=True)
    bench.close([(0, 1), (1, 1)])
    for worker, void in enumerate(voids):
        gradient = torch.tensor([0.0 if void else 1.0], dtype=torch.float64)
        how = {"seq": 2, "base": 1, "weight": 1.0, "ordered": True, "lr": None, "void": void}
        bench.call(worker, "push", gradient, **how)
    bench.close([(0, 2), (1, 2)])
    assert bench.shard.version == 2
    assert float(bench.values) == pytest.approx(0.9 if all(voids) else 0.9 - 0.1 * (0.5 * 1.0 + 0.5), rel=1e-12)
