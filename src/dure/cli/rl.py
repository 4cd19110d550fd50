"""The options of `dure rl`, and the run that they describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from dure.core.spec_text import value_text
from dure.core.user_code import as_value
from dure.errors import UsageError
from dure.run.config import (
    Checked,
    Count,
    NonNegative,
    Positional,
    Repeated,
    RunOptions,
    Seconds,
    Seed,
    TrainConfig,
    Workers,
)
from dure.run.places import is_real

if TYPE_CHECKING:
    from dure.report.run import Run

ENDLESS = 10**9
"""Steps of a run that something else ends."""

REAL_SECONDS = 60.0
"""Seconds of a real run that nothing else ends."""

VIRTUAL_FRAMES = 50_000
"""Frames of a virtual run that nothing else ends."""

LEARNERS: Mapping[str, int] = {"apex": 1, "gorila": 2, "dqn": 1}
METHODS: Mapping[str, str] = {"apex": "bsp", "gorila": "downpour", "dqn": "bsp"}

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, kw_only=True)
class JobParameters(Checked):
    """Parameters of the job that are options of their own; those of the job if left out."""

    environments: Count | None = None
    """Copies of the environment in each actor; 1 if left out."""
    replays: Workers | None = None
    """Replays that share the transitions; 1 if left out."""
    capacity: Count | None = None
    """Transitions that a replay holds; 100,000 if left out."""
    alpha: Share | None = None
    """Exponent of priorities, 0 for a uniform replay; 0.6 for apex, else 0."""
    samples_per_insert: NonNegative | None = None
    """Samples for each transition inserted, which a replay keeps by delaying the side that is ahead; 0 for no limit."""
    n_step: Count | None = None
    """Steps of a return; 3 for apex, else 1."""
    gamma: Share | None = None
    """Discount of a step; 0.99 if left out."""
    pull_every: Count | None = None
    """Steps of an actor between two pulls of the model."""
    target_every: Count | None = None
    """Updates between two copies to the target network."""


@dataclass(frozen=True, kw_only=True)
class Experience(Checked):
    """The algorithm and its actors."""

    algorithm: Positional[Literal["apex", "gorila", "dqn"]] = "apex"
    """apex: many actors, a prioritised replay, one learner. gorila: bundles of actor, replay and learner over parameter
    servers. dqn: one actor and one learner in lockstep."""
    env: str = "CartPole-v1"
    """An environment of Gymnasium, as CartPole-v1 or ALE/Pong-v5, or FILE.py:FUNCTION that returns one."""
    actors: Workers | None = None
    """Actors; 4 for apex, one for each learner of gorila."""
    learners: Workers | None = None
    """Learners; 1 for apex, 2 for gorila."""
    frames: Count | None = None
    """Frames of all actors after which the run ends. It ends at the first of frames, steps and seconds; with none, a
    real run after 60 seconds, a virtual one after 50,000 frames."""


@dataclass(frozen=True, kw_only=True)
class RlOptions(RunOptions, JobParameters, Experience):
    """Options of a run of reinforcement learning. Values are checked: a wrong one raises `UsageError`."""

    network: str | None = None
    """FILE.py:FUNCTION that returns the network; that of the algorithm if left out."""
    set: Repeated[tuple[str, ...]] = ()
    """Any other setting of the job, KEY=VALUE, as in min_size=500 (docs/how-to/reinforcement.md). Repeat it."""
    seconds: Seconds | None = None
    """Seconds, virtual or real as the run is."""
    steps: Count | None = None
    """Updates of each learner."""
    on: str = ""
    """local, ray or ray:HOST:PORT, virtual (machines that are alike, in virtual time), or a cluster file: virtual as
    well. local if left out."""
    sync: str | None = None
    """When learners agree (`dure methods`); downpour for gorila, where bsp makes it synchronous."""
    topology: str | None = None
    """How learners are connected, as in ps:shards=2; the method's first choice if left out."""
    codec: str | None = None
    """How gradients of learners are encoded; as they are if left out."""
    batch_size: Count | None = None
    """Transitions of an update; the job's if left out."""
    lr: NonNegative | None = None
    """Learning rate; the job's if left out."""
    optimizer: str | None = None
    """rmsprop, adam, adagrad, ..., with parameters as in adam:clip=10; the job's if left out."""
    seed: Seed | None = None
    """Decides initial values and, in virtual time, everything else; 0 if left out."""
    eval_every: Count | None = None
    """Updates between evaluations; 1,000 if left out, or a twentieth of the steps."""
    eval_episodes: Count | None = None
    """Episodes of an evaluation; 10 if left out."""
    resume: Path | None = None
    """Folder of a run to continue from its last complete checkpoint."""
    trust: bool = False
    """Run the code that a resumed run names also where the file has changed since it began."""
    report: Path | None = None
    """File of a report with the curves of returns; none if left out."""

    def config(self) -> TrainConfig:
        """The configuration of the run. Raises `UsageError`."""
        shared = {name: getattr(self, name) for name in SHARED}
        if self.resume is not None:
            return TrainConfig(**shared)
        given = {**shared, "job": self.job(), "workers": self._learners, "eval_samples": self.eval_episodes}
        given["sync"] = self.sync or METHODS[self.algorithm]
        if self.steps is None and (self.frames is not None or self.seconds is None):
            given["steps"] = ENDLESS
        if self.seconds is None and not self._frames and self.steps is None:
            given["seconds"] = REAL_SECONDS
        return TrainConfig(**given)

    @property
    def _learners(self) -> int:
        return self.learners or LEARNERS[self.algorithm]

    @property
    def _frames(self) -> int:
        """Frames after which the run ends; 0 if others end it."""
        if self.frames is not None or is_real(self.on or "local"):
            return self.frames or 0
        return 0 if self.steps is not None or self.seconds is not None else VIRTUAL_FRAMES

    def job(self) -> str:
        """The text of the job."""
        values: dict[str, Any] = {"env": as_value(self.env)}
        if self.actors is not None or self.algorithm == "gorila":
            values["actors"] = self.actors or self._learners
        values |= {name: value for name, value in self.only(JobParameters).plain().items() if value is not None}
        if self.network is not None:
            values["network"] = as_value(self.network)
        if self._frames:
            values["frames"] = self._frames
        for text in self.set:
            key, equals, value = text.partition("=")
            if not (key and equals and value):
                raise UsageError(f"set={text!r} sets nothing: write KEY=VALUE, as in --set send=20.")
            if "," in value:
                raise UsageError(f"set={text!r} has a comma: join the parts of a value by /, as in --set hidden=64/64.")
            if key in values:
                once = f"Write --{key.replace('_', '-')} {value}" if key in self.types() else "Set it once"
                raise UsageError(f"set={text!r}: {key} has a value already. {once}.")
            values[key] = value
        return f"{self.algorithm}:{','.join(f'{name}={value_text(value)}' for name, value in values.items())}"


SHARED = tuple(
    {each.name for each in fields(RlOptions)} & {each.name for each in fields(TrainConfig)} - {"sync"},
)
"""Options that `TrainConfig` has too, except `sync`, whose default here depends on the algorithm."""


def values_of(run: Run) -> dict[str, Any]:
    """The JSON object of `dure rl`."""
    summary = run.summary()
    found = dict(summary.get("experience", {}))
    seconds = summary["seconds"]
    lag = found.pop("param_lag", {})
    return {
        **{name: found.pop(name, None) for name in ("env", "algorithm", "actors")},
        "learners": summary["workers"],
        **{name: found.pop(name, None) for name in ("frames", "frames_per_second")},
        "updates": summary["updates_applied"],
        "updates_per_second": summary["updates_applied"] / seconds if seconds else None,
        **{name: found.pop(name, None) for name in ("mean_return", "best_return", "replay")},
        "param_lag": lag.get("mean"),
        "param_lag_max": lag.get("max"),
        "seconds": seconds,
        "time": summary["time"],
        "failures_survived": summary["failures_survived"],
        **found,
        **{name: summary[name] for name in ("strategy", "seed", "params_sha256", "updates_refused", "staleness")},
        "deaths": summary.get("deaths", {}),
    }
