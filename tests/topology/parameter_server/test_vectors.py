"""Vectors on shards: each command does what it says, and what somebody looks at does not change under their eyes."""

from __future__ import annotations

import pytest
import torch
from support.nodes import World
from support.wording import raising

from dure.core.node import Address
from dure.core.vectors import pieces
from dure.errors import Evicted, Refused
from dure.job.optimizer import OptimizerSpec
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout, split

NUMEL = 11
START = torch.arange(NUMEL, dtype=torch.float64) - 4.0


class Bench:
    """Shards that hold START, a client, and what sends programs."""

    def __init__(self, shards=3):
        self.world = World()
        self.ranges = split([], NUMEL, shards)
        nodes = [self.world.node(f"server {number}") for number in range(shards)]
        self.shards = [
            Shard(node, torch.cat([START[:0], *pieces(START, ranges)]), OptimizerSpec(name="assign"), ranges=ranges)
            for node, ranges in zip(nodes, self.ranges, strict=True)
        ]
        self.addresses = [node.serve("shard", shard) for node, shard in zip(nodes, self.shards, strict=True)]
        self.node = self.world.node("worker 0")
        self.client = ServerClient(self.node, 0, ServerLayout(self.addresses, self.ranges))
        self.vectors = self.client

    def order(self, *commands):
        async def ask():
            calls = [self.node.call(address, "order", commands=[*map(list, commands)]) for address in self.addresses]
            return [(await call).fields["dots"] for call in calls]

        parts = self.world.run(ask())
        return [sum(part) for part in zip(*parts, strict=True)]

    def stage(self, vector):
        return self.world.run(self.vectors.stage(vector))

    def __getitem__(self, name):
        values = torch.empty(NUMEL, dtype=torch.float64)
        self.world.run(self.vectors.fetch(values, name))
        return values


@pytest.fixture(params=[1, 3, 13])
def bench(request):
    """Thirteen shards for eleven numbers: two of them hold nothing."""
    bench = Bench(request.param)
    bench.order(
        ("model", "w"), ("zero", "z"), ("combine", "x", 3.0, "w", 1.0, "z"), ("combine", "y", 1.0, "w", -2.0, "x")
    )
    return bench


W, X, Y = START, 3 * START, -5 * START


def test_commands(bench):
    assert bench["w"].equal(W)
    assert bench["z"].equal(torch.zeros_like(W))
    assert bench["x"].equal(X)
    assert bench["y"].equal(Y)
    assert bench.order(("dot", "w", "x"), ("axpy", "x", 0.5, "w"), ("dot", "w", "x")) == [
        float(W @ X),
        float(W @ (X + 0.5 * W)),
    ]
    bench.order(("scale", "y", -0.25), ("multiply", "v", "y", "w"), ("free", "z"))
    assert bench["y"].equal(-0.25 * Y)
    assert bench["v"].equal(-0.25 * Y * W)
    with raising(Refused, "z"):
        bench.order(("dot", "z", "z"))


def test_a_command_may_write_to_what_it_reads(bench):
    bench.order(("combine", "x", 2.0, "w", -1.0, "x"))
    assert bench["x"].equal(2 * W - X)
    bench.order(("combine", "x", 1.0, "x", 1.0, "x"), ("axpy", "x", 1.0, "x"), ("multiply", "x", "x", "x"))
    assert bench["x"].equal((4 * (2 * W - X)) ** 2)


def test_copies_part_when_one_of_them_changes(bench):
    bench.order(("copy", "c", "x"), ("copy", "d", "x"), ("scale", "x", 2.0), ("axpy", "d", 1.0, "w"))
    assert bench["x"].equal(2 * X)
    assert bench["c"].equal(X)
    assert bench["d"].equal(X + W)
    bench.order(("scale", "w", 0.0))
    assert torch.cat([shard.values for shard in bench.shards]).equal(START), "the model changed with its copy"


def test_publish_makes_a_version(bench):
    bench.order(("publish", "x"), ("scale", "x", 2.0), ("copy", "w", "x"), ("publish", "w"), ("scale", "w", 0.0))
    assert torch.cat([shard.values for shard in bench.shards]).equal(2 * X)
    assert {(shard.version, shard.applied) for shard in bench.shards} == {(2, 2)}
    pulled = bench.world.run(bench.client.pull(torch.empty_like(START)))
    assert pulled.values.equal(2 * X)
    assert set(pulled.versions) == {2}


def test_what_was_staged_is_added_or_dropped_once(bench):
    first, second, third = bench.stage(X), bench.stage(Y), bench.stage(X)
    assert (first, second, third) == (1, 2, 3)
    bench.order(("accumulate", "z", 0, 0, first), ("accumulate", "z", 0, 0, second), ("drop", 0, 0, third))
    assert bench["z"].equal(X + Y)
    assert all(not shard.vectors._staged for shard in bench.shards)
    with raising(Refused, "worker 0"):
        bench.order(("accumulate", "z", 0, 0, third))


def test_lives_of_a_worker_are_told_apart(bench):
    """Its second life stages something before the shards hear of the first one's end."""
    bench.stage(X)
    bench.client.sender.incarnation, bench.client.sender.seq = 1, 0
    bench.stage(Y)
    bench.order(("accumulate", "z", 0, 0, 1), ("fence", 0, 1), ("accumulate", "z", 0, 1, 1))
    assert bench["z"].equal(X + Y)
    bench.order(("fence", 0, 0))  # said late: of a life before
    bench.client.sender.incarnation = 0
    with raising(Evicted, "incarnation 0"):
        bench.stage(X)


def test_what_a_past_life_has_staged_is_forgotten(bench):
    bench.stage(X)
    bench.order(("fence", 0, 1))
    assert all(not shard.vectors._staged for shard in bench.shards)


def test_what_was_used_or_forgotten_leaves_its_memory_to_others(bench):
    def use() -> int:
        first, second = bench.stage(X), bench.stage(Y)
        bench.order(("accumulate", "z", 0, 0, first), ("drop", 0, 0, second))
        return sum(shard.versions.pool.made for shard in bench.shards)

    made = use()
    assert [use() for _ in range(3)] == [made] * 3


def test_not_a_number_is_refused(bench):
    spoiled = X.clone()
    spoiled[5] = torch.nan
    with raising(Refused, "NaN"):
        bench.stage(spoiled)


def test_who_fetches_gets_what_was_there_when_asked():
    """A reply that is still on its way is not written to."""
    bench = Bench(1)
    bench.order(("model", "w"), ("combine", "x", 1.0, "w", 0.0, "w"))
    shard = bench.shards[0]
    reply = shard.vectors.fetch(type("Call", (), {"fields": {"name": "x"}}))
    bench.order(("scale", "x", 0.0), ("zero", "x"), ("free", "x"))
    assert torch.cat(list(reply.tensors)).equal(W)
    made = shard.versions.pool.made
    reply.release()
    bench.order(("zero", "a"), ("zero", "b"))
    assert shard.versions.pool.made == made, "what was released is not used again"


def test_an_unknown_command_is_refused(bench):
    with raising(Refused, "invert"):
        bench.order(("invert", "x"))


def test_dot_products_are_summed_in_double_precision():
    values = torch.full((100_003,), 1.1, dtype=torch.float32)
    world = World()
    shard = Shard(world.node("server 0"), values, OptimizerSpec(name="assign"))
    address = shard.node.serve("shard", shard)

    async def ask():
        commands = [["model", "w"], ["dot", "w", "w"]]
        return (await world.node("worker 0").call(address, "order", commands=commands)).fields["dots"]

    assert world.run(ask()) == [pytest.approx(float(values.double() @ values.double()), rel=1e-12)]


def test_they_survive_a_restart(bench):
    bench.order(("copy", "c", "x"), ("fence", 0, 1))
    for shard, ranges in zip(bench.shards, bench.ranges, strict=True):
        state = shard.state()
        pointers = [tensor.data_ptr() for tensor in state.tensors.values() if tensor.numel()]
        assert len(pointers) == len(set(pointers)), "two tensors of a checkpoint share memory"
        fresh = Shard(shard.node, torch.zeros_like(shard.values), OptimizerSpec(name="assign"), ranges=ranges)
        fresh.restore(state.cloned())
        bench.world.services[Address(shard.node.name, "shard")] = fresh
    assert bench["c"].equal(X)
    bench.order(("scale", "c", 2.0))
    assert bench["x"].equal(X)
    assert bench["c"].equal(2 * X)
    with pytest.raises(Evicted):
        bench.stage(X)
