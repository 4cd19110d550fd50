"""Environments of an actor: several streams of episodes, stepped together.

`environment` finds what a text names, and returns a function that makes such environments. Each process makes its own.

A stream starts its next episode in the step that ends the last one. A step therefore has two observations: the one
that the action led to (`final`), which belongs in a transition, and the one to act on next (`observations`).

    observations    o0    o1    o2  | p0    p1              the episode ends with o2; p0 is the next one's first
    final              o1    o2     |    p1
    next               o1    p0     |    p1

Atari games get the processing of Machado et al. (2018): an action is repeated for 4 frames, frames are gray with
84 x 84 pixels, an observation is a stack of 4, up to 30 no-ops start an episode, and a lost life does not end it.
Learning sees their rewards clipped to [-1, 1]; the return of an episode is the sum of the game's own rewards. Ids such
as ALE/Pong-v5 repeat the last action with a probability of 0.25; PongNoFrameskip-v4 does not, as the papers' games.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dure.core import user_code
from dure.core.packages import import_extra
from dure.errors import UsageError
from dure.rl.spaces import arrays

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing

    Factory = Callable[[], gymnasium.Env[Any, Any]]

FRAME_STACK = 4
NO_OPS = 30


class Episode(NamedTuple):
    """An episode that ended in stream `stream`. `frames` counts emulator frames, `length` steps of the agent."""

    stream: int
    episode_return: float
    length: int
    frames: int


class VectorStep(NamedTuple):
    """One step of every stream: arrays with one row per stream."""

    final: np.ndarray
    """The observation that each action led to."""
    observations: np.ndarray
    """The observations of the next actions: `final`, or the first observation of the next episode."""
    rewards: np.ndarray
    """Rewards for learning, float32."""
    terminated: np.ndarray
    truncated: np.ndarray
    ended: Sequence[Episode]


class Environments:
    """`count` environments of one kind, each with its own seed, derived from `seed`.

    Arrays that a step returns are never written again, so a caller may keep rows of them.

    Raises:
        UsageError: `factory` makes no environment, or its observations are not arrays.
    """

    def __init__(self, factory: Factory, count: int, seed: int) -> None:
        if count < 1:
            raise UsageError(f"an actor has at least one environment, got {count}.")
        self._environments = [_made(factory) for _ in range(count)]
        first = self._environments[0]
        self.observation_space = first.observation_space
        self.action_space = first.action_space
        self.frames_per_step = frames_per_step(first)
        self._clip = _atari(first) is not None
        self._returns = [0.0] * count
        self._lengths = [0] * count
        streams = np.random.SeedSequence(seed).spawn(count)
        self.observations = np.stack(
            [
                self._checked(each.reset(seed=int(stream.generate_state(1)[0]))[0])
                for each, stream in zip(self._environments, streams, strict=True)
            ]
        )

    def step(self, actions: np.ndarray) -> VectorStep:
        """Take one action, a row of `actions`, in each stream."""
        count = len(self._environments)
        after, rewards = np.empty_like(self.observations), np.empty(count, dtype=np.float32)
        terminated, truncated = np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.bool_)
        ended: list[int] = []
        for stream, environment in enumerate(self._environments):
            observation, reward, end, limit, _ = environment.step(actions[stream])
            after[stream], rewards[stream] = self._checked(observation), reward
            self._returns[stream] += float(reward)
            self._lengths[stream] += 1
            if end or limit:
                terminated[stream], truncated[stream] = end, limit
                ended.append(stream)
        final = after
        if ended:
            after = final.copy()
            for stream in ended:
                after[stream] = self._checked(self._environments[stream].reset()[0])
        self._check_finite(final, rewards)
        if self._clip:
            np.clip(rewards, -1, 1, out=rewards)
        self.observations = after
        return VectorStep(final, after, rewards, terminated, truncated, [self._episode(stream) for stream in ended])

    def _checked(self, observation: Any) -> Any:
        """`observation`, of the shape that its space has: an array of another shape could be broadcast to it."""
        if np.shape(observation) != self.observation_space.shape:
            raise UsageError(
                f"the environment gave an observation of shape {np.shape(observation)}, and its observation_space has "
                f"the shape {self.observation_space.shape}. Both must be the same."
            )
        return observation

    def _check_finite(self, observations: np.ndarray, rewards: np.ndarray) -> None:
        for found, values in (("an observation", observations), ("a reward", rewards)):
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise UsageError(
                    f"the environment gave {found} with NaN or infinity after {max(self._lengths)} steps of an "
                    "episode. Let its step return finite numbers."
                )

    def _episode(self, stream: int) -> Episode:
        """The episode that `stream` has just ended. The next one counts from zero."""
        length = self._lengths[stream]
        episode = Episode(stream, self._returns[stream], length, length * self.frames_per_step)
        self._returns[stream], self._lengths[stream] = 0.0, 0
        return episode

    def close(self) -> None:
        for each in self._environments:
            each.close()


def environment(text: str) -> Factory:
    """A function that makes environments of the kind `text`: an id of Gymnasium, or FILE.py:FUNCTION.

    An id may have the module that registers it before it, as in `minigrid:MiniGrid-Empty-8x8-v0`. Ids of `ALE/` and
    other Atari games get the processing above.

    Raises `UsageError` for an unknown id or file, and for packages that are not installed.
    """
    of_file = user_code.split(text)
    if of_file is not None:
        return _of_file(*of_file)
    if text.endswith(".py"):
        raise UsageError(f"{text} does not say which function makes the environment. Write {text}:FUNCTION.")
    (gymnasium,) = import_extra("rl", text, "gymnasium")
    module, _, name = text.rpartition(":")
    if module:
        with user_code.explain_user_errors(f"{text}: the module {module} cannot be imported:"):
            importlib.import_module(module)
    if name.startswith("ALE/") or (name not in gymnasium.registry and importlib.util.find_spec("ale_py")):
        import_extra("atari", text, "ale_py")  # it registers its games
    if name not in gymnasium.registry:
        raise UsageError(_unknown(name, gymnasium.registry))
    if str(gymnasium.spec(name).entry_point).startswith("ale_py."):
        import_extra("atari", text, "cv2")
        return partial(_atari_game, name)
    return partial(gymnasium.make, name)


def _unknown(name: str, known: Iterable[str]) -> str:
    """The text of an error: Gymnasium has no environment `name`."""
    plain = {re.sub(r"^ALE/|-v\d+$", "", each).lower(): each for each in sorted(known, key=_rank)}
    asked = re.sub(r"^ALE/|-v\d+$", "", name).lower()
    similar = [plain[each] for each in get_close_matches(asked, plain, n=3, cutoff=0.7)]
    advice = (
        f"Did you mean {' or '.join(similar)}?" if similar else "Write an id such as CartPole-v1, or FILE.py:FUNCTION."
    )
    games = "" if importlib.util.find_spec("ale_py") else ' Atari games (ALE/Pong-v5) need pip install "dure[atari]".'
    return f"Gymnasium has no environment {name!r}. {advice}{games}"


def _rank(name: str) -> tuple[bool, str]:
    """The order of ids: among those of one game, the id of `ALE/` is the last."""
    return name.startswith("ALE/"), name


def _of_file(file: str, name: str) -> Factory:
    """A function that calls function `name` of a user's `file`, which is run once."""
    function = getattr(user_code.run(file), name, None)
    if not callable(function):
        raise UsageError(f"{file} has no function {name!r}. Write FILE.py:FUNCTION; it returns a gymnasium.Env.")

    def made() -> Any:
        with user_code.imports_beside(Path(file)), user_code.explain_user_errors(f"{file}:{name} raised"):
            return function()

    return made


def _atari_game(name: str) -> gymnasium.Env[Any, Any]:
    """The Atari game `name`, processed."""
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    game = gymnasium.make(name, frameskip=1)  # the wrapper repeats actions
    return FrameStackObservation(AtariPreprocessing(game, noop_max=NO_OPS), FRAME_STACK)


def frames_per_step(environment: Any) -> int:
    """Emulator frames of a step: those that an Atari game repeats an action for, 1 for other environments."""
    atari = _atari(environment)
    return 1 if atari is None else int(atari.frame_skip)


def _atari(environment: Any) -> AtariPreprocessing | None:
    """The Atari processing among the wrappers of `environment`; None for other environments."""
    from gymnasium import Wrapper
    from gymnasium.wrappers import AtariPreprocessing

    while isinstance(environment, Wrapper):
        if isinstance(environment, AtariPreprocessing):
            return environment
        environment = environment.env
    return None


def _made(factory: Factory) -> gymnasium.Env[Any, Any]:
    """An environment with observations that are arrays. Raises `UsageError`."""
    import gymnasium

    try:
        made = factory()
    except (gymnasium.error.Error, ImportError) as error:  # among others, a package of the environment is missing
        raise UsageError(f"the environment cannot be made: {str(error).rstrip('.')}.") from error
    if not isinstance(made, gymnasium.Env):
        raise UsageError(f"an environment must be a gymnasium.Env, got {type(made).__name__}. Return one.")
    arrays(made.observation_space)
    return made
