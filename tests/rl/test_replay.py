"""Prioritized replay: the law of its draws, keys, eviction, and a restart."""

import numpy as np
import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.rl.replay import Replay
from dure.rl.transitions import Column, Layout

LAYOUT = Layout((Column("observation", "float32", (3,)), Column("action", "int64"), Column("reward", "float32")))


def transitions(first, count):
    """Transitions that tell their keys."""
    keys = np.arange(first, first + count)
    observation = np.stack([keys, keys + 0.5, -keys], axis=1).astype(np.float32)
    return {"observation": observation, "action": keys, "reward": keys.astype(np.float32)}


def insert(replay, count, priorities=None):
    return replay.insert(transitions(replay.inserted, count), priorities)


def filled(priorities, **options):
    replay = Replay(LAYOUT, len(priorities), seed=0, **options)
    insert(replay, len(priorities), np.asarray(priorities, float))
    return replay


def live_priorities(replay):
    """The weights in the tree, by key."""
    keys = np.arange(replay.evicted, replay.inserted)
    return dict(zip(keys.tolist(), replay._tree.weights(keys % replay.storage).tolist(), strict=True))


def holds_what_was_inserted(sample):
    for name, column in transitions(0, int(sample.keys.max()) + 1).items():
        assert (sample.values[name] == column[sample.keys]).all()
        assert sample.values[name].flags.c_contiguous
        assert sample.values[name].dtype == column.dtype


# ---- the law


def test_probabilities_and_weights_of_the_fixture():
    sample = filled([1, 2, 3, 4], alpha=0.6).sample(100, beta=0.4)
    assert set(sample.keys.tolist()) == {0, 1, 2, 3}
    assert sample.probabilities == pytest.approx(
        np.array([0.148230, 0.224674, 0.286555, 0.340542])[sample.keys], abs=1e-6
    )
    assert sample.weights == pytest.approx(np.array([1, 0.846745, 0.768229, 0.716978])[sample.keys], abs=1e-6)


def test_every_segment_gives_a_transition_that_meets_it():
    priorities = np.random.default_rng(1).random(1000) + 0.01
    replay = filled(priorities, alpha=1.0)
    ends = np.cumsum(priorities)
    for _ in range(20):
        keys = replay.sample(64, beta=0.4).keys
        edges = np.arange(65) / 64 * ends[-1]
        assert (ends[keys] > edges[:-1] - 1e-9).all()
        assert (ends[keys] - priorities[keys] < edges[1:] + 1e-9).all()


def test_full_importance_weights_make_the_mean_unbiased():
    priorities, values = np.array([1.0, 5.0, 2.0, 0.3]), np.array([3.0, -1.0, 7.0, 2.0])
    sample = filled(priorities, alpha=0.6).sample(400, beta=1.0)
    keys, first = np.unique(sample.keys, return_index=True)
    probabilities = sample.probabilities[first]
    weights = (len(keys) * probabilities) ** -1.0
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert (probabilities * weights * values[keys]).sum() == pytest.approx(values.mean(), abs=1e-12)
    assert sample.weights[first] == pytest.approx(weights / weights.max(), rel=1e-6)


def test_alpha_0_is_uniform_replay():
    """The same uniform numbers draw the same transitions as equal priorities in a tree do."""
    uniform, equal = filled(np.arange(1, 257), alpha=0.0), filled(np.full(256, 4.0), alpha=0.5)
    for _ in range(10):
        one, other = uniform.sample(64, beta=0.7), equal.sample(64, beta=0.7)
        assert one.keys.tolist() == other.keys.tolist()
        assert (one.weights == 1).all()
        assert (other.weights == 1).all()
        assert one.probabilities.tolist() == other.probabilities.tolist() == [1 / 256] * 64
    assert uniform.update(np.array([3]), np.array([100.0])) == 1


def test_values_come_with_their_keys_after_the_ring_went_round():
    for alpha in (0.0, 0.6):
        replay = Replay(LAYOUT, 100, seed=1, alpha=alpha)
        for count in (1, 37, 62, 80, 100, 3):
            insert(replay, count, np.arange(1.0, count + 1))
            sample = replay.sample(64, beta=0.4)
            assert sample.keys.min() >= replay.evicted
            holds_what_was_inserted(sample)
        assert (replay.size, replay.inserted, replay.evicted, replay.sampled) == (100, 283, 183, 6 * 64)


def test_new_transitions_have_the_maximum_priority():
    replay = Replay(LAYOUT, 10, seed=0, alpha=1.0)
    insert(replay, 2)
    replay.update(np.array([0]), np.array([5.0]))
    replay.update(np.array([0]), np.array([2.0]))
    insert(replay, 1)
    assert live_priorities(replay) == {0: 2.0, 1: 1.0, 2: 5.0}


def test_the_maximum_is_of_priorities_without_alpha():
    replay = Replay(LAYOUT, 10, seed=0, alpha=0.5)
    insert(replay, 1, np.array([16.0]))
    insert(replay, 1)
    assert live_priorities(replay) == {0: 4.0, 1: 4.0}


def test_a_zero_priority_is_not_unreachable():
    replay = filled([0, 0, 0], alpha=0.6)
    assert set(replay.sample(30, beta=0.4).keys.tolist()) == {0, 1, 2}
    replay = filled([1, 0], alpha=0.6)
    assert live_priorities(replay)[1] > 0


# ---- keys and eviction


def test_keys_are_unique_and_ascend():
    replay, seen = Replay(LAYOUT, 30, seed=0), []
    for count in (7, 0, 30, 1, 12):
        seen += insert(replay, count)
    assert seen == list(range(50))


def test_soft_capacity():
    """37 transitions every 10 updates, excess evicted every 100."""
    replay = Replay(LAYOUT, 100, seed=0, alpha=1.0, storage=600)
    sizes = []
    for update in range(1, 1001):
        if update % 10 == 0:
            insert(replay, 37, np.arange(1.0, 38.0))
        if update % 100 == 0:
            sizes.append((replay.size, replay.trim(), replay.size))
    assert sizes[0] == (370, 270, 100)
    assert sizes[1:] == [(470, 370, 100)] * 9
    assert (replay.evicted, replay.inserted) == (3600, 3700)
    weights = live_priorities(replay)
    assert weights == {key: key % 37 + 1.0 for key in range(3600, 3700)}
    assert replay._tree.total == sum(weights.values())
    holds_what_was_inserted(replay.sample(256, beta=0.4))


def test_a_full_storage_evicts_the_oldest():
    replay = Replay(LAYOUT, 10, seed=0, alpha=1.0, storage=25)
    for _ in range(4):
        insert(replay, 11)
    assert (replay.size, replay.evicted) == (25, 19)
    assert (replay.trim(), replay.trim(), replay.size) == (15, 0, 10)
    assert replay._tree.total == 10


@pytest.mark.parametrize("storage", [100, 250])
def test_a_write_back_to_evicted_transitions_changes_nothing(storage):
    replay = Replay(LAYOUT, 100, seed=0, storage=storage)
    insert(replay, 100, np.full(100, 2.0))
    keys = np.unique(replay.sample(50, beta=0.4).keys)
    insert(replay, 95, np.full(95, 3.0))
    replay.trim()
    before = live_priorities(replay)
    assert replay.update(keys, np.full(len(keys), 9.0)) == (keys >= 95).sum() < len(keys)
    after = live_priorities(replay)
    assert {key: weight for key, weight in after.items() if key not in keys} == {
        key: weight for key, weight in before.items() if key not in keys
    }
    assert replay._tree.total == pytest.approx(sum(after.values()), rel=1e-14)


def test_a_write_back_to_keys_never_given_changes_nothing():
    replay = filled([1.0, 2.0], alpha=1.0)
    assert replay.update(np.array([2, -1, 1]), np.array([7.0, 7.0, 5.0])) == 1
    assert live_priorities(replay) == {0: 1.0, 1: 5.0}


def test_of_two_priorities_of_one_key_the_last_stays():
    replay = filled(np.ones(50), alpha=1.0)
    assert replay.update(np.full(40, 7), np.arange(1.0, 41.0)) == 40
    assert live_priorities(replay)[7] == 40


# ---- restart


@pytest.mark.parametrize("alpha", [0.0, 0.6])
def test_a_restart_continues_bit_for_bit(alpha):
    def run(replay, rounds):
        rng, seen = np.random.default_rng(replay.inserted), []
        for _ in range(rounds):
            insert(replay, 13, rng.random(13) * 3)
            insert(replay, 2)
            sample = replay.sample(32, beta=0.4)
            replay.update(sample.keys, rng.random(32))
            replay.trim()
            seen.append([sample.keys, sample.weights, sample.probabilities, *sample.values.values()])
        return seen

    options = {"seed": 5, "alpha": alpha, "storage": 130}
    replay = Replay(LAYOUT, 100, **options)
    run(replay, 20)
    replay.update(np.array([replay.evicted]), np.array([7.0]))
    again = Replay(LAYOUT, 100, **options | {"seed": 6})
    run(again, 3)
    state = replay.state().cloned()
    again.restore(state)
    assert (again.inserted, again.sampled, again.evicted) == (replay.inserted, replay.sampled, replay.evicted)
    for one, other in zip(run(replay, 30), run(again, 30), strict=True):
        for ours, theirs in zip(one, other, strict=True):
            assert np.array_equal(ours, theirs)


def test_a_state_shares_no_memory():
    replay = filled([1.0, 2.0], alpha=1.0)
    state = replay.state()
    replay.update(np.array([0, 1]), np.array([8.0, 8.0]))
    insert(replay, 2)
    assert state.tensors["weights"].tolist() == [1, 2]
    assert state.tensors["columns.action"].tolist() == [0, 1]


def test_a_state_that_does_not_fit():
    state = filled(np.ones(11)).state()
    with raising(UsageError, "of 10"):
        Replay(LAYOUT, 10, seed=0).restore(state)


# ---- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.zeros(3, np.float32)}, "2"),
        ({"action": np.zeros(2, np.float32)}, "action"),
        ({"other": np.zeros(2)}, "action"),
    ],
)
def test_wrong_transitions(change, message):
    with raising(UsageError, message):
        Replay(LAYOUT, 10, seed=0).insert(transitions(0, 2) | change, None)


@pytest.mark.parametrize("priorities", [[1, np.nan], [1, np.inf], [1, -1], [1], [[1, 1]]])
def test_wrong_priorities(priorities):
    replay = filled([1.0, 1.0])
    with raising(UsageError, "least 0"):
        replay.update(np.array([0, 1]), np.array(priorities, float))
    with raising(UsageError, "least 0"):
        insert(replay, 2, np.array(priorities, float))
    assert (replay.inserted, live_priorities(replay)) == (2, {0: 1.0, 1: 1.0})


def test_what_cannot_be():
    with raising(UsageError, "got 5"):
        Replay(LAYOUT, 5, seed=0, storage=4)
    with raising(UsageError, "alpha"):
        Replay(LAYOUT, 5, seed=0, alpha=-1)
    with raising(UsageError, "empty"):
        Replay(LAYOUT, 5, seed=0).sample(1, beta=0.4)
    with raising(UsageError, "of 5"):
        insert(Replay(LAYOUT, 5, seed=0), 6)
