"""Jobs of distributed reinforcement learning, by the names that `dure rl` and `dure train` have for them.

| job      | actors, replays              | learners              | algorithm                              |
|----------|------------------------------|-----------------------|----------------------------------------|
| `apex`   | many, one shared replay      | one                   | double dueling DQN of 3 steps, or DPG  |
| `gorila` | one of each for each learner | several, over servers | DQN                                    |
| `dqn`    | one, in lockstep             | one                   | DQN                                    |

Ape-X takes DPG where actions are continuous.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import torch

from dure.core import user_code
from dure.core.user_code import as_name
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.rl.companions import ActorsAndReplays
from dure.rl.dpg import Dpg
from dure.rl.dqn import Dqn
from dure.rl.environments import environment
from dure.rl.settings import RlSettings

if TYPE_CHECKING:
    from torch import nn

    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.environments import Factory

STEPS = 10_000
"""Steps of a learner, where nothing else ends a run."""


@dataclass(frozen=True)
class Preset:
    """The defaults of a job: its settings, and its algorithms for discrete and for continuous actions."""

    name: str
    settings: RlSettings
    discrete: Dqn
    continuous: Dpg
    optimizer: OptimizerSpec
    policy_optimizer: OptimizerSpec
    batch_size: int
    summary: str

    def defaults(self) -> dict[str, Any]:
        """The parameters of the job's function. None stands for the default of the algorithm that suits the actions."""
        of_algorithms = dict.fromkeys(self._algorithm_hints())
        of_settings = {each.name: getattr(self.settings, each.name) for each in fields(RlSettings)}
        return {"env": "CartPole-v1", "network": None, "episodes": 10, **of_settings, **of_algorithms}

    def hints(self) -> dict[str, Any]:
        """The types of the parameters."""
        found = {"env": str, "network": str, "episodes": int, **get_type_hints(RlSettings), **self._algorithm_hints()}
        return {name: found[name] for name in self.defaults()}

    def _algorithm_hints(self) -> dict[str, Any]:
        return {name.rstrip("_"): hint for kind in (Dqn, Dpg) for name, hint in get_type_hints(kind).items()}

    def job(self, **given: Any) -> Job:
        """Make the job with parameters of `defaults`; None takes the default."""
        values = {name: value for name, value in given.items() if value is not None}
        if unknown := sorted(values.keys() - self.defaults().keys()):
            raise UsageError(f"{self.name} has no parameter {unknown[0]!r}; it has {', '.join(self.defaults())}.")
        env, network = values.pop("env", "CartPole-v1"), values.pop("network", None)
        env = as_name(env) if isinstance(env, str) else env
        factory = environment(env) if isinstance(env, str) else env
        continuous = _is_continuous(factory)
        algorithm: Any = self.continuous if continuous else self.discrete
        own = {each.name.rstrip("_"): each.name for each in fields(algorithm)}
        episodes = values.pop("episodes", 10)
        of_algorithm = {own[name]: values.pop(name) for name in list(values) if name in own}
        if wrong := sorted(values.keys() & self._algorithm_hints().keys()):
            kind = "continuous" if continuous else "discrete"
            raise UsageError(f"{wrong[0]} is no parameter of {type(algorithm).__name__}, which the {kind} actions of "
                             f"this environment need; it has {', '.join(own)}.")  # fmt: skip
        return rl_job(
            replace(algorithm, **of_algorithm),
            factory,
            replace(self.settings, **values),
            name=self.name,
            env=env if isinstance(env, str) else getattr(env, "__name__", "an environment"),
            optimizer=self.policy_optimizer if continuous else self.optimizer,
            batch_size=self.batch_size,
            network=_network(network) if isinstance(network, str) else network,
            episodes=episodes,
        )


def _network(text: str) -> Callable[[], nn.Module]:
    """The function that `text` names, FILE.py:FUNCTION. Raises `UsageError` where there is none."""
    named = user_code.split(as_name(text))
    function = None if named is None else getattr(user_code.run(named[0]), named[1], None)
    if not callable(function):
        raise UsageError(f"network={text!r} names no function. Write FILE.py:FUNCTION, which returns the module.")
    return function  # type: ignore[no-any-return]


def _is_continuous(factory: Factory) -> bool:
    from gymnasium.spaces import Box

    made = factory()
    found = isinstance(made.action_space, Box)
    made.close()
    return found


def _function(preset: Preset) -> Callable[..., Job]:
    """The function of a job, with the parameters of `preset` in its signature."""

    def made(**given: Any) -> Job:
        return preset.job(**given)

    made.__name__ = made.__qualname__ = preset.name
    made.__doc__ = preset.summary
    made.__annotations__ = preset.hints()
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=preset.hints()[name])
            for name, value in preset.defaults().items()
        ]
    )
    return made


def rl_job(
    algorithm: RlAlgorithm,
    factory: Factory,
    settings: RlSettings,
    *,
    name: str,
    env: str,
    optimizer: OptimizerSpec,
    batch_size: int,
    network: Callable[[], nn.Module] | None = None,
    episodes: int = 10,
) -> Job:
    """Make a job that learns by `algorithm` in environments that `factory` makes; `env` is their name.

    `network` makes the model; the algorithm's own if left out. An evaluation plays `episodes` episodes.

    Raises `UsageError` for an environment that the algorithm cannot use.
    """
    made = factory()
    spaces = made.observation_space, made.action_space
    made.close()
    layout = algorithm.layout(*spaces)
    observation = next(each for each in layout.columns if each.name == "observation")
    example = torch.zeros((1, *observation.shape), dtype=getattr(torch, observation.dtype))
    return Job(
        model=network or (lambda: algorithm.network(*spaces)),
        loss=lambda outputs, _: outputs.square().mean(),
        train=Data(example, torch.zeros(1)),
        batch_size=batch_size,
        optimizer=optimizer,
        steps=STEPS,
        split="whole",
        name=f"{name} {env}",
        source=f"the environment {env}",
        companions=ActorsAndReplays(
            algorithm,
            factory,
            settings,
            env,
            name,
            episodes=episodes,
            evaluation_epsilon=0.0 if layout.frames is None else 0.01,
        ),
    )


APEX = Preset(
    "apex",
    RlSettings(actors=4, soft=True),
    Dqn(n_step=3, double=True, dueling=True),
    Dpg(n_step=5),
    OptimizerSpec("rmsprop", lr=0.00025 / 4, eps=1.5e-7, clip=40.0),
    OptimizerSpec("adam", lr=1e-4, clip=40.0),
    batch_size=128,
    summary="Ape-X: many actors, one prioritised replay, one learner. Horgan et al., ICLR 2018.",
)

GORILA = Preset(
    "gorila",
    RlSettings(actors=2, bundled=True, alpha=0.0, ladder=0.0, epsilon=0.1, anneal=10_000, pull_every=1, send=1),
    Dqn(n_step=1, double=False, dueling=False),
    Dpg(n_step=1),
    OptimizerSpec("adagrad", lr=0.01),
    OptimizerSpec("adagrad", lr=0.01),
    batch_size=32,
    summary="Gorila: bundles of an actor, a replay and a learner, over parameter servers. Nair et al., 2015.",
)

DQN = Preset(
    "dqn",
    RlSettings(
        actors=1,
        alpha=0.0,
        ladder=0.0,
        epsilon=0.1,
        anneal=10_000,
        pull_every=1,
        send=1,
        prefetch=0,
        lockstep=True,
        samples_per_insert=32.0,
    ),
    Dqn(n_step=1, double=False, dueling=False),
    Dpg(n_step=1),
    OptimizerSpec("rmsprop", lr=0.00025, eps=1.5e-7),
    OptimizerSpec("adam", lr=1e-4),
    batch_size=32,
    summary="DQN: one actor and one learner in lockstep. Mnih et al., Nature 2015.",
)

PRESETS: Mapping[str, Preset] = {each.name: each for each in (APEX, GORILA, DQN)}

apex = _function(APEX)
gorila = _function(GORILA)
dqn = _function(DQN)
