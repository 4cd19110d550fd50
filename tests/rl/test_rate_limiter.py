"""Reverb's rule, with whole messages and batches."""

import threading

import pytest
from support.wording import raising

from dure.errors import UsageError
from dure.rl.services import RateLimiter


def test_the_rule():
    limiter = RateLimiter(samples_per_insert=2, min_size=10, buffer=8)
    assert not limiter.can_sample(1)
    limiter.inserted(10)
    assert limiter.error == 0
    assert (limiter.can_insert(4), limiter.can_sample(8)) == (True, True)
    limiter.inserted(4)  # 8 samples are due
    assert (limiter.can_insert(1), limiter.can_sample(16), limiter.can_sample(1)) == (False, True, True)
    limiter.sampled(16)  # 8 were taken too early
    assert (limiter.can_insert(8), limiter.can_sample(1)) == (True, False)
    assert limiter.can_insert(9) is True, "nothing can be sampled: an insert of any size must be admitted"


def test_nothing_is_sampled_before_the_smallest_size():
    limiter = RateLimiter(samples_per_insert=1, min_size=100, buffer=1000)
    limiter.inserted(99)
    assert not limiter.can_sample(1)
    limiter.inserted(1)
    assert limiter.can_sample(1)


@pytest.mark.parametrize(("message", "batch"), [(1, 1), (50, 32), (3, 512), (50, 512)])
@pytest.mark.parametrize("ratio", [0.78, 1, 8])
@pytest.mark.parametrize("eager", ["insert", "sample"])
def test_one_operation_is_always_admitted_and_the_error_bounded(message, batch, ratio, eager):
    limiter = RateLimiter(ratio, min_size=message, buffer=max(1, ratio))
    bound = limiter.buffer + max(message * ratio, batch)
    for _ in range(2000):
        insert, sample = limiter.can_insert(message), limiter.can_sample(batch)
        assert insert or sample
        if insert and (eager == "insert" or not sample):
            limiter.inserted(message)
        else:
            limiter.sampled(batch)
        assert limiter.inserts <= limiter.min_size or abs(limiter.error) <= bound
    assert limiter.samples / limiter.inserts == pytest.approx(ratio, rel=0.25)


def test_threads_stay_within_the_bound():
    limiter, changed, errors = RateLimiter(2, min_size=20, buffer=40), threading.Condition(), []

    def act(can, done, count, times):
        for _ in range(times):
            with changed:
                assert changed.wait_for(lambda: can(count), timeout=20)
                done(count)
                errors.append(limiter.error if limiter.inserts > limiter.min_size else 0)
                changed.notify_all()

    threads = [
        threading.Thread(target=act, args=(limiter.can_insert, limiter.inserted, 5, 400)),
        threading.Thread(target=act, args=(limiter.can_insert, limiter.inserted, 5, 400)),
        threading.Thread(target=act, args=(limiter.can_sample, limiter.sampled, 16, 498)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert len(errors) == 400 + 400 + 498
    assert max(map(abs, errors)) <= 40


def test_a_restart_keeps_the_counts():
    limiter = RateLimiter(2, min_size=10, buffer=8)
    limiter.inserted(14)
    limiter.sampled(3)
    again = RateLimiter(2, min_size=10, buffer=8)
    again.restore(limiter.state())
    assert (again.error, again.inserts, again.samples) == (limiter.error, 14, 3)


@pytest.mark.parametrize(
    ("values", "message"),
    [((0, 1, 1), "samples_per_insert"), ((1, 0, 1), "min_size"), ((8, 1, 7), "samples_per_insert)")],
)
def test_wrong_values(values, message):
    with raising(UsageError, message):
        RateLimiter(*values)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0, 6.4, 32.0, 96.0])
@pytest.mark.parametrize("buffer", [0, 100])
def test_batches_after_some_inserts_are_those_that_the_limiter_admits_one_by_one(ratio, buffer):
    limiter = RateLimiter(ratio, 7, max(buffer, ratio, 1.0))
    for inserts in range(60):
        while limiter.can_sample(32):
            limiter.sampled(32)
        assert limiter.batches(inserts, 32) == limiter.samples // 32
        limiter.inserted(1)
