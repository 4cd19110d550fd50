"""The workers that share the layers of a model, as the code of a split layer sees them: blocking collectives.

A computation calls `Ways` in the middle of a forward or a backward. `carry_out` is the function that takes a collective
to the other workers and returns its result: in a run it pauses the computation's thread (`computation.py`), and a
recording of shapes answers with zeros (`recording.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "exchange"]


class CollectiveCall(NamedTuple):
    """A collective that a computation asks for.

    | kind             | `sends`                  | `receives`: shapes | result                            |
    |------------------|--------------------------|--------------------|-----------------------------------|
    | `all_reduce`     | the tensor               | its shape          | the sum, of the same bits at all  |
    | `all_gather`     | the tensor               | that of each rank  | the tensors, by rank              |
    | `reduce_scatter` | a tensor for each rank   | that of the own    | the sum of the tensors for itself |
    | `exchange`       | a tensor for each rank   | that of each rank  | the tensors, by rank              |
    """

    kind: Kind
    sends: Sequence[Tensor]
    receives: Sequence[torch.Size]


def refused(call: CollectiveCall) -> Any:
    """Raise an error for a collective outside of a computation."""
    raise RuntimeError(f"a split layer asks for {call.kind} outside of a computation of its stage")


class Ways:
    """The `size` workers that share each layer, seen by number `rank` of them.

    `counts` has the collectives so far, by kind.
    """

    def __init__(self, rank: int, size: int, carry_out: Callable[[CollectiveCall], Any]) -> None:
        self.rank = rank
        self.size = size
        self.carry_out = carry_out
        self.counts: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all, in the order of ranks; a new tensor."""
        found: Tensor = self._carried(CollectiveCall("all_reduce", [tensor.detach().contiguous()], [tensor.shape]))
        return found

    def all_gather(self, tensor: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """The tensors of all, by rank; `shapes` are theirs."""
        found: list[Tensor] = self._carried(CollectiveCall("all_gather", [tensor.detach().contiguous()], shapes))
        return found

    def reduce_scatter(self, tensors: Sequence[Tensor]) -> Tensor:
        """The sum over all of the tensors for this rank; `tensors` are for each rank."""
        sends = [each.detach().contiguous() for each in tensors]
        found: Tensor = self._carried(CollectiveCall("reduce_scatter", sends, [sends[self.rank].shape]))
        return found

    def exchange(self, tensors: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Send a tensor to each rank; return those received, of these `shapes`. One without elements sends no message.

        The tensor for this rank itself is handed over.
        """
        sends = [each.detach().contiguous() for each in tensors]
        found: list[Tensor] = self._carried(CollectiveCall("exchange", sends, shapes))
        return found

    def _carried(self, collective: CollectiveCall) -> Any:
        self.counts[collective.kind] += 1
        return self.carry_out(collective)
