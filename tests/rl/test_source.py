"""The target network of a learner, and the batches that its replays give it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.nodes import World
from torch import nn

from dure.core.node import Call
from dure.job.replica import Replica
from dure.rl.messages import KEYS, VERSION, InsertionTensors, SampleTensors, with_version
from dure.rl.replay import Replay
from dure.rl.services import ModelService, RateLimiter, ReplayService
from dure.rl.source import TARGET, ReplaySource
from dure.rl.transitions import Column, Layout


def learner(target_every):
    """A source that only copies, and the worker that asks it."""
    source = object.__new__(ReplaySource)
    source.settings = SimpleNamespace(target_every=target_every)
    source.target = Replica(nn.Linear(1, 1, bias=False))
    source._target = None
    return source, SimpleNamespace(kept={}, kept_plain={}, clock=0, versions=None, params=torch.zeros(1), buffers=None)


@pytest.mark.parametrize(
    ("clocks", "versions", "copied"),
    [
        (range(8), None, [0, 0, 0, 3, 3, 3, 6, 6]),
        (range(6), [[0, 0], [2, 3], [4, 4], [7, 5], [9, 8], [9, 9]], [0, 0, 2, 2, 4, 5]),
        (range(3), [[0], [10], [11]], [0, 1, 1]),
    ],
    ids=["steps of one worker", "updates of all workers at every server", "several periods at once"],
)
def test_the_target_is_copied_after_every_so_many_updates(clocks, versions, copied):
    """At clock c the model is [c], so that the target tells when it was copied."""
    source, worker = learner(3)
    found = []
    for clock in clocks:
        worker.clock, worker.params = clock, torch.tensor([float(clock)])
        worker.versions = None if versions is None else versions[clock]
        source._copy_target(worker)
        found.append(int(source.target.params.item()))
    assert found == copied
    assert worker.kept[TARGET].tolist() == [copied[-1]]


def test_a_target_of_a_checkpoint_is_loaded():
    source, worker = learner(3)
    worker.clock, worker.kept, worker.kept_plain = 5, {TARGET: torch.tensor([7.0])}, {TARGET: 1}
    source._copy_target(worker)
    assert source.target.params.tolist() == [7.0]


def test_a_model_that_is_published_does_not_change_with_the_worker_s():
    world, values = World(), torch.zeros(3)
    service = ModelService(world.node("worker 0"))
    service.publish((values,), 4, 12)
    values += 1
    pull = Call("actor 0", "pull", {"at_least": 4}, ())
    early = world.run(service.handle(pull))
    service.publish((values,), 5, 15)
    assert (early.fields["version"], early.tensors[0].tolist()) == (12, [0.0] * 3)
    assert world.run(service.handle(pull)).tensors[0].tolist() == [1.0] * 3


# ---- the replay behind it

LAYOUT = with_version(Layout((Column("reward", "float32"),)))
CAPACITY, INSERTED, UPDATES, TRIM_EVERY = 100, 37, 10, 100


class Replayed:
    """A replay as a service, and what an actor and a worker ask of it."""

    def __init__(self, **settings):
        self.world = World()
        self.replay = Replay(LAYOUT, CAPACITY, seed=0, **settings)
        limiter = RateLimiter(1.0, 1, float("inf"))
        node = self.world.node("replay 0")
        self.service = ReplayService(node, self.replay, limiter, trim_every=TRIM_EVERY, actors=["actor 0"])

    def ask(self, caller, method, *tensors, **fields):
        answer = self.service.handle(Call(caller, method, fields, tensors))
        return answer if hasattr(answer, "fields") else self.world.run(answer)

    def insert(self, count):
        values = {"reward": np.ones(count, np.float32), VERSION.name: np.zeros(count, np.int64)}
        self.ask("actor 0", "insert", *InsertionTensors(LAYOUT).tensors(values, np.ones(count)))

    def sample(self, count=8):
        tensors, parts = SampleTensors(LAYOUT).room(count)
        reply = self.ask("worker 0", "sample", count=count, beta=0.4, version=0)
        for place, tensor in zip(tensors, reply.tensors, strict=True):
            place.copy_(tensor)
        return parts[KEYS]


def test_a_replay_of_soft_capacity_is_trimmed_after_every_so_many_batches():
    replayed = Replayed(storage=1000)
    sizes = []
    for update in range(10 * TRIM_EVERY):
        if update % UPDATES == 0:
            replayed.insert(INSERTED)
        before = replayed.replay.size
        keys = replayed.sample()
        assert min(keys) >= replayed.replay.inserted - before
        if (update + 1) % TRIM_EVERY == 0:
            sizes.append((before, replayed.replay.size))
    assert sizes == [(370, 100)] + [(470, 100)] * 9
    assert replayed.replay.inserted == 3700
    assert replayed.replay.evicted == 3600
    weights = replayed.replay._tree.weights(np.arange(1000))
    assert replayed.replay._tree.total == weights.sum() == CAPACITY


def test_priorities_of_transitions_that_were_evicted_after_their_sample_change_nothing():
    replayed = Replayed()
    replayed.insert(CAPACITY)
    keys = replayed.sample(64)
    replayed.insert(60)
    replayed.ask("worker 0", "update", keys, torch.full((64,), 100.0))
    weights = replayed.replay._tree.weights(np.arange(CAPACITY))
    live = {int(key) for key in keys if key >= 60}
    assert live
    assert {slot for slot in range(CAPACITY) if weights[slot] > 1} == {key % CAPACITY for key in live}
    assert replayed.service.updated == sum(int(key) >= 60 for key in keys)
