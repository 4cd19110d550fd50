"""Streams of episodes: observations at ends, seeds, counts, and environments by name."""

import sys
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from support.wording import raising

from dure.errors import UsageError
from dure.rl.environments import Environments, Episode, environment
from dure.rl.transitions import NStep


class Tagged(gymnasium.Env):
    """Observations are (episode, step). Episodes have random lengths, and end in one of three ways."""

    observation_space = Box(0, np.inf, (2,), np.float32)
    action_space = Discrete(2)
    made: ClassVar[list["Tagged"]] = []

    def __init__(self):
        self.episode, self.log = -1, []
        Tagged.made.append(self)

    def seen(self):
        return np.array([self.episode, self.steps], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        self.length, self.end = int(self.np_random.integers(1, 8)), int(self.np_random.integers(3))
        return self.seen(), {}

    def step(self, action):
        self.steps += 1
        over = self.steps == self.length
        if over:
            self.log.append((self.end != 0, self.end != 1))
        return self.seen(), 10.0 * self.steps, over and self.end != 0, over and self.end != 1, {}


@pytest.mark.parametrize("n", [1, 3])
def test_no_transition_enters_the_next_episode(n):
    environments, windows, steps = Environments(Tagged, 3, 0), NStep(n, 0.5), 200
    items, ends = [], {}
    for _ in range(steps):
        before = environments.observations
        step = environments.step(np.zeros(3, np.int64))
        for i in range(3):
            if step.terminated[i] or step.truncated[i]:
                ends[i, step.final[i][0]] = bool(step.terminated[i]), step.final[i][1]
                assert step.observations[i].tolist() == [step.final[i][0] + 1, 0]
            else:
                assert step.observations[i].tolist() == step.final[i].tolist()
            items += [
                (i, item)
                for item in windows.add(
                    i,
                    before[i],
                    0,
                    step.rewards[i],
                    step.final[i],
                    terminated=step.terminated[i],
                    truncated=step.truncated[i],
                )
            ]
    assert len(ends) > 60
    assert 3 * steps - 3 * n < len(items) <= 3 * steps
    for i, item in items:
        episode, at = item.observation
        following, reached = item.next_observation
        terminated, length = ends.get((i, episode), (False, np.inf))
        assert following == episode
        assert 1 <= reached - at == min(n, length - at)
        assert item.discount == (0 if terminated and reached == length else 0.5 ** (reached - at))


def test_arrays_of_a_step_are_never_written_again():
    environments = Environments(Tagged, 2, 0)
    kept = [(environments.observations, environments.observations.copy())]
    for _ in range(20):
        step = environments.step(np.zeros(2, np.int64))
        kept += [(each, each.copy()) for each in step[:5]]
    assert all(np.array_equal(now, then) for now, then in kept)


def test_episodes_are_counted():
    environments, ended = Environments(Tagged, 2, 0), []
    rewards = np.zeros(2)
    totals = {0: [], 1: []}
    for _ in range(50):
        step = environments.step(np.zeros(2, np.int64))
        rewards += step.rewards
        for episode in step.ended:
            totals[episode.stream].append(rewards[episode.stream])
            rewards[episode.stream] = 0
            assert episode.length == step.final[episode.stream][1]
        ended += step.ended
    assert len(ended) > 10
    for stream, expected in totals.items():
        assert [each.episode_return for each in ended if each.stream == stream] == expected
    assert all(each.frames == each.length for each in ended)
    assert ended[0] == Episode(ended[0].stream, sum(10.0 * k for k in range(1, ended[0].length + 1)), *ended[0][2:])


def test_the_kind_of_an_end_is_handed_on():
    Tagged.made.clear()
    environments, seen = Environments(Tagged, 2, 0), ([], [])
    for _ in range(60):
        step = environments.step(np.zeros(2, np.int64))
        for episode in step.ended:
            i = episode.stream
            seen[i].append((bool(step.terminated[i]), bool(step.truncated[i])))
    assert [each.log for each in Tagged.made] == list(seen)
    assert {*seen[0], *seen[1]} == {(True, False), (False, True), (True, True)}


def first_observations(count, seed):
    """The first observations of the first three episodes or more of each of `count` streams."""
    environments = Environments(environment("CartPole-v1"), count, seed)
    found = [*environments.observations]
    while len(found) < 3 * count:
        step = environments.step(np.zeros(count, np.int64))
        found += [step.observations[episode.stream] for episode in step.ended]
    environments.close()
    return np.stack(found)


def test_streams_have_seeds_of_their_own():
    found = first_observations(4, 7)
    assert np.array_equal(found, first_observations(4, 7))
    everything = np.concatenate([found, first_observations(4, 8)])
    assert len(np.unique(everything, axis=0)) == len(everything)


def test_rewards_are_as_they_are_outside_of_atari():
    environments = Environments(environment("Pendulum-v1"), 2, 0)
    assert environments.frames_per_step == 1
    assert environments.observation_space.shape == (3,)
    step = environments.step(np.zeros((2, 1), np.float32))
    assert step.rewards.dtype == np.float32
    assert step.rewards.min() < -1


OF_USER = """
import gymnasium
from parts import LIMIT

def mine():
    return gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)

def broken():
    raise RuntimeError("no board")

def wrong():
    return 3

def late():
    from pieces import LIMIT
    return gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.py").write_text(OF_USER)
    (tmp_path / "parts.py").write_text("LIMIT = 5\n")
    (tmp_path / "pieces.py").write_text("LIMIT = 5\n")
    return "lab.py"


@pytest.mark.parametrize("name", ["mine", "late"])
def test_functions_of_a_file(file, name):
    environments = Environments(environment(f"{file}:{name}"), 1, 0)
    steps = [environments.step(np.array([k % 2])) for k in range(5)]
    assert [bool(step.truncated[0]) for step in steps] == [False] * 4 + [True]


def test_functions_of_a_file_that_do_not_work(file):
    with raising(UsageError, "other"):
        environment(f"{file}:other")
    with raising(UsageError, "FUNCTION"):
        environment(file)
    with raising(UsageError, "missing"):
        environment("missing.py:mine")
    with raising(UsageError, "line 9"):
        Environments(environment(f"{file}:broken"), 1, 0)
    with raising(UsageError, "gymnasium"):
        Environments(environment(f"{file}:wrong"), 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Cartpole-v1", "Cartpole-v1"),
        ("CartPole-v7", "CartPole-v1"),
        ("cartpole", "CartPole-v1"),
        ("LunarLander-v2", "LunarLander-v3"),
        ("qwxz", "qwxz"),
        ("no_such_package:Game-v0", "no_such_package"),
    ],
)
def test_ids_that_do_not_exist(text, message):
    with raising(UsageError, message):
        environment(text)


@pytest.mark.parametrize(
    ("text", "package", "extra"), [("CartPole-v1", "gymnasium", "rl"), ("ALE/Pong-v5", "ale_py", "atari")]
)
def test_packages_that_are_not_installed(monkeypatch, text, package, extra):
    monkeypatch.setitem(sys.modules, package, None)  # an import of it fails as if it were not installed
    with pytest.raises(UsageError, match=rf'{text} needs {package} .*pip install "dure\[{extra}\]"'):
        environment(text)


def test_observations_must_be_arrays():
    class Named(Tagged):
        observation_space = Dict(position=Box(0, 1, (2,), np.float32))

    with raising(UsageError, "FlattenObservation"):
        Environments(Named, 2, 0)
    with raising(UsageError, "got 0"):
        Environments(Tagged, 0, 0)


def test_environments_whose_packages_are_not_installed():
    gymnasium.register("Missing-v0", entry_point="no_such_package:Missing")
    try:
        with raising(UsageError, "no_such_package"):
            Environments(environment("Missing-v0"), 1, 0)
    finally:
        del gymnasium.registry["Missing-v0"]


# ---- Atari


@pytest.mark.parametrize("text", ["Pong-v5", "ALE/pong", "ALE/Pogn-v5"])
def test_games_that_do_not_exist(text):
    pytest.importorskip("ale_py")
    with pytest.raises(UsageError, match="Did you mean ALE/Pong-v5"):
        environment(text)


def test_games_without_repeated_actions_are_processed_too():
    pytest.importorskip("ale_py")
    environments = Environments(environment("PongNoFrameskip-v4"), 1, 0)
    assert environments.frames_per_step == 4
    assert environments.observations.shape == (1, 4, 84, 84)


def test_atari_games_are_processed():
    pytest.importorskip("ale_py")
    environments = Environments(environment("ALE/Pong-v5"), 2, 0)
    assert environments.frames_per_step == 4
    assert environments.observation_space == Box(0, 255, (4, 84, 84), np.uint8)
    assert (environments.observations.dtype, environments.observations.shape) == (np.uint8, (2, 4, 84, 84))
    for _ in range(5):
        before = environments.observations
        step = environments.step(np.array([2, 3]))
        assert np.array_equal(step.final[:, :3], before[:, 1:])
        assert not np.array_equal(step.final[:, 3], before[:, 3])


def test_learning_sees_clipped_rewards_and_reports_see_the_game_s():
    pytest.importorskip("ale_py")
    environments = Environments(environment("ALE/MsPacman-v5"), 1, 0)
    rng, rewards, ended = np.random.default_rng(0), [], []
    while not ended:
        step = environments.step(rng.integers(9, size=1))
        rewards.append(float(step.rewards[0]))
        ended = step.ended
    assert set(rewards) == {0.0, 1.0}
    assert ended[0].episode_return >= 10 * sum(rewards) > 100
    assert (ended[0].length, ended[0].frames) == (len(rewards), 4 * len(rewards))


def test_a_lost_life_does_not_end_an_episode():
    pytest.importorskip("ale_py")
    game = environment("ALE/MsPacman-v5")()
    game.reset(seed=0)
    rng, lives, terminated = np.random.default_rng(0), {3}, False
    while not terminated:
        *_, terminated, truncated, info = game.step(rng.integers(9))
        assert not truncated
        lives.add(info["lives"])
        assert terminated == (info["lives"] == 0)
    assert lives == {3, 2, 1, 0}


# ---- environments that break their promises


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    observation, reward = np.zeros(3, np.float32), 1.0

    def reset(self, *, seed=None, options=None):
        return np.zeros(3, np.float32), {}

    def step(self, action):
        return self.observation, self.reward, False, False, {}


@pytest.mark.parametrize(
    ("observation", "reward", "says"),
    [
        (np.zeros(4), 1.0, "observation_space"),
        (0.0, 1.0, "observation"),
        (np.array([0, np.nan, 0]), 1.0, "after 1"),
        (np.zeros(3), np.inf, "infinity"),
    ],
)
def test_an_observation_or_reward_that_no_learner_can_use_is_refused(observation, reward, says):
    broken = type("Given", (Broken,), {"observation": observation, "reward": reward})
    environments = Environments(broken, 2, seed=0)
    with raising(UsageError, says):
        environments.step(np.zeros(2, np.int64))
