"""Orders of the actions of one worker of a pipeline, as data. Ranks, mini-batches and micro-batches count from 0."""

from __future__ import annotations

from collections.abc import Iterator

from dure.partition.action import Action


def gpipe(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """All forwards of a mini-batch, then all its backwards from the last micro-batch to the first, then its update."""
    for batch in batches:
        for part in range(micro):
            yield Action("F", batch, part)
        for part in reversed(range(micro)):
            yield Action("B", batch, part)
        yield Action("U", batch)


def one_f_one_b(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """Forwards to fill the pipeline, then one forward and one backward in turn, then the update of the mini-batch."""
    ahead = min(stages - 1 - rank, micro)
    for batch in batches:
        for part in range(ahead):
            yield Action("F", batch, part)
        for part in range(micro):
            if part + ahead < micro:
                yield Action("F", batch, part + ahead)
            yield Action("B", batch, part)
        yield Action("U", batch)


def pipedream(rank: int, stages: int, batches: range) -> Iterator[Action]:
    """Forwards to fill the pipeline, then one forward, one backward and one update in turn; drained at the end."""
    return _without_flush(stages - 1 - rank, batches)


def stale(rank: int, stages: int, batches: range) -> Iterator[Action]:
    """As `pipedream` with twice the forwards ahead: one forward and one backward of all workers fit into each cycle."""
    return _without_flush(2 * (stages - 1 - rank), batches)


def _without_flush(ahead: int, batches: range) -> Iterator[Action]:
    ahead = min(ahead, len(batches))
    for batch in batches[:ahead]:
        yield Action("F", batch)
    for batch in batches:
        if batch + ahead < batches.stop:
            yield Action("F", batch + ahead)
        yield Action("B", batch)
        yield Action("U", batch)
