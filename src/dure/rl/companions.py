"""The nodes of distributed reinforcement learning beside the workers: actors and replays.

Ape-X                                      Gorila, bundled
actor 0..A-1 --transitions--> replay       actor i --> replay i --> worker i --gradients--> servers
     ^                          | samples      ^                        |  ^                   |
     '------- parameters --- worker 0          '------ parameters ------'  '----- parameters --'

`EpisodeGrader` grades a model by the returns of whole episodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.core.deployment import ACTOR, REPLAY, WORKER, NodeId, NodeSpec, WhenLost
from dure.core.node import Address, Node
from dure.errors import UsageError
from dure.job.gradient_engine import Isolated
from dure.job.metrics import Metrics
from dure.job.replica import Replica
from dure.rl.actor import Actor, ladder
from dure.rl.environments import Environments, frames_per_step
from dure.rl.messages import with_version
from dure.rl.replay import Replay
from dure.rl.services import ModelService, RateLimiter, ReplayService
from dure.rl.settings import MOST
from dure.rl.source import OutlierFilter, ReplaySource

if TYPE_CHECKING:
    import gymnasium

    from dure.core.meter import Meter
    from dure.job.companions import Build, Companion, Figures, RunShape
    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.environments import Factory
    from dure.rl.settings import RlSettings
    from dure.rl.transitions import Layout


ENVIRONMENT_STREAM, NOISE_STREAM, REPLAY_STREAM, GRADER_STREAM, LAYER_STREAM = range(11, 16)
"""Separate the random numbers of a run's parts from each other."""

MESSAGES = 4
"""Insertions by which samples may be ahead or behind, where `buffer` is left out."""

SLACK = 1.25
"""Slots of a replay of soft capacity, in its capacity."""


@dataclass(frozen=True)
class ActorsAndReplays:
    """The companions of a job of reinforcement learning: an `algorithm` in environments that `factory` makes.

    `episodes` are those of an evaluation, with the share `evaluation_epsilon` of random actions.
    """

    algorithm: RlAlgorithm
    factory: Factory
    settings: RlSettings
    env: str
    name: str
    episodes: int = 10
    evaluation_epsilon: float = 0.0

    # ---- the nodes

    @property
    def machines(self) -> int:
        return 0 if self.settings.bundled else self.settings.actors

    def check(self, workers: int, batch_size: int) -> None:
        settings = self.settings
        if batch_size > MOST:
            raise UsageError(f"a batch of {batch_size} transitions is above the largest sample. Give at most {MOST}.")
        self._check_frames()
        if settings.bundled and settings.actors != workers:
            raise UsageError(
                f"each of {workers} bundles has one actor, and actors={settings.actors}. Give as many actors as "
                "learners, or bundled=false."
            )
        if settings.lockstep and workers != 1:
            raise UsageError(f"lockstep is for one learner, and there are {workers}. Use one, or lockstep=false.")

    def _check_frames(self) -> None:
        """Raise `UsageError` if the actors stop before each replay has its first `min_size` transitions."""
        settings = self.settings
        needed = settings.min_size * (settings.actors if settings.bundled else settings.replays) * self.frames_per_step
        if 0 < settings.frames < needed:
            raise UsageError(
                f"the actors stop after frames={settings.frames}, and no batch is sampled before each replay has "
                f"min_size={settings.min_size} transitions, {needed} frames in all. Give more frames, or a smaller "
                "min_size."
            )

    def nodes(self, workers: int) -> Sequence[NodeSpec]:
        bundled = self.settings.bundled
        learners = [NodeId(WORKER, rank) for rank in range(workers)]
        actors = [
            NodeSpec(NodeId(ACTOR, rank), learners[rank] if bundled else None, WhenLost.GO_ON, self._joins_after(rank))
            for rank in range(self.settings.actors)
        ]
        replays = [
            NodeSpec(NodeId(REPLAY, rank), learners[rank % workers], WhenLost.ROLL_BACK)
            for rank in range(workers if bundled else self.settings.replays)
        ]
        return [*actors, *replays]

    def _joins_after(self, actor: int) -> float:
        return self.settings.late_seconds if actor >= self.settings.actors - self.settings.late else 0.0

    def _replay_of(self, actor: int) -> Address:
        replays = self.settings.actors if self.settings.bundled else self.settings.replays
        return Address(str(NodeId(REPLAY, actor % replays)), "replay")

    def _actors_of(self, replay: int) -> list[str]:
        """The actors that send to a replay."""
        ranks = range(self.settings.actors)
        return [str(NodeId(ACTOR, rank)) for rank in ranks if self._replay_of(rank).node == str(NodeId(REPLAY, replay))]

    def _replays_of(self, worker: int) -> list[Address]:
        """The replays that a worker samples from, in turn."""
        if self.settings.bundled:
            return [Address(str(NodeId(REPLAY, worker)), "replay")]
        replays = self.settings.replays
        return [Address(str(NodeId(REPLAY, (worker + turn) % replays)), "replay") for turn in range(replays)]

    # ---- the parts of nodes

    @cached_property
    def layout(self) -> Layout:
        """The columns of transitions, with the version of the actor's model."""
        made = self.factory()
        found = self.algorithm.layout(made.observation_space, made.action_space)
        made.close()
        return with_version(found)

    @cached_property
    def frames_per_step(self) -> int:
        """Emulator frames of a step of an actor in one environment."""
        made = self.factory()
        found = frames_per_step(made)
        made.close()
        return found

    def companion(self, shape: RunShape, node: Node) -> Companion:
        return self._actor(shape, node) if node.name.startswith(ACTOR) else self._replay(shape, node)

    def _actor(self, shape: RunShape, node: Node) -> Actor:
        settings, rank = self.settings, node.rank
        life = (shape.seed, rank, shape.start, node.incarnation)
        count = settings.environments
        environments = Environments(self.factory, count, _drawn(ENVIRONMENT_STREAM, *life))
        model = Address(str(NodeId(WORKER, rank % shape.workers)), "model")
        return Actor(
            node,
            self.algorithm,
            Replica(shape.build(shape.seed)),
            self.layout,
            environments,
            settings,
            noise=self._noise(rank * count, count),
            rng=np.random.default_rng((NOISE_STREAM, *life)),
            seed=_drawn(LAYER_STREAM, *life),
            model=model,
            replay=self._replay_of(rank),
            steps_after=partial(self._limiter().batches, count=shape.batch_size) if settings.lockstep else None,
        )

    def _noise(self, first: int, count: int) -> np.ndarray:
        """The epsilon or sigma of `count` environments of one actor, of which `first` is the number in the run."""
        settings = self.settings
        total = settings.actors * settings.environments
        action = next(each for each in self.layout.columns if each.name == "action")
        if action.dtype.startswith("float"):
            return np.full(count, settings.sigma)
        return np.array([ladder(total, first + each, settings.epsilon, settings.ladder) for each in range(count)])

    def _replay(self, shape: RunShape, node: Node) -> ReplayService:
        settings = self.settings
        storage = round(settings.capacity * SLACK) if settings.soft else None
        seed = _drawn(REPLAY_STREAM, shape.seed, node.rank)
        replay = Replay(self.layout, settings.capacity, seed=seed, alpha=settings.alpha, storage=storage)
        service = ReplayService(
            node, replay, self._limiter(), trim_every=settings.trim_every, actors=self._actors_of(node.rank)
        )
        node.serve("replay", service)
        return service

    def _limiter(self) -> RateLimiter:
        settings, ratio = self.settings, self.settings.samples_per_insert
        if not ratio:
            return RateLimiter(1.0, settings.min_size, math.inf)
        least = max(ratio, 1.0)
        if settings.lockstep:
            return RateLimiter(ratio, settings.min_size, least)
        return RateLimiter(ratio, settings.min_size, max(settings.buffer or MESSAGES * settings.send * ratio, least))

    def source(self, shape: RunShape, node: Node, rank: int, device: str, meter: Meter) -> ReplaySource:
        settings = self.settings
        model = ModelService(node)
        node.serve("model", model)
        return ReplaySource(
            node,
            self.algorithm,
            Replica(shape.build(shape.seed).to(device)),
            Replica(shape.build(shape.seed).to(device)),
            settings,
            layout=self.layout,
            replays=self._replays_of(rank),
            model=model,
            batch_size=shape.batch_size,
            flops=shape.flops_per_sample * shape.batch_size,
            meter=meter,
            seed=shape.seed,
            outliers=OutlierFilter(settings.outlier) if settings.outlier else None,
        )

    def grader(self, build: Build, episodes: int | None, *, seed: int) -> EpisodeGrader:
        return EpisodeGrader(
            self.algorithm,
            self.factory,
            build,
            episodes or self.episodes,
            epsilon=self.evaluation_epsilon,
            seed=_drawn(GRADER_STREAM, seed),
        )

    # ---- the record

    def row(self, figures: Mapping[str, Figures], seconds: float) -> dict[str, Any]:
        actors = [found for name, found in figures.items() if name.startswith(ACTOR)]
        replays = [found for name, found in figures.items() if name.startswith(REPLAY)]
        inserts, samples = _sum(replays, "inserts"), _sum(replays, "samples")
        lagged = _sum(replays, "lagged")
        recent = [each["recent_return"] for each in actors if "recent_return" in each]
        return {
            "frames": int(_sum(actors, "frames")),
            "episodes": int(_sum(actors, "episodes")),
            "recent_return": sum(recent) / len(recent) if recent else None,
            "replay_size": int(_sum(replays, "size")),
            "inserts": int(inserts),
            "replay_samples": int(samples),
            "replay_ratio": samples / inserts if inserts else None,
            "param_lag": _sum(replays, "lag_sum") / lagged if lagged else None,
        }

    def summary(self, figures: Mapping[str, Figures], rows: Sequence[Mapping[str, Any]], seconds: float) -> Any:
        last = self.row(figures, seconds)
        replays = [found for name, found in figures.items() if name.startswith(REPLAY)]
        returns = [row["mean_return"] for row in rows if row.get("mean_return") is not None]
        return {
            "env": self.env,
            "algorithm": self.name,
            "actors": self.settings.actors,
            "frames": last["frames"],
            "frames_per_second": last["frames"] / seconds if seconds else None,
            "episodes": last["episodes"],
            "mean_return": returns[-1] if returns else None,
            "best_return": max(returns, default=None),
            "recent_return": last["recent_return"],
            "replay": {
                "size": last["replay_size"],
                "inserts": last["inserts"],
                "samples": last["replay_samples"],
                "ratio": last["replay_ratio"],
                "bytes": int(_sum(replays, "bytes")),
            },
            "param_lag": {
                "mean": last["param_lag"],
                "max": max((each.get("lag_max", 0.0) for each in replays), default=0.0),
            },
        }


def _sum(found: Sequence[Figures], name: str) -> float:
    return sum(each.get(name, 0) for each in found)


def _drawn(*stream: int) -> int:
    """A seed drawn from a stream of its own."""
    return int(np.random.SeedSequence(stream).generate_state(1)[0])


STREAMS = 10
"""Environments that are stepped together, at most."""

MOST_FRAMES = 108_000
"""Frames of an episode, at most: half an hour of an Atari game. A policy without noise may go in circles for ever."""


class EpisodeGrader:
    """Plays at least `episodes` episodes, the same number in each of several environments.

    `epsilon` is the share of random actions. The environments have the same seeds for each grade.
    """

    def __init__(
        self, algorithm: RlAlgorithm, factory: Factory, build: Build, episodes: int, *, epsilon: float, seed: int
    ) -> None:
        self.algorithm, self.factory = algorithm, partial(_limited, factory)
        self.replica = Replica(build(seed))
        self.replica.module.eval()
        self.streams = min(episodes, STREAMS)
        self.each = math.ceil(episodes / self.streams)
        self.epsilon, self.seed = epsilon, seed

    def grade(self, values: torch.Tensor, buffers: torch.Tensor | None = None) -> Metrics:
        self.replica.load(values.to(self.replica.device))
        if buffers is not None:
            self.replica.load_buffers(buffers)
        with Isolated(False, self.seed, self.replica.device):  # a network may draw in evaluation mode, too
            found = self._returns()
        return Metrics(None, None, {"mean_return": float(np.mean(found)), "return_std": float(np.std(found))})

    def _returns(self) -> Sequence[float]:
        """The returns of the first episodes of each environment."""
        environments = Environments(self.factory, self.streams, self.seed)
        rng = np.random.default_rng(self.seed)
        noise = np.full(self.streams, self.epsilon)
        returns: list[list[float]] = [[] for _ in range(self.streams)]
        while min(map(len, returns)) < self.each:
            actions = self.algorithm.act(self.replica.module, environments.observations, noise, rng)
            for episode in environments.step(actions).ended:
                returns[episode.stream].append(episode.episode_return)
        environments.close()
        return [one for stream in returns for one in stream[: self.each]]


def _limited(factory: Factory) -> gymnasium.Env[Any, Any]:
    """An environment whose episodes end."""
    from gymnasium.wrappers import TimeLimit

    made = factory()
    return TimeLimit(made, MOST_FRAMES // frames_per_step(made))
