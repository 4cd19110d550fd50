"""A checkpoint waits until the shards have applied what the clock has told them."""

from __future__ import annotations

import torch
from support.nodes import World

from dure.job.optimizer import OptimizerSpec
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.policies import Bounded
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout


def test_settled_means_applied():
    world = World()
    home = world.node("server 0")
    shard = Shard(world.node("server 1"), torch.zeros(2), OptimizerSpec(lr=1.0))
    address = world.node("server 1").serve("shard", shard)
    clock = ClockService(home, Bounded(3), [address], workers=[0])
    client = ServerClient(world.node("worker 0"), 0, ServerLayout([address], [[(0, 2)]], home.serve("clock", clock)))
    world.spawn(client.push(torch.ones(2)), "worker 0").when_done(lambda: None)
    world.run_ready()
    world.deliver(("worker 0", address))
    world.deliver(("worker 0", client.servers.clock))
    settled = world.spawn(clock.settled(), "the checkpoint")
    world.run_ready()
    assert (shard.version, settled.done) == (0, False), "the clock's word to the shard is still on its way"
    world.settle()
    assert (shard.version, settled.done) == (1, True)
