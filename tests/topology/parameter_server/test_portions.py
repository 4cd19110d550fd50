"""Portions: each is counted once whoever does it, however often, and a slow worker keeps nobody waiting for long."""

from __future__ import annotations

import heapq
import random

import pytest

from dure.topology.parameter_server.coordinator import Portions


def work_through(portions, count, speeds):
    """Seconds that workers of `speeds` (portions per second) need for a batch, and how many sums they made."""
    portions.begin(count)
    coming = []

    def give(worker, now):
        run = portions.give(worker, now)
        if run is not None:
            heapq.heappush(coming, (now + (run[1] - run[0]) / speeds[worker], worker, run))

    for worker in range(len(speeds)):
        give(worker, 0.0)
    made = 0
    while portions.left:
        now, worker, run = heapq.heappop(coming)
        made += 1
        portions.finish(worker, run, now)
        give(worker, now)
    return now, made


@pytest.mark.sampled(10)
@pytest.mark.parametrize("workers", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("count", [8, 16, 45, 128, 1000])
@pytest.mark.parametrize("most", [1, 8])
def test_one_worker_five_times_slower_costs_less_than_a_portion(workers, count, most):
    """In the first batch, where nobody's pace is known, and in the second."""
    speeds = [1.0] * (workers - 1) + [0.2]
    portions = Portions(workers, most)
    for _ in range(2):
        seconds, made = work_through(portions, count, speeds)
        assert seconds < count / sum(speeds) + 1.0
    if most > 1 and count >= 10 * workers:
        assert made < count / 1.3, "sums are sent one portion at a time"


def test_without_backup_tasks_it_would_cost_more(monkeypatch):
    monkeypatch.setattr(Portions, "_backup", lambda self: None)
    seconds, _ = work_through(Portions(16), 16, [1.0] * 15 + [0.2])
    assert seconds == 5.0


def test_a_worker_goes_on_where_it_left_off_and_begins_at_a_place_of_its_own():
    portions = Portions(4)
    portions.begin(40)
    starts = [portions.give(worker, 0.0) for worker in range(4)]
    assert starts == [(0, 1), (10, 11), (20, 21), (30, 31)]
    for step in range(1, 10):
        for worker in range(4):
            assert portions.finish(worker, (10 * worker + step - 1, 10 * worker + step), float(step))
            assert portions.give(worker, float(step)) == (10 * worker + step, 10 * worker + step + 1)


def test_who_has_no_more_goes_to_the_middle_of_the_longest_stretch():
    portions = Portions(2)
    portions.begin(9)
    for place in range(4, 9):
        assert portions.give(1, 0.0) == (place, place + 1)
        assert portions.finish(1, (place, place + 1), 1.0)
    assert portions.give(1, 1.0) == (2, 3)


def test_what_others_work_on_is_given_out_again_the_oldest_first():
    portions = Portions(3)
    portions.begin(2)
    assert [portions.give(worker, float(worker)) for worker in range(3)] == [(0, 1), (1, 2), (0, 1)]
    assert portions.finish(2, (0, 1), 3.0)
    assert not portions.finish(0, (0, 1), 3.0)
    assert portions.give(2, 3.0) == (1, 2)
    assert portions.give(0, 3.0) == (1, 2)
    assert portions.finish(0, (1, 2), 4.0)
    assert portions.left == 0
    assert portions.give(0, 4.0) is None


def test_who_leaves_leaves_to_the_others_what_they_work_on_too():
    portions = Portions(4)
    portions.begin(2)
    assert [portions.give(worker, 0.0) for worker in (0, 2, 1)] == [(0, 1), (1, 2), (0, 1)]
    portions.leave(0)
    assert portions.give(3, 1.0) == (1, 2), "portion 0 is not free: worker 1 has it"
    portions.leave(1)
    assert portions.give(0, 1.0) == (0, 1)


def test_a_sum_counts_as_a_whole_or_not_at_all():
    """A sum of four portions comes after another has done one of them: the other three are done again."""
    portions = Portions(2, most=4)
    work_through(portions, 16, [1.0, 1.0])  # so that both have a pace
    portions.begin(16)
    assert portions.give(0, 0.0) == (0, 4)
    portions.drop(1)
    given = set()
    while portions.left > 4:
        run = portions.give(1, 0.0)
        given.update(range(*run))
        assert portions.finish(1, run, 1.0)
    assert given == set(range(4, 16))
    assert portions.give(1, 1.0) == (0, 1)
    assert portions.finish(1, (0, 1), 2.0)
    assert not portions.finish(0, (0, 4), 3.0)
    assert portions.left == 3
    assert portions.give(0, 3.0) == (2, 3)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_every_portion_is_counted_once(seed):
    """Workers that finish in any order, die, come back, and report twice or too late."""
    chance = random.Random(seed)
    count, workers = chance.randrange(1, 60), chance.randrange(1, 6)
    portions = Portions(workers, chance.randrange(1, 9))
    counted = []
    old = []
    for now in range(3):
        portions.begin(count)
        counted.clear()
        out = {}
        for tick in range(100_000):
            if not portions.left:
                break
            worker = chance.randrange(workers)
            if chance.random() < 0.1:
                portions.leave(worker)
                out.pop(worker, None)
            elif worker in out:
                run = out.pop(worker)
                old.append((worker, run))
                if portions.finish(worker, run, now + tick):
                    counted.extend(range(*run))
            else:
                out[worker] = portions.give(worker, now + tick)
                assert out[worker] is not None, "somebody is left without work"
                assert 0 < out[worker][1] - out[worker][0] <= portions.most
        assert sorted(counted) == list(range(count))
        assert not any(portions.finish(worker, run, 0.0) for worker, run in old)
