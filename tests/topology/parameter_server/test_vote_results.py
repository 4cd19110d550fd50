"""A vote's verdict in place of the model: the same run as with a pulled model, and a message each way."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nodes import World
from support.runs import Cycle, local, resolved, virtual
from torch import nn

from dure.codec.coder import SliceLayout
from dure.codec.sign import ITSign, Sign
from dure.core.node import Address, Reply
from dure.core.vectors import gather
from dure.errors import Superseded
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Event, Machines
from dure.runtime.virtual.compute import Constant
from dure.topology.parameter_server.admission import Policy
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.policies import Barrier, FirstOf
from dure.topology.parameter_server.shard import Shard, clocked_at, serve_clock
from dure.topology.parameter_server.topology import ServerLayout

NUMEL = 37
DIGITS = 4810
MESSAGE = math.ceil(DIGITS / 8)
RULES = {
    "sgd": OptimizerSpec("sgd", lr=0.03, weight_decay=0.01),
    "momentum": OptimizerSpec("momentum", lr=0.01, momentum=0.9, nesterov=True),
    "adam": OptimizerSpec("adam", lr=0.02, weight_decay=0.1),
    "adamw": OptimizerSpec("adamw", lr=0.02, weight_decay=0.1),
    "adagrad": OptimizerSpec("adagrad", lr=0.05, weight_decay=0.1, eps=1e-10),
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


def of_pytorch(groups: list[dict[str, Any]], rule: OptimizerSpec) -> torch.optim.Optimizer:
    """PyTorch's optimizer of that rule."""
    decay = {"lr": rule.lr, "weight_decay": rule.weight_decay}
    if rule.name in ("sgd", "momentum"):
        return torch.optim.SGD(groups, momentum=rule.momentum, nesterov=rule.nesterov, **decay)
    adaptive = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "adagrad": torch.optim.Adagrad}
    return adaptive[rule.name](groups, eps=rule.eps, **decay)


def majority(job: Job, rule: OptimizerSpec, steps: int) -> torch.Tensor:
    """Bernstein et al., algorithm 1, with PyTorch's optimizers: groups and rates by the job's functions."""
    model = job.model()
    differing = job.groups or (lambda name, parameter: {})
    groups = [{"params": [each], **differing(name, each)} for name, each in model.named_parameters()]
    optimizer = of_pytorch(groups, rule)
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1.0 if job.schedule is None else job.schedule(step))
        total = torch.zeros(NUMEL)
        for sample in job.train.inputs:
            gradients = torch.autograd.grad(model(sample[None]).mean(), list(model.parameters()))
            total += torch.where(torch.cat(gradients) >= 0, 1.0, -1.0)
        decided = torch.where(total >= 0, 1.0, -1.0)
        parameters = list(model.parameters())
        for parameter, part in zip(parameters, decided.split([each.numel() for each in parameters]), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
    return torch.cat([each.detach() for each in model.parameters()])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_the_run_is_signsgd_with_majority_vote_bit_for_bit(rule: str, shards: int) -> None:
    job = valleys(4, RULES[rule])
    run = virtual(job, f"bsp ps:shards={shards} sign", workers=4, steps=12)
    torch.testing.assert_close(run.params, majority(job, RULES[rule], 12), rtol=0, atol=0)


class TwoParts(Valley):
    """The valley, whose place is two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(part.detach().clone()) for part in self.place.split([14, 23]))
        del self.place

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * (inputs[:, 0] * (torch.cat([self.left, self.right]) - inputs[:, 1]) ** 2).sum(dim=1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("strategy", ["bsp ps sign", "bsp ps:shards=2 sign"])
@pytest.mark.parametrize("rule", RULES)
def test_groups_and_a_schedule_are_those_of_pytorch_bit_for_bit(rule: str, strategy: str) -> None:
    """The boundary of the two groups lies inside a shard; each step has a rate of its own."""
    groups = {"left": {"lr": 0.007, "weight_decay": 0.0}, "right": {}}
    job = replace(
        valleys(4, RULES[rule]),
        model=TwoParts,
        groups=lambda name, parameter: groups[name],
        schedule=lambda step: 0.9**step,
    )
    run = virtual(job, strategy, workers=4, steps=12)
    torch.testing.assert_close(run.params, majority(job, RULES[rule], 12), rtol=0, atol=0)


# ---- bytes, both ways


def test_as_many_bytes_come_back_as_were_pushed() -> None:
    counted = virtual("digits-mlp", "bsp ps sign", workers=3, steps=8).summary
    assert counted["bytes_sent"] == counted["bytes_received"] == 3 * 8 * MESSAGE


@pytest.mark.long
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
    setup, found = resolved(
        "digits-mlp",
        "bsp ps:shards=2 sign",
        cluster,
        on="virtual",
        steps=30,
        optimizer="momentum:lr=0.001,momentum=0.9",
        eval_every=1000,
    )
    assert found is not None
    segment = VirtualSegment(VirtualRun(setup, found, Callbacks()), None)
    segment.run()
    ranges = setup.topology.ranges
    for worker in segment.workers.values():
        for shard, part in zip(segment.shards, ranges, strict=True):
            assert isinstance(shard, Shard)
            torch.testing.assert_close(gather(worker.params, part), shard.values, rtol=0, atol=0)
    received = segment.outcome().totals.per_worker["worker 1"]["bytes_received"]
    twice = 2 * 4 * DIGITS  # parameters and velocity
    assert twice < received < twice + 30 * (MESSAGE + 2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp ps:shards=2 sign", "bsp ps it-sign:start=3"])
def test_a_run_resumed_from_a_checkpoint_is_the_run(strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 3, "steps": 12, "optimizer": "adam:lr=0.001"}
    whole = virtual("digits-mlp", strategy, **options)
    options["out"] = tmp_path
    setup, cluster = resolved("digits-mlp", strategy, on="virtual", eval_every=1000, checkpoint_every=5, **options)
    assert cluster is not None
    states: list[Any] = []
    watch = Callbacks(checkpoint=lambda step, state: states.append(state))
    cut = VirtualRun(setup, cluster, watch).run()
    resumed = VirtualRun(setup, cluster, Callbacks()).run(states[0])
    assert cut.params is not None
    assert resumed.params is not None
    torch.testing.assert_close(cut.params, whole.params, rtol=0, atol=0)
    torch.testing.assert_close(resumed.params, whole.params, rtol=0, atol=0)


# ---- a server and its followers, call by call


class Followed:
    """A world with shards on `cut`, and workers that follow them."""

    def __init__(
        self, cut: int, rule: OptimizerSpec, codec: Any, workers: int = 3, policy: Policy | None = None
    ) -> None:
        self.world, self.ranges = World(), CUTS[cut]
        self.start = torch.linspace(-1, 1, NUMEL)
        policy = policy or Barrier()
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
        servers = ServerLayout(
            places,
            self.ranges,
            Address("server 0", "clock"),
            codec=codec,
            layouts=layouts,
            clocked=clocked_at(places, policy),
            may_refuse=policy.may_refuse,
        )
        self.clients = [ServerClient(self.world.node(f"worker {rank}"), rank, servers) for rank in range(workers)]
        for client in self.clients:
            client.follow(self.start, rule)
        self.random = torch.Generator().manual_seed(3)

    def step(self, lr: float | None = None, skipping: Collection[int] = ()) -> list[torch.Tensor]:
        """One update of everybody, without a gradient of the workers `skipping`; what each has then."""
        rooms = [torch.full((NUMEL,), math.nan) for _ in self.clients]
        tasks = []
        for client, room in zip(self.clients, rooms, strict=True):
            void = client.sender.worker in skipping
            update = torch.zeros(NUMEL) if void else torch.randn(NUMEL, generator=self.random)
            tasks.append(self.world.spawn(client.push_pull(update, room, lr=lr, void=void), "exchange"))
        self.world.settle()
        for task in tasks:
            task.result()
        return rooms

    def go_on(self, client: ServerClient) -> torch.Tensor:
        """The parameters of a worker that asks and pulls, as after `push`."""
        room = torch.full((NUMEL,), math.nan)
        if client.servers.clocked is not None:
            self.world.run(client.next_version(room))
        else:
            self.world.run(client.pull(room, self.world.run(client.ask()), to_work=True))
        return room

    def model(self) -> torch.Tensor:
        """The values of all shards."""
        whole = torch.full((NUMEL,), math.nan)
        for shard, part in zip(self.shards, self.ranges, strict=True):
            at = 0
            for start, stop in part:
                whole[start:stop] = shard.values[at : at + stop - start]
                at += stop - start
        return whole


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", [Sign(), Sign(zeros="random"), ITSign(start=2), ITSign("coordinate", start=2)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_every_worker_has_the_servers_model_while_the_rate_decays(rule: str, cut: int, codec: Any) -> None:
    fleet = Followed(cut, RULES[rule], codec)
    for t in range(8):
        for room in fleet.step(lr=0.05 / (1 + t)):
            torch.testing.assert_close(room, fleet.model(), rtol=0, atol=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_worker_that_missed_a_version_pulls_the_model_and_goes_on(rule: str, cut: int) -> None:
    fleet = Followed(cut, RULES[rule], Sign())
    for t in range(9):
        if t in (3, 6):
            for follower in fleet.clients[1].mirrors:
                follower.version = None if t == 3 else 1
                follower.values.fill_(math.nan)
        for room in fleet.step():
            torch.testing.assert_close(room, fleet.model(), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codec", [Sign(), ITSign(start=1)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_a_step_that_all_skip_changes_neither_model_nor_state(rule: str, cut: int, codec: Any) -> None:
    fleet, without = Followed(cut, RULES[rule], codec), Followed(cut, RULES[rule], codec)
    for t in range(9):
        skipping = range(3) if t in (0, 3, 4) else ()
        for room in fleet.step(lr=0.01, skipping=skipping):
            torch.testing.assert_close(room, fleet.model(), rtol=0, atol=0)
        if not skipping:
            without.step(lr=0.01)
        torch.testing.assert_close(fleet.model(), without.model(), rtol=0, atol=0)


@pytest.mark.parametrize("codec", [Sign(), ITSign(start=1)])
@pytest.mark.parametrize("cut", CUTS)
def test_a_worker_that_skips_a_step_has_no_vote_in_it(cut: int, codec: Any) -> None:
    """Zeros are positive signs in Sign's messages: two that skip would outvote the third."""
    fleet = Followed(cut, OptimizerSpec("sgd", lr=0.5), codec)
    update = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    for room in fleet.step(lr=0.5, skipping=(0, 2)):
        torch.testing.assert_close(room, fleet.start - 0.5 * update.sign(), rtol=0, atol=0)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", [Sign(), ITSign(start=1)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rule", RULES)
def test_a_worker_whose_update_is_refused_goes_on_from_the_servers_model(rule: str, cut: int, codec: Any) -> None:
    """Two of three make each version; the third is late for one, or for several in a row."""
    fleet = Followed(cut, RULES[rule], codec, policy=FirstOf(lambda workers: 2, distinct=True))
    stands = dict.fromkeys(range(3), 0)
    for client in fleet.clients:
        fleet.go_on(client)
    for version, late in enumerate((2, 2, 0, 1, 1, 1, 0, 2), start=1):
        for client in fleet.clients:
            if client.sender.worker != late:
                update = torch.randn(NUMEL, generator=fleet.random)
                if stands[client.sender.worker] < version - 1:
                    with pytest.raises(Superseded):
                        fleet.world.run(client.push(update, base=[stands[client.sender.worker]] * cut))
                    torch.testing.assert_close(fleet.go_on(client), fleet.model(), rtol=0, atol=0)
                fleet.world.run(client.push(update, base=[version - 1] * cut))
        for client in fleet.clients:
            if client.sender.worker != late:
                torch.testing.assert_close(fleet.go_on(client), fleet.model(), rtol=0, atol=0)
                stands[client.sender.worker] = version


def test_a_verdict_is_as_it_was_while_a_reader_has_it() -> None:
    fleet = Followed(1, RULES["sgd"], Sign())
    fleet.step()
    (shard,) = fleet.shards
    verdict = shard.updater.vote_results.lead(0, 1)[1][0]
    before = verdict.clone()
    for _ in range(5):
        fleet.step()
    assert verdict.equal(before)


def test_a_worker_on_a_version_before_the_newest_gets_no_optimizer_state() -> None:
    fleet = Followed(1, RULES["adam"], Sign())
    fleet.step()
    vectors = [torch.zeros(NUMEL) for _ in range(2)]
    ask = partial(fleet.world.node("worker 9").call, Address("server 0", "shard"), "optimizer")

    async def steps(version: int) -> Reply:
        return await ask(into=vectors, at_most=True, version=version)

    assert fleet.world.run(steps(1)).fields["steps"] == 1
    assert fleet.world.run(steps(0)).fields["steps"] is None
