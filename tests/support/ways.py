"""Workers that share layers, as threads of one process: for tests of split layers without a run."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from dure.partition.tensor.ways import CollectiveCall, Ways

T = TypeVar("T")


def on_ways(size: int, function: Callable[[Ways], T]) -> list[T]:
    """Run `function` at each of `size` workers, in a thread each; return the results by rank."""
    barrier = Barrier(size)
    posted: list[Any] = [None] * size

    def carried(rank: int, collective: CollectiveCall) -> Any:
        posted[rank] = collective
        barrier.wait(20)
        everyone: list[CollectiveCall] = list(posted)
        barrier.wait(20)
        assert {each.kind for each in everyone} == {collective.kind}, everyone
        return _result(rank, everyone)

    def at(rank: int) -> T:
        try:
            return function(Ways(rank, size, lambda collective: carried(rank, collective)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(at, rank) for rank in range(size)]
        errors = [error for each in running if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
            raise error
        return [each.result() for each in running]


def _result(rank: int, everyone: list[CollectiveCall]) -> Any:
    kind, own = everyone[rank].kind, everyone[rank]
    if kind == "all_reduce":
        total = everyone[0].sends[0].clone()
        for each in everyone[1:]:
            total += each.sends[0]
        return total
    if kind == "reduce_scatter":
        total = everyone[0].sends[rank].clone()
        for each in everyone[1:]:
            total += each.sends[rank]
        assert [total.shape] == list(own.receives)
        return total
    found = [each.sends[0 if kind == "all_gather" else rank].clone() for each in everyone]
    assert [each.shape for each in found] == list(own.receives), (found, own.receives)
    return found
