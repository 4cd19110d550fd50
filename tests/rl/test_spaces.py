"""Spaces that an algorithm cannot use are refused with the right ones."""

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from support.wording import raising

from dure.errors import UsageError
from dure.rl.dpg import Dpg
from dure.rl.dqn import Dqn
from dure.rl.transitions import FrameLayout

VECTOR = Box(-1, 1, (3,), np.float32)
ACTIONS = Box(-2, 2, (1,), np.float32)


@pytest.mark.parametrize("of", ["layout", "network"])
@pytest.mark.parametrize(
    ("algorithm", "observations", "actions", "message"),
    [
        (Dqn(), Dict(a=VECTOR), Discrete(2), "FlattenObservation"),
        (Dqn(), Discrete(5), Discrete(2), "5"),
        (Dqn(), VECTOR, ACTIONS, "2"),
        (Dqn(), VECTOR, MultiDiscrete([2, 3]), "2"),
        (Dqn(), VECTOR, Discrete(3, start=1), "from 0,"),
        (Dpg(), Dict(a=VECTOR), ACTIONS, "FlattenObservation"),
        (Dpg(), VECTOR, Discrete(2), "2"),
        (Dpg(), VECTOR, Box(-1, 1, (2, 2), np.float32), "numbers"),
        (Dpg(), VECTOR, Box(-np.inf, np.inf, (1,), np.float32), "RescaleAction"),
    ],
)
def test_spaces_that_do_not_fit(of, algorithm, observations, actions, message):
    with raising(UsageError, message):
        getattr(algorithm, of)(observations, actions)


def test_images_that_do_not_fit():
    with raising(UsageError, "x 36"):
        Dqn().network(Box(0, 255, (84, 84, 3), np.uint8), Discrete(2))
    with raising(UsageError, "4"):
        Dpg().network(Box(0, 255, (4, 84, 84), np.uint8), ACTIONS)


def test_an_error_shows_the_begin_of_a_large_space():
    with pytest.raises(UsageError) as caught:
        Dqn().layout(Dict({f"sensor{i}": VECTOR for i in range(100)}), Discrete(2))
    assert len(str(caught.value)) < 500


def test_columns_of_vectors():
    layout = Dqn().layout(Box(-1, 1, (3,), np.float64), Discrete(2))
    assert {each.name: (each.dtype, each.shape) for each in layout.columns} == {
        "observation": ("float32", (3,)),
        "action": ("int64", ()),
        "reward": ("float32", ()),
        "discount": ("float32", ()),
        "next_observation": ("float32", (3,)),
    }
    assert layout.frames is None
    assert {each.name: (each.dtype, each.shape) for each in Dpg().layout(VECTOR, ACTIONS).columns}["action"] == (
        "float32",
        (1,),
    )


def test_columns_of_images_are_frames():
    layout = Dqn().layout(Box(0, 255, (4, 84, 84), np.uint8), Discrete(2))
    assert layout.frames == FrameLayout((84, 84), 4)
    assert (layout.columns[0].dtype, layout.columns[0].shape) == ("uint8", (4, 84, 84))


def test_booleans_take_a_byte():
    assert Dqn().layout(Box(0, 1, (10, 10, 4), np.bool_), Discrete(2)).columns[0].dtype == "uint8"
