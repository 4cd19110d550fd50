"""The settings of a run of distributed reinforcement learning, beside those of its algorithm."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dure.errors import UsageError

MOST = 4096
"""Transitions of a message, at most."""


@dataclass(frozen=True, kw_only=True)
class RlSettings:
    """The actors, the replays, and the pace of both.

    Each of `actors` has `environments` copies of the environment. With `bundled`, each worker has one actor and one
    replay of its own (Gorila); otherwise actor i sends to replay i mod `replays`, and each worker samples from all of
    them in turn: priorities and weights are those within a replay.

    A replay holds `capacity` transitions; if `soft`, the surplus is removed only every `trim_every` samples. `alpha`
    is the exponent of priorities (0: uniform), `beta` that of importance weights. No batch is sampled before a replay
    has `min_size` transitions. With `samples_per_insert`, a replay holds that ratio within `buffer` samples (0: a few
    messages): it delays its answers to the side that is ahead.

    An actor sends `send` transitions in a message, and pulls the model every `pull_every` steps. Environment i of N has
    the constant epsilon `epsilon` ** (1 + `ladder` i / (N - 1)); `sigma` is the standard deviation of noise on
    continuous actions, in half their range. Both are reached from 1 over `anneal` steps of the environment. The target
    network is copied every `target_every` updates of the model: steps of the worker or, over servers, updates of all
    workers. A worker has `prefetch` batches on their way. In `lockstep` the one actor waits until the worker has made
    the steps that its transitions allow.

    A gradient whose loss is more than `outlier` standard deviations above the mean loss is dropped; 0: none.

    The last `late` actors join `late_seconds` after the start of the run.

    Actors stop after `frames` frames of all of them together, of which each makes its share, and the run ends then; 0:
    without limit.

    `act_seconds` are those of a step of an actor, in all its environments, in virtual time, `update_seconds` those of a
    gradient; without them a gradient takes the time of its operations on the cluster's machine.
    """

    actors: int = 4
    environments: int = 1
    replays: int = 1
    bundled: bool = False
    capacity: int = 100_000
    soft: bool = False
    trim_every: int = 100
    alpha: float = 0.6
    beta: float = 0.4
    min_size: int = 1_000
    samples_per_insert: float = 0.0
    buffer: float = 0.0
    send: int = 50
    pull_every: int = 400
    epsilon: float = 0.4
    ladder: float = 7.0
    anneal: int = 0
    sigma: float = 0.3
    target_every: int = 500
    prefetch: int = 2
    lockstep: bool = False
    outlier: float = 0.0
    late: int = 0
    late_seconds: float = 0.0
    frames: int = 0
    act_seconds: float = 2e-4
    update_seconds: float | None = None

    def __post_init__(self) -> None:
        least = {"actors": 1, "environments": 1, "replays": 1, "capacity": 1, "send": 1, "pull_every": 1}
        least |= {"target_every": 1, "min_size": 1, "prefetch": 0, "anneal": 0, "trim_every": 1, "frames": 0, "late": 0}
        for name, low in least.items():
            if getattr(self, name) < low:
                raise UsageError(f"{name} must be a whole number of at least {low}, got {getattr(self, name)}.")
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, float) and not value >= 0:
                raise UsageError(f"{each.name} must be a number of at least 0, got {value}.")
        self._check_replays()
        self._check_actors()
        if self.lockstep and not self.samples_per_insert:
            raise UsageError("lockstep needs samples_per_insert: the batch size times the updates for each step.")

    def _check_replays(self) -> None:
        if not self.beta <= 1:
            raise UsageError(f"beta is the exponent of importance weights and must be at most 1, got {self.beta}.")
        if self.min_size > self.capacity:
            raise UsageError(
                f"min_size={self.min_size} transitions never fit into a replay of capacity={self.capacity}. "
                f"Give at most {self.capacity}, or a larger capacity."
            )
        if self.send > min(MOST, self.capacity):
            raise UsageError(
                f"send={self.send} transitions of a message must fit into a replay, and be at most {MOST}. "
                f"Give at most {min(MOST, self.capacity)}."
            )
        if self.replays > self.actors:
            raise UsageError(
                f"replays={self.replays} is above actors={self.actors}, and each replay needs an actor that fills it. "
                f"Give at most {self.actors}."
            )

    def _check_actors(self) -> None:
        if not self.epsilon <= 1:
            raise UsageError(f"epsilon is the share of random actions and must be at most 1, got {self.epsilon}.")
        if self.late >= self.actors:
            raise UsageError(
                f"late={self.late} of actors={self.actors} would join late, and a run starts with one at least. "
                f"Give at most {self.actors - 1}."
            )
        if self.late and not self.late_seconds:
            raise UsageError(f"late={self.late} actors need the time at which they join: give late_seconds.")
        single = (self.actors, self.environments, self.send, self.pull_every, self.prefetch)
        if self.lockstep and single != (1, 1, 1, 1, 0):
            raise UsageError(
                "lockstep alternates single steps of one actor and the worker: write actors=1, environments=1, send=1, "
                "pull_every=1 and prefetch=0."
            )
