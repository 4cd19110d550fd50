"""An actor: acts in copies of an environment, and sends what it experiences to a replay.

Horgan et al., "Distributed Prioritized Experience Replay", ICLR 2018, algorithm 1.

    theta <- pull
    repeat
        a      <- policy(s; theta) with noise              in each environment
        s', r  <- environment(a);   n-step window <- (s, a, r, s')
        local buffer <- transitions whose n steps are complete
        every `send` transitions:   priorities <- |TD errors| at theta;   insert both, once the last ones are admitted
        every `pull_every` steps:   theta <- pull

Each of many actors explores at a rate of its own, which does not change during a run (`ladder`):

    epsilon_i = epsilon ^ (1 + alpha i / (N - 1))         i = 0 .. N - 1
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.core.node import Address, Node, Operation, TimedWork
from dure.core.state import State
from dure.errors import PeerLost, UsageError
from dure.job.gradient_engine import Isolated, seed_of
from dure.rl.frames import FrameWindow
from dure.rl.messages import FOREVER, VERSION, InsertionTensors, inserted_columns
from dure.rl.transitions import STACKED, NStep

if TYPE_CHECKING:
    from dure.job.companions import Figures
    from dure.job.replica import Replica
    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.environments import Environments, VectorStep
    from dure.rl.settings import RlSettings
    from dure.rl.transitions import Layout, Transitions


AGAIN_SECONDS = 0.1
"""Seconds between two pulls of an actor from a worker that has failed or has not joined yet."""

RECENT = 100
"""Episodes whose mean return an actor reports."""


class Actor:
    """One actor at `node`. `noise` has the epsilon or sigma of each environment; random layers draw from `seed`.

    In lockstep, `steps_after` says how many steps the replay allows the worker after so many insertions.
    """

    saves = True

    def __init__(
        self,
        node: Node,
        algorithm: RlAlgorithm,
        replica: Replica,
        layout: Layout,
        environments: Environments,
        settings: RlSettings,
        *,
        noise: np.ndarray,
        rng: np.random.Generator,
        seed: int,
        model: Address,
        replay: Address,
        steps_after: Callable[[int], int] | None = None,
    ) -> None:
        self.node, self.algorithm, self.replica, self.layout = node, algorithm, replica, layout
        self.environments, self.settings = environments, settings
        self.noise, self.rng, self.seed = noise, rng, seed
        self.model, self.replay = model, replay
        self.steps_after = steps_after
        self.version = 0
        self.steps = self.sent = self.episodes = 0
        self.stored = 0  # transitions inserted into the replay so far, by its last reply
        self.returns: deque[float] = deque(maxlen=RECENT)
        self._insertions = InsertionTensors(layout)
        self._window = NStep(algorithm.n_step, algorithm.gamma)
        self._items: list[tuple[Any, int]] = []
        self._insertion: Operation[Any] | None = None
        replica.module.eval()
        self._model = [torch.empty_like(replica.params)]
        if (buffers := replica.buffers_flat()).numel():
            self._model.append(buffers)
        self._since_pull = 0
        self.count = len(environments.observations)
        # Steps whose transitions may not be sent yet: those of a message, of an open window, and the newest.
        pending = settings.send + algorithm.n_step + 1
        self._frames = None if layout.frames is None else FrameWindow(layout.frames, self.count, pending)
        self._references = self._first(range(self.count))

    async def work(self) -> None:
        """Act until the run ends, or this actor has made its share of the frames."""
        while not self._is_through():
            if self._since_pull == 0:
                await self._pull()
            await self.node.compute(TimedWork(self._act, self.settings.act_seconds))
            self._since_pull = (self._since_pull + 1) % self.settings.pull_every
            while len(self._items) >= self.settings.send:
                await self._send(self.settings.send)
        if self._items:
            await self._send(len(self._items))
        await self._admitted()
        await self.node.call(self.replay, "finish")

    def _is_through(self) -> bool:
        frames = self.settings.frames / self.settings.actors
        return 0 < frames <= self.steps * self.environments.frames_per_step

    # ---- its model

    async def _pull(self) -> None:
        wanted: dict[str, Any] = {"at_least": self._awaited()}
        while True:
            try:
                reply = await self.node.call(self.model, "pull", into=self._model, timeout=FOREVER, **wanted)
                break
            except PeerLost:  # its worker has failed, or joins later
                await self.node.sleep(AGAIN_SECONDS)
        self.replica.load(self._model[0])
        for buffers in self._model[1:]:
            self.replica.load_buffers(buffers)
        self.version = reply.fields["version"]

    def _awaited(self) -> int:
        """The step that an actor in lockstep waits for: the steps that the replay allows the worker so far."""
        return 0 if self.steps_after is None else self.steps_after(self.stored)

    # ---- its environments

    def _act(self) -> None:
        """Make one step in each environment."""
        environments = self.environments
        with self._seeded():
            actions = self.algorithm.act(self.replica.module, environments.observations, self._noise_now(), self.rng)
        before, references = environments.observations, self._references
        step = environments.step(actions)
        self.steps += self.count
        for stream in range(self.count):
            old = before[stream] if self._frames is None else references[stream]
            self._add(stream, old, actions[stream], step)
        ended = [each.stream for each in step.ended]
        self.episodes += len(ended)
        self.returns.extend(each.episode_return for each in step.ended)
        if self._frames is not None:
            for stream, reference in zip(ended, self._first(ended), strict=True):
                self._references[stream] = reference

    def _add(self, stream: int, old: Any, action: Any, step: VectorStep) -> None:
        if self._frames is None:
            new: Any = step.final[stream]
        else:
            new = self._frames.next(stream, old, step.final[stream])
            self._references[stream] = new
        items = self._window.add(
            stream,
            old,
            action,
            float(step.rewards[stream]),
            new,
            terminated=bool(step.terminated[stream]),
            truncated=bool(step.truncated[stream]),
        )
        self._items += [(item, self.version) for item in items]

    def _first(self, streams: Sequence[int]) -> list[np.ndarray]:
        """The references of the first observations of episodes."""
        if self._frames is None:
            return []
        return [self._frames.whole(stream, self.environments.observations[stream]) for stream in streams]

    def _seeded(self) -> Isolated:
        """The context of the network, which may draw random numbers in evaluation mode, too."""
        return Isolated(False, seed_of(self.seed, self.steps), self.replica.device)

    def _noise_now(self) -> np.ndarray:
        """The noise of each environment; epsilons fall from 1 over the first steps."""
        if not self.settings.anneal:
            return self.noise
        done = min(1.0, self.steps / self.count / self.settings.anneal)
        return 1.0 - (1.0 - self.noise) * done

    # ---- its transitions

    async def _send(self, count: int) -> None:
        """Insert `count` transitions. The actor goes on, except in lockstep, but waits before the next insertion."""
        await self._admitted()
        sending, self._items = self._items[:count], self._items[count:]
        values = self._columns(sending)
        priorities = self._priorities(values) if self.settings.alpha else None
        if self._frames is not None:
            values = self._frames.packed(values)
        tensors = self._insertions.tensors(values, priorities)
        self._insertion = self.node.call(self.replay, "insert", *tensors, timeout=FOREVER)
        self.sent += count
        if self.settings.lockstep:
            await self._admitted()

    async def _admitted(self) -> None:
        """Wait until the replay admits more transitions than it has got."""
        if self._insertion is not None:
            self.stored = (await self._insertion).fields["inserts"]

    def _columns(self, sending: Sequence[tuple[Any, int]]) -> Transitions:
        columns: Transitions = {VERSION.name: np.array([version for _, version in sending], VERSION.dtype)}
        for column in inserted_columns(self.layout):
            if column.name not in columns:
                columns[column.name] = np.array([getattr(item, column.name) for item, _ in sending], column.dtype)
        return columns

    def _priorities(self, values: Transitions) -> np.ndarray:
        """The learner's own formula, with the actor's model as the target too."""
        if self._frames is not None:
            values = {**values, **{name: self._frames.stacked(values[name]) for name in STACKED}}
        tensors = {name: torch.from_numpy(array) for name, array in values.items()}
        module = self.replica.module
        with self._seeded():
            return self.algorithm.errors(module, tensors, self.algorithm.targets(module, module, tensors)).numpy()

    # ---- as a companion

    def figures(self) -> Figures:
        recent = sum(self.returns) / len(self.returns) if self.returns else math.nan
        frames = self.steps * self.environments.frames_per_step
        counts = {"steps": self.steps, "frames": frames, "episodes": self.episodes, "sent": self.sent}
        return {**counts, "version": self.version, **({} if math.isnan(recent) else {"recent_return": recent})}

    def count_on(self, figures: Figures) -> None:
        self.steps, self.sent, self.episodes = (int(figures.get(name, 0)) for name in ("steps", "sent", "episodes"))

    def go_on_without(self, name: str) -> None:
        """Do nothing: actors do not work together."""

    def state(self) -> State:
        """The counts: an actor that is started again begins new episodes."""
        counts = {"steps": self.steps, "sent": self.sent, "episodes": self.episodes}
        return State({}, {**counts, "stored": self.stored, "returns": list(self.returns)})

    def restore(self, state: State) -> None:
        self.steps, self.sent, self.episodes = (int(state.plain[name]) for name in ("steps", "sent", "episodes"))
        self.stored = int(state.plain["stored"])
        self.returns.extend(state.plain["returns"])


def ladder(actors: int, index: int, epsilon: float = 0.4, alpha: float = 7.0) -> float:
    """The rate of random actions of actor `index` among `actors`. A single actor has `epsilon` itself.

    >>> [round(ladder(8, index), 6) for index in range(8)]
    [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.001638, 0.000655]

    Raises:
        UsageError: `index` is no actor's, or a value is out of its range.
    """
    if not 0 <= index < actors:
        raise UsageError(f"actors are numbered from 0 to {actors - 1}, got {index}.")
    if not 0 <= epsilon <= 1:
        raise UsageError(f"epsilon is a probability between 0 and 1, got {epsilon}.")
    if not alpha >= 0:
        raise UsageError(f"alpha must be a number >= 0, got {alpha}. 0 gives every actor the same epsilon.")
    return float(epsilon ** (1 + alpha * index / max(actors - 1, 1)))
