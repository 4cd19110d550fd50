"""A vote's verdict in place of the model: the same run as with a pulled model, and a message each way."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes import World
from support.runs import Cycle, local, resolved, virtual
from torch import nn

from dure.codec.coder import SliceLayout
from dure.codec.it_sign import ITSign
from dure.codec.sign import Sign
from dure.data.dataset import Data
from dure.job import Job
from dure.optim import OptimizerSpec
from dure.runtime.base import Address, Reply
from dure.runtime.cluster import Cluster, Event, Machines
from dure.runtime.compute import Constant
from dure.sync.clock import Barrier
from dure.topology.clocked_shard import clocked_at, serve_clock
from dure.topology.parameter_server import ClockService, ServerClient, Servers, Shard
from dure.topology.sharding import gather
from dure.virtual_run import Segment, VirtualRun, Watch

NUMEL = 37
DIGITS = 4810
MESSAGE = math.ceil(DIGITS / 8)
RULES = {
    "sgd": OptimizerSpec("sgd", lr=0.03, weight_decay=0.01),
    "momentum": OptimizerSpec("momentum", lr=0.01, momentum=0.9, nesterov=True),
    "adam": OptimizerSpec("adam", lr=0.02, weight_decay=0.1),
}
CUTS = {1: [[(0, 37)]], 2: [[(0, 9), (20, 37)], [(9, 20)]], 3: [[(0, 12)], [(12, 24)], [(24, 37)]]}


# ---- the run is that of signSGD with majority vote, written down independently


class Valley(nn.Module):
    """f(w) = 1/2 sum of a (w - b)^2, where a sample is (a, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.linspace(-1, 1, NUMEL))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * (inputs[:, 0] * (self.place - inputs[:, 1]) ** 2).sum(dim=1)


class OneEach:
    """Worker k has the k-th sample."""

    def samplers(self, targets: torch.Tensor, batch_sizes: Any, *, seed: int) -> list[Any]:
        return [Cycle(torch.tensor([k]), 1) for k in range(len(batch_sizes))]


def mean_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def valleys(workers: int, rule: OptimizerSpec) -> Job:
    inputs = torch.randn(workers, 2, NUMEL, generator=torch.Generator().manual_seed(5)).abs()
    train = Data(inputs, torch.zeros(workers))
    return Job(Valley, mean_of, train, name="valleys", batch_size=1, optimizer=rule, split=OneEach())


def majority(job: Job, rule: OptimizerSpec, steps: int) -> torch.Tensor:
    """Bernstein et al., algorithm 1, with PyTorch's optimizers."""
    model = Valley()
    if rule.name == "adam":
        optimizer: Any = torch.optim.Adam(model.parameters(), rule.lr, weight_decay=rule.weight_decay)
    else:
        given = {"momentum": rule.momentum, "nesterov": rule.nesterov, "weight_decay": rule.weight_decay}
        optimizer = torch.optim.SGD(model.parameters(), rule.lr, **given)
    for _ in range(steps):
        total = torch.zeros(NUMEL)
        for sample in job.train.inputs:
            (gradient,) = torch.autograd.grad(model(sample[None]).mean(), model.place)
            total += torch.where(gradient >= 0, 1.0, -1.0)
        model.place.grad = torch.where(total >= 0, 1.0, -1.0)
        optimizer.step()
    return model.place.detach()


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_run_is_signsgd_with_majority_vote_bit_for_bit(rule: str, shards: int) -> None:
    job = valleys(4, RULES[rule])
    run = virtual(job, f"bsp ps:shards={shards} sign", workers=4, steps=12)
    torch.testing.assert_close(run.params, majority(job, RULES[rule], 12), rtol=0, atol=0)


# ---- bytes, both ways


def test_as_many_bytes_come_back_as_were_pushed() -> None:
    counted = virtual("digits-mlp", "bsp ps sign", workers=3, steps=8).summary
    assert counted["bytes_sent"] == counted["bytes_received"] == 3 * 8 * MESSAGE


def test_the_runtimes_agree() -> None:
    real = local("digits-mlp", "bsp ps:shards=2 sign", workers=2, steps=6)
    planned = virtual("digits-mlp", "bsp ps:shards=2 sign", workers=2, steps=6)
    assert real.summary["params_sha256"] == planned.summary["params_sha256"]
    pushed = planned.summary["bytes_sent"]
    assert real.summary["bytes_sent"] == planned.summary["bytes_received"] == pushed
    assert pushed <= real.summary["bytes_received"] <= pushed + 4 * DIGITS  # a model that was graded


# ---- who comes, goes and returns


def test_a_newcomer_pulls_model_and_velocity_once() -> None:
    cluster = Cluster(
        machines=(Machines(count=3, compute=Constant(seconds=0.01)),),
        events=(Event(at=0.055, kind="crash", worker=1), Event(at=0.155, kind="join", worker=1)),
    )
    task, found = resolved(
        "digits-mlp",
        "bsp ps:shards=2 sign",
        cluster,
        on="virtual",
        steps=30,
        optimizer="momentum:lr=0.001,momentum=0.9",
        eval_every=1000,
    )
    assert found is not None
    segment = Segment(VirtualRun(task, found, Watch()), None)
    segment.run()
    ranges = task.ranges
    for worker in segment.workers.values():
        for shard, part in zip(segment.shards, ranges, strict=True):
            assert isinstance(shard, Shard)
            torch.testing.assert_close(gather(worker.params, part), shard.values, rtol=0, atol=0)
    received = segment.outcome().totals.per_worker["worker 1"]["bytes_received"]
    twice = 2 * 4 * DIGITS  # parameters and velocity
    assert twice < received < twice + 30 * (MESSAGE + 2)


@pytest.mark.parametrize("strategy", ["bsp ps:shards=2 sign", "bsp ps it-sign:start=3"])
def test_a_run_resumed_from_a_checkpoint_is_the_run(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 3, "steps": 12, "optimizer": "adam:lr=0.001"}
    whole = virtual("digits-mlp", strategy, **options)
    options["out"] = tmp_path
    task, cluster = resolved("digits-mlp", strategy, on="virtual", eval_every=1000, checkpoint_every=5, **options)
    assert cluster is not None
    states: list[Any] = []
    watch = Watch(checkpoint=lambda step, state: states.append(state))
    cut = VirtualRun(task, cluster, watch).run()
    resumed = VirtualRun(task, cluster, Watch()).run(states[0])
    assert cut.params is not None
    assert resumed.params is not None
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=0)
    torch.testing.assert_close(resumed.params, whole.params, rtol=0, atol=0)


# ---- a server and its followers, call by call


class Followed:
    """A world with shards on `cut`, and workers that follow them."""

    def __init__(self, cut: int, rule: OptimizerSpec, codec: Any, workers: int = 3) -> None:
        self.world, self.ranges = World(), CUTS[cut]
        self.start = torch.linspace(-1, 1, NUMEL)
        policy = Barrier()
        layouts = [SliceLayout.plain(sum(b - a for a, b in part)) for part in self.ranges]
        self.shards, places = [], []
        for number, (part, layout) in enumerate(zip(self.ranges, layouts, strict=True)):
            node = self.world.node(f"server {number}")
            values = gather(self.start, part)
            shard = Shard(node, values, rule, ranges=part, coder=codec.coder(layout), vote=codec.vote())
            places.append(node.serve("shard", shard))
            self.shards.append(shard)
        clock_node = self.world.node("server 0")
        clock = ClockService(clock_node, policy, places, workers=range(workers))
        serve_clock(clock_node, clock, self.shards[0])
        servers = Servers(
            places,
            self.ranges,
            Address("server 0", "clock"),
            codec=codec,
            layouts=layouts,
            clocked=clocked_at(places, policy),
        )
        self.clients = [ServerClient(self.world.node(f"worker {rank}"), rank, servers) for rank in range(workers)]
        for client in self.clients:
            client.follow(self.start, rule)
        self.random = torch.Generator().manual_seed(3)

    def step(self, lr: float | None = None) -> list[torch.Tensor]:
        """One update of everybody; what each has then."""
        rooms = [torch.full((NUMEL,), math.nan) for _ in self.clients]
        strands = [
            self.world.spawn(client.exchange(torch.randn(NUMEL, generator=self.random), room, lr=lr), "exchange")
            for client, room in zip(self.clients, rooms, strict=True)
        ]
        self.world.settle()
        for strand in strands:
            strand.result()
        return rooms

    def model(self) -> torch.Tensor:
        """What the shards hold."""
        whole = torch.full((NUMEL,), math.nan)
        for shard, part in zip(self.shards, self.ranges, strict=True):
            at = 0
            for start, stop in part:
                whole[start:stop] = shard.values[at : at + stop - start]
                at += stop - start
        return whole


@pytest.mark.parametrize("codec", [Sign(), Sign(zeros="random"), ITSign(start=2), ITSign("coordinate", start=2)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_worker_has_the_servers_model_while_the_rate_decays(rule: str, cut: int, codec: Any) -> None:
    fleet = Followed(cut, RULES[rule], codec)
    for t in range(8):
        for room in fleet.step(lr=0.05 / (1 + t)):
            torch.testing.assert_close(room, fleet.model(), rtol=0, atol=0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_worker_that_missed_a_version_pulls_the_model_and_goes_on(rule: str, cut: int) -> None:
    fleet = Followed(cut, RULES[rule], Sign())
    for t in range(9):
        if t in (3, 6):
            for follower in fleet.clients[1].followers:
                follower.version = None if t == 3 else 1
                follower.values.fill_(math.nan)
        for room in fleet.step():
            torch.testing.assert_close(room, fleet.model(), rtol=0, atol=0)


def test_a_worker_on_a_version_before_the_newest_gets_no_optimizer_state() -> None:
    fleet = Followed(1, RULES["adam"], Sign())
    fleet.step()
    vectors = [torch.zeros(NUMEL) for _ in range(2)]
    ask = partial(fleet.world.node("worker 9").call, Address("server 0", "shard"), "optimizer")

    async def steps(version: int) -> Reply:
        return await ask(into=vectors, at_most=True, version=version)

    assert fleet.world.run(steps(1)).fields["steps"] == 1
    assert fleet.world.run(steps(0)).fields["steps"] is None
