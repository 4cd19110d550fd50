"""The services of distributed reinforcement learning: a replay, limited in its rate, and the model of a worker.

    actor                        replay                                  worker
    insert(transitions) ----->   stored at once
                                  <------------------------------------  sample(count)
                                 once there are enough, and the rate
                                 limiter admits it  ------------------>  keys, weights, transitions
    <------------------------    once the rate limiter admits more
                                  <------------------------------------  update(keys, priorities)

The answer to an insertion is delayed while inserts are ahead. An actor acts meanwhile, but sends its next message only
after the answer: the ratio of samples to inserts leaves its bounds by at most one message of each actor.

Cassirer et al., "Reverb: A Framework For Experience Replay", 2021, section 3.4.

    error = (inserts - min_size) * samples_per_insert - samples
    insert while  error <= buffer        sample while  inserts >= min_size  and  error >= -buffer
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.core.node import Apply, Call, Node, Operation, Reply, TensorSpec
from dure.core.protocol import ACTORS, COUNT, FINITE, WORKERS, RemoteService, carrying, remote
from dure.core.state import State
from dure.errors import Refused, UsageError, WorkOver
from dure.rl.messages import InsertionTensors, SampleTensors, check_priorities
from dure.rl.settings import MOST

if TYPE_CHECKING:
    import torch

    from dure.job.companions import Figures
    from dure.rl.replay import Replay, Sample


UPDATED = (TensorSpec("int64", MOST, at_most=True), TensorSpec("float32", MOST, at_most=True))
"""Keys and priorities of an update."""


class ReplayService(RemoteService):
    """Serves `replay` at `node`, at the pace of `limiter`, to the nodes `actors`, which insert, and to workers.

    The surplus is removed every `trim_every` batches. A transition has the version of the model that its actor used in
    the column `version`. The lag of a sampled transition is the version of the sampling worker, when it asked for the
    batch, less that one.
    """

    called = "a replay"
    saves = True

    def __init__(
        self, node: Node, replay: Replay, limiter: RateLimiter, *, trim_every: int, actors: Collection[str]
    ) -> None:
        self.node = node
        self.replay = replay
        self.limiter = limiter
        self.insertions, self.samples = InsertionTensors(replay.layout), SampleTensors(replay.layout)
        self._inserted = self.insertions.specs(MOST)
        self.trim_every = trim_every
        self.actors = actors
        self.through: set[str] = set()
        self.gone: set[str] = set()
        self.batches = 0
        self.updated = 0
        self.lags = [0.0, 0.0, 0.0]  # transitions, their sum of lags, the largest
        self._waiting: list[Operation[Any]] = []

    @remote(ACTORS)
    @carrying(lambda replay: replay._inserted)
    async def _insert(self, call: Call) -> Reply:
        """Keep transitions: the replay's size and inserts, once the rate limiter admits more."""
        self._check_actor(call)
        values, priorities = self.insertions.read(call.tensors)
        if len(values["version"]) > self.replay.storage:
            raise Refused(f"{len(values['version'])} transitions do not fit into a replay of {self.replay.storage}.")
        keys = await self.node.compute(Apply(partial(self.replay.insert, values, priorities), _nbytes(call.tensors)))
        call.release()
        self.limiter.inserted(len(keys))
        self._changed()
        while not self.limiter.can_insert(0):
            await self._change("samples, which are behind the inserts")
        return Reply({"size": self.replay.size, "inserts": self.replay.inserted})

    @remote(WORKERS, count=COUNT, beta=FINITE, version=COUNT)
    async def _sample(self, call: Call) -> Reply:
        """Keys, weights and transitions, once there are enough and the rate limiter admits it."""
        count = call.fields["count"]
        if not 0 < count <= MOST:
            raise Refused(f"a sample has 1 to {MOST} transitions, and {call.caller} asked for {count}.")
        if not 0 <= call.fields["beta"] <= 1:
            raise Refused(f"beta must be between 0 and 1, and {call.caller} asked for {call.fields['beta']}.")
        while not self._is_over() and not self.limiter.can_sample(count):
            await self._change("inserts, which are behind the samples")
        if self._is_over():
            raise WorkOver("all actors have made their frames.")
        # before the draw, which waits: other calls that ask the limiter meanwhile must see this sample
        self.limiter.sampled(count)
        self._changed()
        draw = partial(self.replay.sample, count, call.fields["beta"])
        sample = await self.node.compute(Apply(draw, self.samples.nbytes(count)))
        self._count_lags(sample, call.fields["version"])
        self.batches += 1
        if self.batches % self.trim_every == 0:
            self.replay.trim()
        return Reply({}, self.samples.tensors(sample))

    def _is_over(self) -> bool:
        """Whether some actors have made all their frames, and no other inserts any more."""
        return bool(self.through) and self.through.union(self.gone).issuperset(self.actors)

    def _check_actor(self, call: Call) -> None:
        if call.caller not in self.actors:
            raise Refused(f"{call.caller} does not insert here; {', '.join(sorted(self.actors))} do.")

    @remote(ACTORS)
    def _finish(self, call: Call) -> Reply:
        """Note that an actor sends nothing more."""
        self._check_actor(call)
        self.through.add(call.caller)
        self._changed()
        return Reply()

    @remote(WORKERS)
    @carrying(lambda replay: UPDATED)
    def _update(self, call: Call) -> Reply:
        """Give transitions new priorities."""
        keys, priorities = (tensor.numpy() for tensor in call.tensors)
        if len(keys) != len(priorities):
            raise Refused(f"an update has {len(keys)} keys and {len(priorities)} priorities.")
        check_priorities(priorities)
        self.updated += self.replay.update(keys, priorities)
        return Reply()

    def _count_lags(self, sample: Sample, version: int) -> None:
        lags = np.maximum(version - sample.values["version"], 0)
        self.lags = [self.lags[0] + len(lags), self.lags[1] + float(lags.sum()), max(self.lags[2], float(lags.max()))]

    def _change(self, label: str) -> Operation[Any]:
        """Wait for the next insertion or sample."""
        self._waiting.append(self.node.promise(label))
        return self._waiting[-1]

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.resolve()

    # ---- as a companion

    async def work(self) -> None:
        """Do nothing: a replay only serves."""

    def count_on(self, figures: Figures) -> None:
        """Do nothing: a replay comes back with its state."""

    def go_on_without(self, name: str) -> None:
        """Wait no longer for the frames of an actor that does not come back."""
        self.gone.add(name)
        self._changed()

    def figures(self) -> Figures:
        replay, (lagged, lag, most) = self.replay, self.lags
        counts = {"size": replay.size, "inserts": replay.inserted, "samples": replay.sampled, "evicted": replay.evicted}
        return {
            **counts,
            "bytes": replay.nbytes,
            "updated": self.updated,
            "lagged": lagged,
            "lag_sum": lag,
            "lag_max": most,
        }

    def state(self) -> State:
        plain = {
            "limiter": self.limiter.state(),
            "batches": self.batches,
            "updated": self.updated,
            "lags": list(self.lags),
        }
        return State({}, plain) | self.replay.state().under("replay")

    def restore(self, state: State) -> None:
        self.replay.restore(state.part("replay"))
        self.limiter.restore(state.plain["limiter"])
        self.batches, self.updated = int(state.plain["batches"]), int(state.plain["updated"])
        self.lags = [float(each) for each in state.plain["lags"]]


def _nbytes(tensors: Sequence[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class RateLimiter:
    """Counts of inserted and sampled transitions, and the next operations that they admit.

    In this library whole messages are inserted and whole batches sampled. An operation is admitted if the error after
    it is within `buffer`, as in Reverb. If a message is larger than `buffer`, it is admitted while the error is not
    above 0, and a batch while the error is not below 0: one of the two operations is always admitted.
    """

    def __init__(self, samples_per_insert: float, min_size: int, buffer: float) -> None:
        if not samples_per_insert > 0:
            raise UsageError(f"samples_per_insert must be above 0, got {samples_per_insert}.")
        if min_size < 1:
            raise UsageError(f"min_size counts transitions and must be at least 1, got {min_size}.")
        if not buffer >= max(1, samples_per_insert):
            least = max(1, samples_per_insert)
            raise UsageError(f"buffer must be at least max(1, samples_per_insert) = {least:g} samples, got {buffer:g}.")
        self.samples_per_insert, self.min_size, self.buffer = samples_per_insert, min_size, buffer
        self.inserts = self.samples = 0

    @property
    def error(self) -> float:
        """Samples that are due (above 0), or were taken too early."""
        return (self.inserts - self.min_size) * self.samples_per_insert - self.samples

    def can_insert(self, count: int) -> bool:
        """Whether a message of `count` transitions may be inserted now."""
        return self.error <= max(0, self.buffer - count * self.samples_per_insert)

    def can_sample(self, count: int) -> bool:
        """Whether a batch of `count` transitions may be sampled now."""
        return self.inserts >= self.min_size and self.error >= min(0, count - self.buffer)

    def batches(self, inserts: int, count: int) -> int:
        """The batches of `count` transitions that are admitted, from the first on, where `inserts` have been inserted.

        >>> [RateLimiter(2.0, min_size=10, buffer=4.0).batches(inserts, 4) for inserts in (9, 10, 11, 12, 13, 14)]
        [0, 1, 1, 2, 2, 3]
        """
        if inserts < self.min_size:
            return 0
        due = (inserts - self.min_size) * self.samples_per_insert - min(0, count - self.buffer)
        return int(due // count) + 1

    def inserted(self, count: int) -> None:
        self.inserts += count

    def sampled(self, count: int) -> None:
        self.samples += count

    def state(self) -> dict[str, int]:
        return {"inserts": self.inserts, "samples": self.samples}

    def restore(self, state: dict[str, int]) -> None:
        self.inserts, self.samples = state["inserts"], state["samples"]


class ModelService(RemoteService):
    """The newest model of the worker at `node`, and its version: the updates that the model has had.

    A model is its parameters, and the buffers that training changes if it has some.

    A worker over servers has the updates of all workers in its model. `step` counts those that it has made itself.
    """

    called = "a model"

    def __init__(self, node: Node) -> None:
        self.node = node
        self.step = -1
        self.version = 0
        self._model: tuple[torch.Tensor, ...]
        self._waiting: list[Operation[Any]] = []

    def publish(self, model: Sequence[torch.Tensor], step: int, version: int) -> None:
        """Answer pulls with a copy of `model` from now on; the worker overwrites its memory before the next call."""
        self._model = tuple(each.detach().clone() for each in model)
        self.step, self.version = step, version
        waiting, self._waiting = self._waiting, []
        for operation in waiting:
            operation.resolve()

    @remote(ACTORS, at_least=COUNT)
    async def _pull(self, call: Call) -> Reply:
        """Version and model, once the worker has made so many steps."""
        while self.step < call.fields["at_least"]:
            self._waiting.append(self.node.promise(f"step {call.fields['at_least']} of the model"))
            await self._waiting[-1]
        return Reply({"version": self.version}, tuple(each.cpu() for each in self._model))
