"""A coordinator and its replicas, in every order of messages: each portion counts once, on all shards alike.

Data, steps and weights are dyadic, so sums are exact in any order, and "the same" means the same bits.
"""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
import torch
from support.nodes import TestNode, World
from support.runs import resolved
from support.wording import raising

from dure.core.meter import Meter
from dure.core.node import Call
from dure.errors import DivergedError, Evicted, Refused
from dure.job.data.dataset import Data
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.job import Job
from dure.job.models.quadratic import Point, half_square
from dure.job.optimizer import OptimizerSpec
from dure.run.servers import build_server
from dure.run.workers import build_worker, work_through
from dure.sync import lifecycle
from dure.topology.parameter_server.coordinator import COORDINATOR

DIM, SAMPLES, STEPS = 5, 64, 4
CURVATURE = torch.tensor([0.25, 0.5, 1.0, 1.5, 0.75], dtype=torch.float64)
TARGETS = torch.randint(-32, 32, (SAMPLES, DIM), generator=torch.Generator().manual_seed(3)).double() / 8


def dyadic(portion: int) -> Job:
    """f(w) = mean of 1/2 (w - t_i)' diag(CURVATURE) (w - t_i), in portions of `portion` samples."""
    return Job(
        name="dyadic",
        model=partial(Point, DIM, torch.float64),
        loss=partial(half_square, CURVATURE),
        train=Data(torch.zeros(SAMPLES, 1, dtype=torch.float64), TARGETS),
        batch_size=portion,
        optimizer=OptimizerSpec(lr=0.5),
    )


def expected():
    """Gradient descent with rate 1/2, and the losses on the way."""
    place, losses = torch.zeros(DIM, dtype=torch.float64), []
    for _ in range(STEPS):
        losses.append(float((0.5 * (place - TARGETS) ** 2 * CURVATURE).sum(dim=1).mean()))
        place = place - 0.5 * ((place - TARGETS) * CURVATURE).mean(dim=0)
    return place, losses


async def descend(lead):
    """Gradient descent with rate 1/2."""
    await lead.order(("model", "w"))
    for _ in range(STEPS):
        loss, (slope,) = await lead.evaluate("w", "g", then=[("dot", "g", "g")])
        lead.kept.setdefault("losses", []).append(loss)
        assert slope > 0
        await lead.order(("axpy", "w", -0.5, "g"), ("publish", "w"))


class Node(TestNode):
    """Evaluates gradients, and says some things twice, as one does who has waited too long for an answer."""

    __test__ = False
    gradient_engine: GradientEngine
    repeats = 0.0

    def compute(self, work):
        if not isinstance(work, GradientWork):
            return super().compute(work)
        operation = self.promise("its gradient")
        value = self.gradient_engine.evaluate([work])[0]
        self.world.soon(lambda: operation.resolve(value))
        return operation

    def call(self, service, method, *tensors, **rest):
        operation = super().call(service, method, *tensors, **rest)
        if method == "ask" and self.world.chance.random() < self.repeats:
            again = super().call(service, method, *tensors, **rest)
            again.when_done(lambda: None)
        return operation

    def now(self):
        return float(self.world.delivered)


class Play(World):
    """Shards, a clock, a coordinator and workers; messages are delivered in an order drawn from `seed`.

    What worker 0 says is a long time on its way.
    """

    def __init__(self, seed, *, workers=3, shards=2, portion=4, push_every=2, mortal=0.0, repeats=0.0, lead=descend):
        super().__init__()
        self.chance = random.Random(seed)
        self.delivered = 0
        self.mortal = mortal
        job = dyadic(portion)
        strategy = f"lbfgs:push_every={push_every} ps:shards={shards}"
        self.setup, _ = resolved(job, strategy, on="virtual", workers=workers, steps=10**6)
        Node.gradient_engine, Node.repeats = GradientEngine(job), repeats
        hosted = [build_server(self.setup, Node(self, f"server {number}")) for number in range(shards)]
        for server in hosted:
            server.serve()
        self.shards = [server.shard for server in hosted]
        self.clock, self.coordinator = hosted[0].clock, hosted[0].coordinator
        self.leading = self.spawn(self.coordinator.lead(lead), "the coordinator")
        self.roles = {}
        self.ended = []
        self.deaths = 0
        for rank in range(workers):
            self.start(rank)

    def start(self, rank):
        node = Node(self, f"worker {rank}")
        worker = build_worker(self.setup, node, rank, Meter(node.name))
        self.roles[rank] = self.spawn(self.role(worker, rank), node.name)

    async def role(self, worker, rank):
        await lifecycle.join(worker, newcomer=bool(self.deaths))
        await work_through(self.setup.sync, worker)
        self.ended.append(rank)
        await worker.server.leave()

    def die(self, rank):
        """Of what it has said, some arrives and the rest is lost; then all hear of it, and it comes back."""
        name = f"worker {rank}"
        for (caller, _), messages in self.channels.items():
            if caller == name:
                for _ in range(self.chance.randrange(len(messages) + 1)):
                    messages.popleft()()
                messages.clear()
        self.roles[rank].kill()
        self.deaths += 1
        self.clock.lost(name)
        self.coordinator.lost(name)
        self.start(rank)

    def play(self):
        self.run_ready()
        while not self.coordinator._final and (choices := self.choices()):
            self.delivered += 1
            if self.chance.random() < self.mortal:
                self.die(self.chance.choice(sorted(self.roles)))
            else:
                quick = [choice for choice in choices if choice[0] != "worker 0"]
                slow = self.chance.random() < 0.2 or not quick
                self.deliver(self.chance.choice(choices if slow else quick))
        self.settle()
        return self


def check(play):
    """The result, the losses, and that nothing is left over."""
    place, losses = expected()
    assert torch.cat([shard.values for shard in play.shards]).equal(place)
    assert play.coordinator.kept["losses"] == losses
    assert all(shard.version == STEPS for shard in play.shards)
    assert all(not shard.vectors._staged for shard in play.shards), "a sum was neither added nor dropped"
    assert set(play.ended) == set(play.roles), "somebody was not sent home"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(("portion", "push_every"), [(2, 8), (4, 1), (8, 3), (64, 1)])
def test_the_gradient_does_not_depend_on_who_does_what_when(seed, workers, portion, push_every):
    """For every number of portions, of replicas, of portions per push, and of shards."""
    check(Play(seed, workers=workers, shards=1 + seed % 4, portion=portion, push_every=push_every).play())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(20))
def test_nor_on_who_dies_or_says_things_twice(seed):
    play = Play(seed, workers=4, portion=2, push_every=4, mortal=0.02, repeats=0.2).play()
    assert play.deaths > 0
    check(play)


def test_portions_are_done_more_than_once_here():
    """So that the tests above are about something."""
    spent = [Play(seed, workers=5, portion=4).play().coordinator.spent for seed in range(4)]
    assert min(spent) >= STEPS * SAMPLES // 4
    assert max(spent) > STEPS * SAMPLES // 4


@pytest.mark.long
@pytest.mark.parametrize("fault", ["counts twice", "counts late", "forgets the dead"])
def test_a_fault_is_noticed(fault, monkeypatch):
    """Negative controls: sums that are counted twice, sums for an earlier point, portions that nobody does."""
    from dure.topology.parameter_server.coordinator import Coordinator, Portions

    finish, take = Portions.finish, Coordinator._take
    if fault == "counts twice":
        monkeypatch.setattr(Portions, "finish", lambda self, *given: finish(self, *given) or self.left > 0)
    elif fault == "counts late":
        monkeypatch.setattr(
            Coordinator,
            "_take",
            lambda self, worker, life, evaluation, **rest: take(self, worker, life, self.evaluations, **rest),
        )
    else:
        monkeypatch.setattr(Portions, "drop", lambda self, worker: self._given.pop(worker, None))
        monkeypatch.setattr(Portions, "_backup", lambda self: None)
    caught = 0
    many = {"workers": 8, "portion": 8, "push_every": 1}
    few = {"workers": 4, "portion": 2, "push_every": 4, "mortal": 0.02, "repeats": 0.2}
    for seed in range(10):
        try:
            check(Play(seed, **many if fault == "counts late" else few).play())
        except (AssertionError, KeyError):
            caught += 1
    assert caught >= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_is_no_number_is_infinite_and_the_next_evaluation_is_sound(seed):
    async def lead(lead):
        await lead.order(("model", "w"))
        first, _ = await lead.evaluate("w", "g")
        await lead.order(("combine", "x", 1e200, "g", 0.0, "w"))
        wild, none = await lead.evaluate("x", "g")
        again, _ = await lead.evaluate("w", "g")
        lead.kept["seen"] = [first, wild, none, again]

    play = Play(seed, lead=lead).play()
    first, wild, none, again = play.coordinator.kept["seen"]
    assert (wild, none) == (float("inf"), [])
    assert first == again == expected()[1][0]


def test_an_error_of_the_method_reaches_every_worker():
    async def lead(lead):
        await lead.order(("model", "w"))
        await lead.evaluate("w", "g")
        raise DivergedError("it goes nowhere.")

    play = Play(0, lead=lead)
    for role in play.roles.values():
        role.when_done(lambda: None)
    play.play()
    for role in play.roles.values():
        with raising(DivergedError, "nowhere"):
            role.result()


def test_what_it_counts_and_whom_it_fences_off_survive_a_restart():
    options = {"workers": 4, "portion": 2, "push_every": 4}
    play = Play(0, **options, mortal=0.02).play()
    again = Play(1, **options).play().coordinator
    state = json.loads(json.dumps(play.coordinator.state()))
    again.restore(state)
    assert json.loads(json.dumps(again.state())) == state
    assert again.spent == play.coordinator.spent
    worker, incarnation = state["fenced"][0]
    fields = {"worker": worker, "incarnation": incarnation - 1, "due": False, "report": None}
    with raising(Evicted, "first"):
        again.handle(Call(f"worker {worker}", "ask", fields, ()))


def test_it_answers_nothing_else():
    play = Play(0).play()
    with raising(Refused, "tell"):
        play.services[COORDINATOR].handle(type("Call", (), {"method": "tell"}))
