"""References to frames: each frame once, whatever the observations are."""

from __future__ import annotations

import numpy as np
import pytest

from dure.rl.frames import FrameWindow
from dure.rl.transitions import FRAMES, FrameLayout

STACK, STEPS = 3, 5
RNG = np.random.default_rng(0)


def frames(count):
    return RNG.integers(0, 256, (count, 4, 4)).astype(np.uint8)


@pytest.fixture
def window():
    return FrameWindow(FrameLayout((4, 4), STACK), 1, STEPS)


def test_a_stack_that_slides_adds_one_frame_and_another_observation_all_of_its_own(window):
    film = frames(STACK + 1)
    first = window.whole(0, film[:STACK])
    second = window.next(0, first, film[1:])
    assert (second[:-1] == first[1:]).all()
    color = frames(STACK)
    third = window.next(0, second, color)
    assert not np.isin(third, second).any()
    assert (window.stacked(np.stack([first, second, third])) == np.stack([film[:STACK], film[1:], color])).all()


def test_the_observations_of_the_last_steps_stay_where_each_step_ends_an_episode(window):
    pending = []
    for _ in range(4 * STEPS):
        first, last = frames(STACK), frames(STACK)
        before = window.whole(0, first)
        pending = [*pending, (before, window.next(0, before, last), first, last)][-STEPS:]
        for old, new, *observations in pending:
            assert (window.stacked(np.stack([old, new])) == np.stack(observations)).all()
    packed = window.packed({"observation": pending[0][0][None], "next_observation": pending[0][1][None]})
    assert len(packed[FRAMES]) == 2 * STACK
