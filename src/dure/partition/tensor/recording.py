"""The collectives of a part of a model and the operations between them, found by one forward and one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dure.core.flop_counter import FlopCounter
from dure.core.node import Ghost
from dure.partition.tensor.ways import CollectiveCall


class Piece(NamedTuple):
    """Operations up to a collective, of which only the sizes are known; None at the end of a pass."""

    flops: float
    call: CollectiveCall | None


class PassCost(NamedTuple):
    """The pieces of a forward and of a backward, and the bytes that are kept between them."""

    forward: Sequence[Piece]
    backward: Sequence[Piece]
    kept: int


class Recording:
    """Answers collectives with zeros, and counts the operations before each."""

    def __init__(self) -> None:
        self._counter = FlopCounter()
        self._pieces: list[Piece] = []
        self._counted = 0.0

    def pieces(self, function: Callable[[], None]) -> list[Piece]:
        """The pieces of a function whose collectives are those of `carry_out`."""
        self._counter, self._pieces, self._counted = FlopCounter(), [], 0.0
        with self._counter:
            function()
        self._add(None)
        return self._pieces

    def carry_out(self, call: CollectiveCall) -> Any:
        """Zeros of the shapes of a collective's result."""
        self._add(CollectiveCall(call.kind, [_sized(each) for each in call.sends], call.receives))
        found = [torch.zeros(shape, dtype=each.dtype, device=each.device) for shape, each in _results(call)]
        return found if call.kind in ("all_gather", "exchange") else found[0]

    def _add(self, call: CollectiveCall | None) -> None:
        counted = float(self._counter.get_total_flops())
        self._pieces.append(Piece(counted - self._counted, call))
        self._counted = counted


def _results(call: CollectiveCall) -> Sequence[tuple[torch.Size, Tensor]]:
    return [(shape, call.sends[0]) for shape in call.receives]


def _sized(tensor: Tensor) -> Any:
    return Ghost(tensor.numel(), tensor.element_size())
