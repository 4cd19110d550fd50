"""The tick scheduler: it refuses orders that cannot run, and its result does not depend on who comes first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from support.runs import resolved
from support.wording import raising

from dure.errors import DeadlockError, StrategyError
from dure.partition import orders
from dure.partition.methods.gpipe import GPipe
from dure.partition.methods.multi_version import MultiVersion
from dure.partition.methods.petrowski import Petrowski
from dure.partition.methods.pipedream import PipeDream
from dure.partition.orders import Action, Kind
from dure.partition.schedule import Orders, check, schedule


def gpipe(stages: int = 3, micro: int = 2, count: int = 2) -> list[list[Action]]:
    return [list(orders.gpipe(rank, stages, micro, range(count))) for rank in range(stages)]


def refusal(workers: list[list[Action]], *, micro: int = 2, count: int = 2) -> str:
    with pytest.raises((StrategyError, DeadlockError)) as caught:
        check(Orders(workers, range(count), micro=micro))
    return f"{type(caught.value).__name__}: {caught.value}"


def swap(order: list[Action], one: Action, other: Action) -> None:
    first, second = order.index(one), order.index(other)
    order[first], order[second] = other, one


# ---- right orders


def test_the_orders_of_a_method_are_taken_from_it() -> None:
    timetable = schedule(Orders.of(GPipe(stages=3, micro=4), range(2)))
    assert timetable.makespan == 2 * 2 * (4 + 3 - 1)
    assert schedule(Orders.of(PipeDream(stages=3), range(9))).staleness(0)[8] == 2


def test_each_action_starts_when_its_needs_have_ended() -> None:
    timetable = schedule(Orders(gpipe(2, 2, 1), range(1), micro=2), {"F": 1, "B": 3})
    first, last = timetable.workers
    assert [(str(each.action), each.start, each.end) for each in first] == [
        ("F0", 0, 1),
        ("F0.1", 1, 2),
        ("B0.1", 6, 9),
        ("B0", 9, 12),
        ("U0", 12, 12),
    ]
    assert [(each.start, each.end) for each in last] == [(1, 2), (2, 3), (3, 6), (6, 9), (9, 9)]
    assert [timetable.idle(rank) for rank in (0, 1)] == [4, 4]


def test_a_pipeline_without_means_has_no_idle_time_in_the_steady_state() -> None:
    timetable = schedule(Orders.of(Petrowski(stages=4), range(12)))
    assert timetable.bubble == pytest.approx(0.2)
    assert timetable.steady_bubble == 0


def test_the_steady_state_is_from_the_first_backward_to_the_last_forward_of_the_first_stage() -> None:
    timetable = schedule(Orders.of(MultiVersion(stages=3), range(10)))  # 4 of 14 ticks of each worker, by hand
    assert timetable.steady_bubble == pytest.approx(12 / 42)


def test_the_scheduler_counts_versions_at_forward_and_backward() -> None:
    timetable = schedule(Orders([list(orders.pipedream(rank, 3, range(6))) for rank in range(3)], range(6)))
    versions = {str(each.action): each.version for each in timetable.workers[0]}
    assert [versions[f"F{t}"] for t in range(6)] == [0, 0, 0, 1, 2, 3]
    assert [versions[f"B{t}"] for t in range(6)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", range(5))
def test_the_result_does_not_depend_on_the_order_of_the_workers(seed: int) -> None:
    stages, batches = 4, range(2)
    workers = [list(orders.interleaved(rank, stages, 2, 8, batches)) for rank in range(stages)]
    place: Callable[[int, int], int] = lambda rank, chunk: orders.looped(rank, chunk, stages)  # noqa: E731
    straight = schedule(Orders(workers, batches, place, 8, 2))
    shuffled = random.Random(seed).sample(range(stages), stages)
    other = schedule(
        Orders([workers[rank] for rank in shuffled], batches, lambda rank, chunk: place(shuffled[rank], chunk), 8, 2)
    )
    assert [other.workers[shuffled.index(rank)] for rank in range(stages)] == straight.workers


# ---- wrong orders


def test_a_deadlock_names_each_action_and_the_one_it_waits_for() -> None:
    workers = [list(orders.one_f_one_b(rank, 2, 2, range(1))) for rank in range(2)]
    swap(workers[0], Action("F", 0, 1), Action("B", 0, 0))
    workers[1].remove(Action("F", 0, 1))
    workers[1].insert(1, Action("F", 0, 1))
    assert refusal(workers, count=1) == (
        "DeadlockError: the order of actions is a deadlock: worker 0 waits at B0 for worker 1's B0; worker 1 waits at "
        "F0.1 for worker 0's F0.1. Each action waits for one that comes later."
    )


def test_a_backward_before_its_own_forward_is_a_deadlock() -> None:
    workers = gpipe()
    swap(workers[2], Action("F", 1, 1), Action("B", 1, 1))
    assert refusal(workers) == (
        "DeadlockError: the order of actions is a deadlock: worker 2 waits at B1.1 for its own F1.1. Each action waits "
        "for one that comes later."
    )


def test_a_worker_outside_the_cycle_is_not_named() -> None:
    workers = gpipe(stages=4)
    swap(workers[3], Action("F", 1, 1), Action("B", 1, 1))
    assert "worker 0" not in refusal(workers)


def test_a_gradient_of_weights_before_that_of_inputs_is_a_deadlock() -> None:
    workers = [list(orders.zero_bubble(rank, 2, 2, range(1))) for rank in range(2)]
    swap(workers[1], Action("I", 0, 1), Action("W", 0, 1))
    assert "worker 1 waits at W0.1 for its own I0.1" in refusal(workers, count=1)


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        (
            Action("F", 0, 0),
            Action("F", 0, 1),
            "worker 1 takes F0.1 from worker 0 where worker 0 sends F0: messages between stages 0 and 1 arrive in the "
            "order in which they were sent. Give both workers one order.",
        ),
        (
            Action("B", 0, 0),
            Action("B", 0, 1),
            "worker 0 takes B0.1 from worker 1 where worker 1 sends B0: messages between stages 1 and 0 arrive in the "
            "order in which they were sent. Give both workers one order.",
        ),
    ],
)
def test_two_sides_of_a_border_have_one_order_of_messages(one: Action, other: Action, sentence: str) -> None:
    workers = gpipe()
    swap(workers[1], one, other)
    assert refusal(workers) == f"StrategyError: {sentence}"


def test_two_chunks_of_one_worker_exchange_no_messages() -> None:
    # A V over one worker has its turn inside the worker, which keeps what one chunk gives until the other takes it.
    kinds: list[tuple[Kind, int, int]] = [("F", 0, 0), ("F", 1, 0), ("F", 1, 1), ("F", 0, 1)]
    kinds += [("B", 1, 1), ("B", 0, 1), ("B", 0, 0), ("B", 1, 0)]
    order = [*(Action(kind, 0, micro, chunk) for kind, micro, chunk in kinds), Action("U", 0)]
    check(Orders([order], range(1), lambda rank, chunk: orders.v_shaped(rank, chunk, 1), micro=2, chunks=2))


def test_a_missing_action_is_named() -> None:
    workers = gpipe()
    workers[1].remove(Action("B", 1, 1))
    assert "worker 1 has no B1.1 in its order" in refusal(workers)
    workers = gpipe()
    workers[2].remove(Action("U", 0))
    assert "worker 2 has no U0 in its order" in refusal(workers)


def test_an_action_that_all_workers_lack_is_named() -> None:
    workers = gpipe(count=2)
    assert "worker 0 has no F2 in its order" in refusal(workers, count=3)


def test_a_doubled_action_is_named() -> None:
    workers = gpipe()
    workers[0].insert(3, Action("F", 0, 0))
    assert refusal(workers) == "StrategyError: worker 0 has F0 2 times in its order, and each action comes once."


def test_an_action_of_no_micro_batch_is_named() -> None:
    workers = gpipe()
    workers[0].append(Action("F", 0, 2))
    assert "worker 0 has F0.2 in its order, which belongs to no micro-batch there" in refusal(workers)


def test_a_backward_is_whole_or_in_two_parts() -> None:
    workers = gpipe()
    workers[0].insert(-1, Action("W", 1, 0))
    assert "worker 0 has no I1 in its order" in refusal(workers)
    workers[0].insert(-2, Action("I", 1, 0))
    assert "worker 0 has B1 in its order" in refusal(workers)


def test_an_update_before_one_of_its_backwards_is_refused() -> None:
    workers = gpipe()
    swap(workers[0], Action("U", 1), Action("B", 1, 0))
    assert refusal(workers) == (
        "StrategyError: worker 0 has U1 before B1 in its order: an update comes after all forwards and backwards of "
        "its mini-batch."
    )


def test_a_run_with_a_wrong_order_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(pipeline: GPipe, rank: int, batches: range) -> list[Action]:
        order = list(orders.gpipe(rank, pipeline.stages, pipeline.micro, batches))
        if rank == 1:
            swap(order, Action("F", 1, 3), Action("B", 1, 3))
        return order

    monkeypatch.setattr(GPipe, "order", wrong)
    with raising(DeadlockError, "B1.3"):
        resolved("digits-mlp", "bsp gpipe:stages=2", workers=2, steps=3, on="virtual")
