"""Returns of n steps: the worked example, and episodes against a direct sum."""

import numpy as np
import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.rl.transitions import Column, FrameLayout, Item, Layout, NStep, columns

REWARDS = [1.0, 2.0, 3.0, 4.0, 5.0]
VALUES = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
"""Bootstrap values of the states s_0 .. s_5."""


def episode(windows, rewards, *, truncated=False, ends=True, stream=0, first=0):
    """The items of an episode whose observations are numbered from `first`."""
    items = []
    for step, reward in enumerate(rewards):
        end = ends and step == len(rewards) - 1
        items += windows.add(
            stream,
            first + step,
            -step,
            reward,
            first + step + 1,
            terminated=end and not truncated,
            truncated=end and truncated,
        )
    return items


def targets(items, values):
    return [item.reward + item.discount * values[item.next_observation] for item in items]


@pytest.mark.parametrize(
    ("truncated", "expected"), [(False, [34.39, 44.39, 10.65, 8.5, 5.0]), (True, [34.39, 44.39, 54.39, 57.1, 59.0])]
)
def test_worked_example(truncated, expected):
    items = episode(NStep(3, 0.9), REWARDS, truncated=truncated)
    assert targets(items, VALUES) == pytest.approx(expected, abs=1e-12)
    assert [item.observation for item in items] == [0, 1, 2, 3, 4]
    assert [item.action for item in items] == [0, -1, -2, -3, -4]
    assert [item.next_observation for item in items] == [3, 4, 5, 5, 5]


def test_one_step_gives_ordinary_transitions():
    items = episode(NStep(1, 0.9), REWARDS)
    assert items == [Item(t, -t, r, 0.9 if t < 4 else 0.0, t + 1) for t, r in enumerate(REWARDS)]


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("truncated", [False, True])
def test_random_episodes_equal_a_direct_sum(n, truncated):
    rng, windows, gamma = np.random.default_rng(n), NStep(n, 0.97), 0.97
    for length in (1, 2, n, n + 1, 30):
        rewards, values = rng.normal(size=length), rng.normal(size=length + 1)
        if not truncated:
            values[length] = 0
        items = episode(windows, rewards, truncated=truncated)
        assert len(items) == length
        for t, target in enumerate(targets(items, values)):
            m = min(n, length - t)
            direct = sum(gamma**j * rewards[t + j] for j in range(m)) + gamma**m * values[t + m]
            assert target == pytest.approx(direct, abs=1e-12)


def test_a_step_that_terminates_at_its_time_limit_does_not_bootstrap():
    (item,) = NStep(3, 0.9).add(0, "s", "a", 1.0, "t", terminated=True, truncated=True)
    assert item.discount == 0


def test_streams_and_episodes_do_not_mix():
    windows = NStep(3, 1.0)
    assert episode(windows, [1.0, 1.0], ends=False, stream=0) == []
    assert [item.reward for item in episode(windows, [10.0, 10.0], stream=1, first=100)] == [20, 10]
    assert [item.reward for item in episode(windows, [1.0], stream=0, first=2)] == [3, 2, 1]
    assert [item.reward for item in episode(windows, [5.0], stream=0, first=50)] == [5]


def test_observations_are_handed_through():
    first, second = object(), object()
    (item,) = NStep(1, 0.9).add(0, first, 0, 1.0, second, terminated=False, truncated=False)
    assert item.observation is first
    assert item.next_observation is second


def test_columns_have_the_types_of_the_layout():
    floats = [Column(name, "float32") for name in ("reward", "discount")]
    pair = [Column(name, "float32", (2,)) for name in ("observation", "next_observation")]
    item = Item(np.zeros(2), np.int64(3), 1.5, 0.5, np.ones(2))
    found = columns([item] * 3, Layout((*pair, Column("action", "int64"), *floats)))
    assert {name: (str(each.dtype), each.shape) for name, each in found.items()} == {
        "observation": ("float32", (3, 2)),
        "next_observation": ("float32", (3, 2)),
        "action": ("int64", (3,)),
        "reward": ("float32", (3,)),
        "discount": ("float32", (3,)),
    }
    assert found["next_observation"].tolist() == [[1, 1]] * 3


def test_columns_of_frames_are_references():
    stacks = [Column(name, "uint8", (4, 8, 8)) for name in ("observation", "next_observation")]
    item = Item((0, 1, 2, 300), 0, 0.0, 1.0, (1, 2, 300, 4))
    found = columns([item], Layout((*stacks, Column("reward", "float32")), FrameLayout((8, 8), 4)))
    assert found["observation"].dtype == np.int32
    assert found["observation"].tolist() == [[0, 1, 2, 300]]


@pytest.mark.parametrize(("n", "gamma", "message"), [(0, 0.9, "least"), (3, 1.1, "between 0")])
def test_values_out_of_range(n, gamma, message):
    with raising(UsageError, message):
        NStep(n, gamma)
