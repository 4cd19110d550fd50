"""Frames stored once: stacks of a sample, and what eviction frees."""

import numpy as np
import pytest

from dure.errors import UsageError
from dure.rl.replay import Replay
from dure.rl.transitions import STACKED, Column, FrameLayout, Layout

SHAPE, STACK = (3, 2), 4
LAYOUT = Layout(
    (*(Column(name, "uint8", (STACK, *SHAPE)) for name in STACKED), Column("action", "int64")),
    FrameLayout(SHAPE, STACK),
)


def message(first, count):
    """Transitions of one endless film, whose frame t is full of t % 251, and the part of the film that they need."""
    frames = np.arange(first, first + count + STACK) % 251
    observation = np.arange(count)[:, None] + np.arange(STACK)
    return {
        "observation": observation.astype(np.int32),
        "next_observation": (observation + 1).astype(np.int32),
        "action": np.arange(first, first + count),
        "frames": np.broadcast_to(frames[:, None, None], (len(frames), *SHAPE)).astype(np.uint8),
    }


def insert(replay, count):
    return replay.insert(message(replay.inserted, count), None)


def is_film(sample):
    """Every observation is the part of the film that its key names, the next one a frame later."""
    for later, name in enumerate(STACKED):
        found = sample.values[name]
        film = (sample.keys[:, None] + np.arange(STACK) + later) % 251
        assert found.shape == (len(sample.keys), STACK, *SHAPE)
        assert found.dtype == np.uint8
        assert found.flags.c_contiguous
        assert (found == film[:, :, None, None]).all()
    assert (sample.values["action"] == sample.keys).all()


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_stacks_are_those_that_were_inserted(alpha):
    replay = Replay(LAYOUT, 100, seed=0, alpha=alpha)
    for _ in range(60):
        insert(replay, 7)
        is_film(replay.sample(32, beta=0.4))
    assert replay.inserted == 60 * 7


def test_a_ring_that_is_too_small_grows():
    """Messages of one transition have five frames each, more than memory was reserved for."""
    replay = Replay(LAYOUT, 50, seed=0)
    for _ in range(200):
        insert(replay, 1)
        is_film(replay.sample(16, beta=0.4))
    assert replay.nbytes == 50 * replay.layout.row.itemsize + 50 * (STACK + 1) * 6


def test_every_frame_is_stored_once():
    replay = Replay(LAYOUT, 1000, seed=0)
    for _ in range(20):
        insert(replay, 50)
    assert replay.nbytes == 1000 * replay.layout.row.itemsize + 20 * (50 + STACK) * 6


def test_frames_of_a_message_stay_until_its_last_transition_is_evicted():
    replay = Replay(LAYOUT, 20, seed=0, storage=60)
    for _ in range(4):
        insert(replay, 10)
    frames = 10 + STACK
    assert len(replay._frames) == 4 * frames
    replay.trim()
    assert len(replay._frames) == 2 * frames
    insert(replay, 5)
    replay.trim()
    assert (replay.evicted, len(replay._frames)) == (25, 2 * frames + 5 + STACK)
    is_film(replay.sample(200, beta=0.4))
    insert(replay, 5)
    replay.trim()
    assert (replay.evicted, len(replay._frames)) == (30, frames + 2 * (5 + STACK))


def test_a_restart_has_the_frames():
    replay = Replay(LAYOUT, 90, seed=0)
    for _ in range(50):
        insert(replay, 7)
    state = replay.state().cloned()
    again = Replay(LAYOUT, 90, seed=1)
    insert(again, 80)
    again.restore(state)
    assert again.nbytes == replay.nbytes
    for _ in range(30):
        insert(again, 11)
        insert(replay, 11)
        one, other = again.sample(40, beta=0.4), replay.sample(40, beta=0.4)
        is_film(one)
        assert one.keys.tolist() == other.keys.tolist()
        assert again.nbytes == replay.nbytes


@pytest.mark.parametrize("index", [-1, 7])
def test_references_to_frames_of_other_messages(index):
    values = message(0, 3)
    values["next_observation"][1, 2] = index
    refused(values, "next_observation refers to frames that are not among the 7")


@pytest.mark.parametrize("frames", [np.zeros((7, 2, 3), np.uint8), np.zeros((7, *SHAPE), np.float32)])
def test_frames_of_a_wrong_form(frames):
    refused(message(0, 3) | {"frames": frames}, r"frames must be uint8 of shape \(3, 2\)")


def refused(values, error):
    """A full replay refuses `values` and keeps what it has."""
    replay = Replay(LAYOUT, 10, seed=0)
    insert(replay, 10)
    nbytes = replay.nbytes
    with pytest.raises(UsageError, match=error):
        replay.insert(values, None)
    assert (replay.size, replay.evicted, replay.nbytes) == (10, 0, nbytes)
    is_film(replay.sample(40, beta=0.4))
