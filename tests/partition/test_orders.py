"""Orders against the published timetables, and against closed forms for up to 8 stages and 16 micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest

from dure.partition import orders
from dure.partition.orders import Action, Kind
from dure.partition.schedule import TICK, Orders, Timetable, schedule

FlushOrder = Callable[[int, int, int, range], Iterator[Action]]
"""An order by rank, stages, micro-batches and mini-batches."""

STAGES = range(1, 9)
COUNTS = range(1, 17)
UNEQUAL: Mapping[Kind, float] = {"F": 10, "B": 20, "I": 12, "W": 8}
"""Durations that differ by kind."""


def flush(
    order: FlushOrder,
    stages: int,
    micro: int,
    *,
    chunks: int = 1,
    place: Callable[[int, int, int], int] = orders.looped,
    durations: Mapping[Kind, float] = TICK,
    batches: range = range(1),
) -> Timetable:
    workers = [list(order(rank, stages, micro, batches)) for rank in range(stages)]
    return schedule(Orders(workers, batches, lambda rank, chunk: place(rank, chunk, stages), micro, chunks), durations)


def looping(chunks: int) -> FlushOrder:
    """The interleaved order with so many chunks."""
    return lambda rank, stages, micro, batches: orders.interleaved(rank, stages, chunks, micro, batches)


def no_flush(order: Callable[[int, int, range], Iterator[Action]], stages: int, batches: range) -> Timetable:
    workers = [list(order(rank, stages, batches)) for rank in range(stages)]
    return schedule(Orders(workers, batches))


def sets(timetable: Timetable) -> list[int]:
    return [timetable.most_sets(rank) for rank in range(len(timetable.workers))]


def idle_between(timetable: Timetable) -> list[float]:
    """The idle time of each worker between the start of its first action and the end of its last."""
    return [row[-1].end - row[0].start - sum(each.end - each.start for each in row) for row in timetable.workers]


def cells(timetable: Timetable, ticks: int) -> list[str]:
    """The first `ticks` cells of each worker in the notation of the papers, with one tick for each action."""
    rows = []
    for row in timetable.workers:
        found = ["."] * max(ticks, int(timetable.makespan))
        for each in row:
            if each.action.kind != "U":
                number = each.action.batch + each.action.micro + 1  # one of the two is 0 here
                found[int(each.start)] = f"{each.action.kind}{number}{chr(39) * each.action.chunk}"
        rows.append(" ".join(found[:ticks]))
    return rows


def golden(text: str) -> list[str]:
    """The rows of a published timetable, that of the first worker first."""
    return [" ".join(line.partition("|")[2].split()) for line in text.strip().splitlines()]


# ---- published timetables


def test_the_stale_order_is_figure_5_of_the_survey() -> None:
    published = golden("""
        node 1 | F1  F2  F3  F4  F5  F6  F7  B1  F8  B2  F9  B3 F10  B4 F11
        node 2 |  .  F1  F2  F3  F4  F5  B1  F6  B2  F7  B3  F8  B4  F9  B5
        node 3 |  .   .  F1  F2  F3  B1  F4  B2  F5  B3  F6  B4  F7  B5  F8
        node 4 |  .   .   .  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6
    """)
    assert cells(no_flush(orders.stale, 4, range(20)), 15) == published


def test_the_order_of_pipedream() -> None:
    published = golden("""
        node 1 | F1  F2  F3  F4   .   .   .  B1  F5  B2  F6  B3  F7  B4  F8
        node 2 |  .  F1  F2  F3   .   .  B1  F4  B2  F5  B3  F6  B4  F7  B5
        node 3 |  .   .  F1  F2   .  B1  F3  B2  F4  B3  F5  B4  F6  B5  F7
        node 4 |  .   .   .  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5  F6  B6
    """)
    assert cells(no_flush(orders.pipedream, 4, range(20)), 15) == published


def test_the_order_of_gpipe() -> None:
    published = golden("""
        k=1 | F1 F2 F3 F4  .  .  .  .  .  . B4 B3 B2 B1
        k=2 |  . F1 F2 F3 F4  .  .  .  . B4 B3 B2 B1  .
        k=3 |  .  . F1 F2 F3 F4  .  . B4 B3 B2 B1  .  .
        k=4 |  .  .  . F1 F2 F3 F4 B4 B3 B2 B1  .  .  .
    """)
    assert cells(flush(orders.gpipe, 4, 4), 14) == published


def test_the_order_of_1f1b() -> None:
    published = golden("""
        k=1 | F1 F2 F3 F4  .  .  . B1 F5 B2 F6 B3  . B4  . B5  . B6
        k=2 |  . F1 F2 F3  .  . B1 F4 B2 F5 B3 F6 B4  . B5  . B6  .
        k=3 |  .  . F1 F2  . B1 F3 B2 F4 B3 F5 B4 F6 B5  . B6  .  .
        k=4 |  .  .  . F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6  .  .  .
    """)
    assert cells(flush(orders.one_f_one_b, 4, 6), 18) == published


def test_the_order_of_zb_h1() -> None:
    published = golden("""
        k=1 | F1 F2 F3 F4  .  .  . I1 W1 F5 I2 W2 F6 I3 W3 I4 W4 I5 W5 I6 W6
        k=2 |  . F1 F2 F3  .  . I1 F4 I2 W1 F5 I3 W2 F6 I4 W3 I5 W4 I6 W5 W6
        k=3 |  .  . F1 F2  . I1 F3 I2 F4 I3 W1 F5 I4 W2 F6 I5 W3 I6 W4 W5 W6
        k=4 |  .  .  . F1 I1 F2 I2 F3 I3 F4 I4 W1 F5 I5 W2 F6 I6 W3 W4 W5 W6
    """)
    assert cells(flush(orders.zero_bubble, 4, 6), 21) == published


def test_the_order_of_zb_v() -> None:
    published = golden("""
        k=1 | F1  F2  F3 F1' I1' W1' F2' I2' W2'  F4  I1  W1 F3' I3' W3'  I2  W2 F4' I4' W4'  I3  W3  I4  W4   .
        k=2 |  .  F1 F1'  F2 F2' I1' W1'  F3  I1  W1 F3' I2' W2'  F4  I2  W2 F4' I3' W3'  I3 I4'  I4  W3 W4'  W4
    """)
    timetable = flush(orders.zero_bubble_v, 2, 4, chunks=2, place=orders.v_shaped)
    assert cells(timetable, 25) == published


# ---- closed forms


@pytest.mark.parametrize("stages", STAGES)
def test_gpipe_and_1f1b_take_the_same_time_and_1f1b_keeps_less(stages: int) -> None:
    for micro in COUNTS:
        for durations in (TICK, UNEQUAL):
            all_forward = flush(orders.gpipe, stages, micro, durations=durations)
            in_turn = flush(
                orders.one_f_one_b,
                stages,
                micro,
                durations=durations,
            )
            for timetable in (all_forward, in_turn):
                assert timetable.makespan == (micro + stages - 1) * (durations["F"] + durations["B"])
                assert timetable.bubble == pytest.approx((stages - 1) / (micro + stages - 1))
            assert sets(all_forward) == [micro] * stages
            assert sets(in_turn) == [min(micro, stages - rank) for rank in range(stages)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stages", STAGES)
def test_interleaved_divides_the_bubble_by_the_chunks(stages: int) -> None:
    for micro in COUNTS:
        for chunks in (1, 2, 3, 4):
            if micro % max(1, micro // stages):
                with pytest.raises(ValueError, match=f"micro={micro} does not divide into"):
                    orders.round_size(stages, micro)
                continue
            timetable = flush(
                looping(chunks),
                stages,
                micro,
                chunks=chunks,
            )
            assert timetable.makespan == 2 * (chunks * max(micro, stages) + min(micro, stages) - 1)
            if micro >= stages:
                assert timetable.bubble == pytest.approx((stages - 1) / (chunks * micro + stages - 1))
            size = orders.round_size(stages, micro)
            ahead = [(chunks - 1) * size + 2 * (stages - 1 - rank) + 1 for rank in range(stages)]
            assert sets(timetable) == [min(each, chunks * micro) for each in ahead]


def test_interleaved_with_one_chunk_orders_a_worker_like_1f1b_with_more_forwards_ahead() -> None:
    assert list(orders.interleaved(3, 4, 1, 8, range(2))) == list(orders.one_f_one_b(3, 4, 8, range(2)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stages", STAGES)
def test_zb_h1_leaves_a_part_of_the_bubble_and_keeps_as_much_as_1f1b_at_its_first_stage(stages: int) -> None:
    for micro in COUNTS:
        for durations in (TICK, UNEQUAL):
            forward, inputs, weights = durations["F"], durations["I"], durations["W"]
            timetable = flush(
                orders.zero_bubble,
                stages,
                micro,
                durations=durations,
            )
            alone = max(1, micro - stages + 1) * weights  # the rest of W is in the bubbles
            assert timetable.makespan == (micro + stages - 1) * (forward + inputs) + alone
            if micro >= stages:
                bubble = (stages - 1) * (forward + inputs - weights)
                assert [timetable.idle(rank) for rank in range(stages)] == [bubble] * stages
            assert sets(timetable) == [min(micro, stages)] * stages


@pytest.mark.parametrize("stages", STAGES)
def test_zb_h2_leaves_no_bubble_for_twice_the_memory(stages: int) -> None:
    for micro in COUNTS:
        for durations in (TICK, UNEQUAL):
            timetable = flush(
                orders.zero_bubble_2,
                stages,
                micro,
                durations=durations,
            )
            assert sets(timetable) == [min(micro, 2 * stages - 1)] * stages
            if micro >= 2 * stages - 1:
                left = durations["F"] + durations["I"] - 2 * durations["W"]
                assert idle_between(timetable) == [(stages - 1 - rank) * left for rank in range(stages)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("stages", STAGES)
def test_zb_v_leaves_no_bubble_inside_a_worker(stages: int) -> None:
    for micro in COUNTS:
        timetable = flush(
            orders.zero_bubble_v,
            stages,
            micro,
            chunks=2,
            place=orders.v_shaped,
        )
        assert timetable.makespan == max(4 * (micro + stages) - 2, 6 * micro + stages - 1)
        assert sets(timetable) == [min(2 * micro, 2 * stages, micro + 1 + rank) for rank in range(stages)]
        if micro >= 2 * stages - 1:
            assert idle_between(timetable) == [0] * stages
            assert [row[0].start for row in timetable.workers] == list(range(stages))


@pytest.mark.parametrize("stages", STAGES)
def test_orders_without_a_flush_fill_once_and_are_as_stale_as_their_lead(stages: int) -> None:
    for count in COUNTS:
        batches = range(7, 7 + count)
        for order, factor in ((orders.pipedream, 1), (orders.stale, 2)):
            timetable = no_flush(order, stages, batches)
            assert timetable.makespan == 2 * (count + stages - 1)
            for rank in range(stages):
                lead = factor * (stages - 1 - rank)
                assert timetable.most_sets(rank) == min(count, lead + 1)
                assert timetable.staleness(rank) == {7 + t: min(t, lead) for t in range(count)}


# ---- mini-batches


FLUSH: Sequence[tuple[FlushOrder, int, Callable[[int, int, int], int]]] = (
    (orders.gpipe, 1, orders.looped),
    (orders.one_f_one_b, 1, orders.looped),
    (looping(2), 2, orders.looped),
    (orders.zero_bubble, 1, orders.looped),
    (orders.zero_bubble_2, 1, orders.looped),
    (orders.zero_bubble_v, 2, orders.v_shaped),
)


@pytest.mark.parametrize(("order", "chunks", "place"), FLUSH)
def test_a_flush_ends_each_mini_batch_with_its_update(
    order: FlushOrder, chunks: int, place: Callable[[int, int, int], int]
) -> None:
    timetable = flush(order, 3, 6, chunks=chunks, place=place, batches=range(5, 8))
    for rank, row in enumerate(timetable.workers):
        actions = [each.action for each in row]
        assert actions == [action for batch in range(5, 8) for action in order(rank, 3, 6, range(batch, batch + 1))]
        assert [each.action.batch for each in row if each.action.kind == "U"] == [5, 6, 7]
        assert {each.version for each in row if each.action.batch == 6} == {1}
        assert timetable.staleness(rank) == {5: 0, 6: 0, 7: 0}


def test_an_update_follows_its_backward_where_there_is_no_flush() -> None:
    for order in (orders.pipedream, orders.stale):
        actions = list(order(1, 4, range(3, 9)))
        after = [actions[number + 1] for number, action in enumerate(actions) if action.kind == "B"]
        assert after == [Action("U", batch) for batch in range(3, 9)]
