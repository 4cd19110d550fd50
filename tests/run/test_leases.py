"""Leases of mini-batches: each mini-batch is used once, whoever asks, leaves or dies in which order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dure.run.leases import MOST, Leases

WORKERS = ["worker 0", "worker 1", "worker 2"]
EVENTS = st.lists(
    st.tuples(st.sampled_from(WORKERS), st.sampled_from(["works", "works", "dies", "leaves"]), st.integers(0, MOST)),
    max_size=40,
)


@given(st.integers(0, 70), EVENTS)
def test_every_mini_batch_is_used_and_only_unreported_ones_of_the_dead_twice(total, events):
    leases, used, lost = Leases(total), [], 0
    held = {}
    for name, event, steps in events:
        left = held.get(name) or leases.take(name, workers=3)
        done, rest = left[:steps], left[steps:]
        used += done
        if event == "works":
            leases.report(name, rest.start if rest else left.stop)
            held[name] = rest
            continue
        if event == "leaves":
            leases.report(name, rest.start if rest else left.stop)
        else:
            lost += len(done)  # it dies before its report
        leases.give_back(name)
        held[name] = range(0)
    for name in WORKERS:
        used += held.get(name, ())
    while work := leases.take("worker 3", workers=1):
        used += work
    for name in WORKERS:  # all have used up what they held
        assert not leases.take(name, workers=3)
    leases.take("worker 3", workers=1)
    assert leases.left == 0
    assert sorted(set(used)) == list(range(total))
    assert len(used) == total + lost


def test_ranges_become_short_at_the_end():
    leases, sizes = Leases(1000), []
    while work := leases.take("worker 0", workers=4):
        sizes.append(len(work))
    assert sizes[0] == MOST
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_a_late_report_of_an_earlier_range_changes_nothing():
    leases = Leases(100)
    first = leases.take("worker 0", workers=1)
    second = leases.take("worker 0", workers=1)
    leases.report("worker 0", first.stop)
    leases.give_back("worker 0")
    assert leases.take("worker 1", workers=1) == second
