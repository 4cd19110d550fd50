"""Actions of a pipeline's stages, the units of work, and the order of the actions of one worker, as data.

Ranks, mini-batches and micro-batches count from 0.

Orders with a flush end each mini-batch with its update; orders without one update after each backward. A worker with
several chunks holds the global stages of a placement: `looped` (rank, K + rank, 2K + rank, ...) or `v_shaped`
(rank, 2K - 1 - rank).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W", "S", "U"]


class Action(NamedTuple):
    """One action of a worker: forward or backward of a micro-batch through a chunk of the model, or an update.

    `kind` is "F" (forward), "B" (backward), "I" (the part of backward that computes the gradient of the inputs), "W"
    (the part that computes the gradient of the weights), "S" (a step of a model that predicts gradients) or "U" (update
    by the gradient of a mini-batch, of all chunks of the worker). `batch` is the number of the mini-batch in the run
    and `micro` that of the micro-batch in it, from 0. `chunk` counts the chunks of the worker; a worker with one stage
    has one.

    >>> str(Action("F", 3)), str(Action("B", 0, micro=2, chunk=1))
    ('F3', "B0.2'")
    """

    kind: Kind
    batch: int
    micro: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        part = f".{self.micro}" if self.micro else ""
        return f"{self.kind}{self.batch}{part}{chr(39) * self.chunk}"


# ---- placements of chunks


def looped(rank: int, chunk: int, stages: int) -> int:
    """The global stage of a chunk where the model goes around the workers once for each chunk."""
    return chunk * stages + rank


def v_shaped(rank: int, chunk: int, stages: int) -> int:
    """The global stage of a chunk where the model goes to the last worker and back: the first worker has the loss."""
    return 2 * stages - 1 - rank if chunk else rank


# ---- orders with a flush


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


def round_size(stages: int, micro: int) -> int:
    """The micro-batches that a worker takes through one chunk before it goes to its next chunk.

    Raises `ValueError` if the micro-batches do not fill whole rounds.
    """
    rounds = max(1, micro // stages)
    if micro % rounds:
        below = stages * rounds
        raise ValueError(
            f"micro={micro} does not divide into {rounds} rounds of one size for stages={stages}: write a multiple of "
            f"the stages, such as micro={below} or micro={below + stages}"
        )
    return micro // rounds


def interleaved(rank: int, stages: int, chunks: int, micro: int, batches: range) -> Iterator[Action]:
    """1F1B over several looped chunks: a round of micro-batches through one chunk, then through the next.

    Backwards go through the chunks from the last to the first. Raises `ValueError` as `round_size` does.
    """
    size = round_size(stages, micro)
    total = chunks * micro
    ahead = min((chunks - 1) * size + 2 * (stages - 1 - rank), total)

    def action(kind: Kind, batch: int, number: int) -> Action:
        turn, place = divmod(number, size)
        around, chunk = divmod(turn, chunks)
        return Action(kind, batch, around * size + place, chunk if kind == "F" else chunks - 1 - chunk)

    for batch in batches:
        for number in range(ahead):
            yield action("F", batch, number)
        for number in range(total):
            if number + ahead < total:
                yield action("F", batch, number + ahead)
            yield action("B", batch, number)
        yield Action("U", batch)


def zero_bubble(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """ZB-H1: 1F1B with the gradients of weights held back until they fill bubbles; 1F1B's peak at every worker."""
    return _split_backward(stages - 1 - rank, rank, micro, batches)


def zero_bubble_2(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """ZB-H2: as ZB-H1 with twice the forwards ahead, which fill the whole bubble and take twice the memory."""
    return _split_backward(2 * (stages - 1 - rank), 2 * rank, micro, batches)


def _split_backward(ahead: int, held: int, micro: int, batches: range) -> Iterator[Action]:
    """One forward and one gradient of inputs in turn; gradients of weights follow once `held` of them are due."""
    ahead = min(ahead, micro)
    for batch in batches:
        for part in range(ahead):
            yield Action("F", batch, part)
        weights = iter(range(micro))
        for part in range(micro):
            filling = part + ahead < micro
            if filling:
                yield Action("F", batch, part + ahead)
            yield Action("I", batch, part)
            if part >= held or not filling:
                yield Action("W", batch, next(weights))
        for part in weights:
            yield Action("W", batch, part)
        yield Action("U", batch)


def zero_bubble_v(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """ZB-V: two chunks at each worker, in a V, and the gradients of weights held back.

    With 2K - 1 micro-batches or more, and F, I and W of one duration, no worker is idle between its first action and
    its last.
    """
    for batch in batches:
        # The order is that of at least 2K - 1 micro-batches, without those that the mini-batch does not have.
        for kind, chunk, part in _v_order(rank, stages, max(micro, 2 * stages - 1)):
            if part < micro:
                yield Action(kind, batch, part, chunk)
        yield Action("U", batch)


def _v_order(rank: int, stages: int, micro: int) -> Iterator[tuple[Kind, int, int]]:
    """Kind, chunk and micro-batch of each action of a mini-batch in ZB-V."""
    steps: list[tuple[Kind, int]] = [("F", 0)] * (2 * (stages - rank) - 1)
    steps += [("F", 1), ("F", 0)] * rank
    steps += [("F", 1), ("I", 1), ("W", 1)] * (stages - rank)
    left = micro - (2 * stages - 1 - rank)  # forwards of the first chunk
    for turn in range(micro - stages):
        steps += [("F", 0)] * (turn < left)
        steps += [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    steps += [("I", 0), ("I", 1)] * rank
    steps += [("I", 0), ("W", 0)] * (stages - rank)
    for chunk in (1, 0):
        steps += [("W", chunk)] * (micro - steps.count(("W", chunk)))
    parts = {step: iter(range(micro)) for step in steps}
    for step in steps:
        yield *step, next(parts[step])


# ---- orders without a flush


def pipedream(rank: int, stages: int, batches: range) -> Iterator[Action]:
    """Forwards to fill the pipeline, then one forward, one backward and one update in turn; drained at the end."""
    return _without_flush(stages - 1 - rank, batches)


def one_f_one_b_on(rank: int, stages: int, micro: int, batches: range) -> Iterator[Action]:
    """As `pipedream` over the micro-batches of all mini-batches, with one update after the last of each."""
    ahead, parts = stages - 1 - rank, [(batch, part) for batch in batches for part in range(micro)]
    for each in parts[:ahead]:
        yield Action("F", *each)
    for number, (batch, part) in enumerate(parts):
        for each in parts[number + ahead : number + ahead + 1]:
            yield Action("F", *each)
        yield Action("B", batch, part)
        if part == micro - 1:
            yield Action("U", batch)


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
