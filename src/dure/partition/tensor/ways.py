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

    `counts` has the collectives so far, by kind. `draws`: random numbers are drawn between split layers. They differ
    between the workers; those that are drawn elsewhere are the same.
    """

    def __init__(self, rank: int, size: int, carry_out: Callable[[CollectiveCall], Any]) -> None:
        self.rank = rank
        self.size = size
        self.carry_out = carry_out
        self.draws = False
        self.counts: Counter[str] = Counter()
        self._copied: tuple[Tensor, Tensor, bool] | None = None
        self._outside: Tensor | None = None

    # ---- one forward

    def begin(self) -> None:
        """Begin a forward: nothing of another is left."""
        self._copied = self._outside = None

    def end(self) -> None:
        """End a forward, which may have ended in a split layer."""
        self.leave()
        self._copied = None

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """The copy of the tensor that was copied last, if it is this one."""
        last = self._copied
        return last[1] if last is not None and last[0] is tensor and last[2] == torch.is_grad_enabled() else None

    def keep_copy(self, tensor: Tensor, copy: Tensor) -> None:
        """Keep the copy of a tensor for other layers that read it next."""
        self._copied = tensor, copy, torch.is_grad_enabled()

    def enter(self) -> None:
        """Enter split layers: random numbers are this worker's own from here on."""
        if self.draws and self._outside is None:
            seed = int(torch.randint(2**31, ()))
            self._outside = torch.get_rng_state()
            torch.default_generator.manual_seed(seed + self.rank)

    def leave(self) -> None:
        """Leave split layers: random numbers are the same at all workers again."""
        if self._outside is not None:
            torch.set_rng_state(self._outside)
            self._outside = None

    # ---- collectives

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
