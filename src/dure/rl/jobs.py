"""Jobs of distributed reinforcement learning, by the names that `dure rl` and `dure train` have for them.

| job      | actors, replays              | learners              | algorithm                              |
|----------|------------------------------|-----------------------|----------------------------------------|
| `apex`   | many, one shared replay      | one                   | double dueling DQN of 3 steps, or DPG  |
| `gorila` | one of each for each learner | several, over servers | DQN                                    |
| `dqn`    | one, in lockstep             | one                   | DQN                                    |

Ape-X takes DPG where actions are continuous.

The defaults for vectors and continuous actions learn small environments in minutes. For images the network, the
optimizers of Ape-X and DQN, the exponents of priorities, the frames between two pulls and the samples of DQN for each
insert are those of the papers; the sizes are those of one machine:

| images           | in the papers                                       | here                          |
| batch            | Ape-X 512                                           | 32                            |
| replay, smallest | 2 million transitions (DQN, Gorila 1 million frames), 50,000 | 100,000, 5,000       |
| target           | every 2,500 updates (DQN 10,000, Gorila 60,000)     | 500                           |
| exploration      | Ape-X: ladder 7; DQN: epsilon 0.1 after 1 million frames | ladder 3; 0.05 after 20,000 |
| samples          | Ape-X: without a limit, 0.8 for each insert; 16 batches prefetched | 8; 2           |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_type_hints

import torch
from torch import nn

from dure.core import user_code
from dure.core.spec_text import nearest
from dure.core.user_code import as_name, explain_user_errors
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.rl.companions import ActorsAndReplays
from dure.rl.dpg import Dpg
from dure.rl.dqn import Dqn
from dure.rl.environments import environment
from dure.rl.settings import RlSettings
from dure.rl.spaces import arrays, is_image

if TYPE_CHECKING:
    from dure.rl.algorithm import RlAlgorithm
    from dure.rl.environments import Factory

STEPS = 10_000
"""Steps of a learner, where nothing else ends a run."""


VECTORS, IMAGES, CONTINUOUS = "vectors", "images", "continuous actions"
"""Kinds of environments: observations that are vectors or images, and continuous actions."""


@dataclass(frozen=True)
class Suited:
    """The algorithm, settings and optimizer for one kind of environment."""

    algorithm: Any
    settings: RlSettings
    optimizer: OptimizerSpec
    batch_size: int


@dataclass(frozen=True)
class Preset:
    """The job `name`: its algorithm, settings and optimizer for each kind of environment."""

    name: str
    summary: str
    suited: Mapping[str, Suited]

    def parameters(self) -> dict[str, Any]:
        """The parameters of the job's function, with their types."""
        algorithms = {type(each.algorithm) for each in self.suited.values()}
        of_algorithms = {key.rstrip("_"): hint for kind in algorithms for key, hint in get_type_hints(kind).items()}
        return {"env": str, "network": str, "episodes": int, **get_type_hints(RlSettings), **of_algorithms}

    def job(self, *, env: Any = "CartPole-v1", network: Any = None, episodes: int = 10, **given: Any) -> Job:
        """Make the job; parameters that are left out, or None, are those that suit the environment."""
        env = as_name(env) if isinstance(env, str) else env
        factory = environment(env) if isinstance(env, str) else env
        kind = _kind(factory)
        suited = self.suited[kind]
        of_algorithm = {each.name.rstrip("_"): each.name for each in fields(suited.algorithm)}
        values = {name: value for name, value in given.items() if value is not None}
        own = {of_algorithm[name]: values.pop(name) for name in list(values) if name in of_algorithm}
        known = {each.name for each in fields(RlSettings)}
        if unknown := sorted(values.keys() - known):
            raise UsageError(
                f"{unknown[0]} is no parameter of {self.name} for an environment of {kind}; it has "
                f"{', '.join(sorted({*known, *of_algorithm}))}.{nearest(unknown[0], {*known, *of_algorithm})}"
            )
        return rl_job(
            replace(suited.algorithm, **own),
            factory,
            replace(suited.settings, **values),
            name=self.name,
            env=env if isinstance(env, str) else getattr(env, "__name__", "an environment"),
            optimizer=suited.optimizer,
            batch_size=suited.batch_size,
            network=_network(network) if isinstance(network, str) else network,
            episodes=episodes,
        )


def _kind(factory: Factory) -> str:
    """The kind of an environment."""
    from gymnasium.spaces import Box

    made = factory()
    observations, actions = made.observation_space, made.action_space
    made.close()
    if isinstance(actions, Box):
        return CONTINUOUS
    return IMAGES if is_image(arrays(observations)) else VECTORS


def _network(text: str) -> Callable[[], nn.Module]:
    """The function that `text` names, FILE.py:FUNCTION. Raises `UsageError` where there is none."""
    named = user_code.split(as_name(text))
    function = None if named is None else getattr(user_code.run(named[0]), named[1], None)
    if named is None or not callable(function):
        raise UsageError(f"network={text!r} names no function. Write FILE.py:FUNCTION, which returns the module.")
    return user_code.beside(named[0], function)


def _function(preset: Preset) -> Callable[..., Job]:
    """The function of a job, with the parameters of `preset` in its signature."""

    def made(**given: Any) -> Job:
        return preset.job(**given)

    made.__name__ = made.__qualname__ = preset.name
    made.__doc__ = preset.summary
    made.__annotations__ = preset.parameters()
    made.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
            for name, hint in preset.parameters().items()
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
    if network is not None:
        _check_network(network, algorithm.network(*spaces), example)
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


def _check_network(network: Callable[[], nn.Module], own: nn.Module, example: torch.Tensor) -> None:
    """Raise `UsageError` if a module of `network` does not give the outputs that the algorithm's `own` gives."""
    module = network()
    if missing := [name for name in ("policy", "critic") if hasattr(own, name) and not hasattr(module, name)]:
        raise UsageError(
            f"the network needs the methods policy and critic for continuous actions; it has no {missing[0]}."
        )
    if hasattr(own, "policy"):
        if type(module).forward is nn.Module.forward:
            raise UsageError(
                "the network needs a method forward, whose operations are counted. Return "
                "self.critic(observations, self.policy(observations)) in it."
            )
        return
    with torch.inference_mode(), explain_user_errors(f"the network, given observations {tuple(example.shape)}, raised"):
        found = module.eval()(example)  # an actor acts so, perhaps in one environment
    wanted = own(example).shape
    if getattr(found, "shape", None) != wanted:
        raise UsageError(
            f"the network gives {_described(found)} for {len(example)} observation, and one value for each action is "
            f"needed: {tuple(wanted)}."
        )


def _described(outputs: Any) -> str:
    return f"outputs of shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else type(outputs).__name__


_APEX = RlSettings(soft=True, samples_per_insert=32.0, send=20, pull_every=20, ladder=3.0, target_every=128)
_OF_ATARI: Mapping[str, Any] = {"min_size": 5_000, "target_every": 500, "send": 50, "act_seconds": 2e-3}
_ADAM = OptimizerSpec("adam", lr=1e-3, clip=10.0)

APEX = Preset(
    "apex",
    "Ape-X: many actors, one prioritised replay, one learner. Horgan et al., ICLR 2018.",
    {
        VECTORS: Suited(Dqn(loss_="huber"), replace(_APEX, anneal=1_000), replace(_ADAM, lr=2e-3), 64),
        IMAGES: Suited(
            Dqn(hidden=(512,)),
            replace(_APEX, samples_per_insert=8.0, pull_every=100, **_OF_ATARI),
            OptimizerSpec("rmsprop", lr=0.00025 / 4, eps=1.5e-7, clip=40.0),
            32,
        ),
        CONTINUOUS: Suited(Dpg(n_step=3, hidden=(128, 128)), replace(_APEX, target_every=100), _ADAM, 64),
    },
)

_PLAIN = Dqn(n_step=1, double=False, dueling=False, loss_="huber")

_GORILA = RlSettings(
    actors=2, bundled=True, alpha=0.0, ladder=0.0, epsilon=0.05, anneal=5_000, pull_every=1, send=1, target_every=500,
    samples_per_insert=32.0,
)  # fmt: skip

GORILA = Preset(
    "gorila",
    "Gorila: bundles of an actor, a replay and a learner, over parameter servers. Nair et al., 2015.",
    {
        VECTORS: Suited(
            Dqn(n_step=1, double=False, dueling=False, loss_="huber"), _GORILA, replace(_ADAM, clip=None), 32
        ),
        IMAGES: Suited(
            replace(_PLAIN, hidden=(512,)),
            replace(_GORILA, samples_per_insert=8.0, **{**_OF_ATARI, "send": 1}),
            OptimizerSpec("adagrad", lr=0.001),
            32,
        ),
        CONTINUOUS: Suited(Dpg(n_step=1, hidden=(128, 128)), _GORILA, replace(_ADAM, clip=None), 32),
    },
)

_DQN = replace(_GORILA, actors=1, bundled=False, prefetch=0, lockstep=True)

DQN = Preset(
    "dqn",
    "DQN: one actor and one learner in lockstep. Mnih et al., Nature 2015.",
    {
        VECTORS: Suited(_PLAIN, _DQN, replace(_ADAM, clip=None), 32),
        IMAGES: Suited(
            replace(_PLAIN, hidden=(512,)),
            replace(_DQN, samples_per_insert=8.0, **{**_OF_ATARI, "send": 1}),
            OptimizerSpec("rmsprop", lr=0.00025, eps=0.01 / 32**2),  # 0.01 for a sum over the batch, not its mean
            32,
        ),
        CONTINUOUS: Suited(Dpg(n_step=1, hidden=(128, 128)), _DQN, replace(_ADAM, clip=None), 32),
    },
)

PRESETS: Mapping[str, Preset] = {each.name: each for each in (APEX, GORILA, DQN)}

apex = _function(APEX)
gorila = _function(GORILA)
dqn = _function(DQN)
