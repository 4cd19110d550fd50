"""The workers that share the layers of a model, as the code of a split layer sees them: blocking collectives.

A computation calls `Ways` in the middle of a forward or a backward. `carry_out` is the function that takes a collective
to the other workers and returns its result: in a run it pauses the computation's thread (`shared_stage.py`), and a
recording of shapes answers with zeros.

The operators of split layers are functions of tensors whose forward or backward has a collective over `Ways`.

| operator    | forward        | backward       | the next operations are              | name in the papers      |
|-------------|----------------|----------------|--------------------------------------|-------------------------|
| `copied`    | the tensor     | all-reduce     | parts, one at each worker            | f                       |
| `summed`    | all-reduce     | the gradient   | the same at all workers              | g                       |
| `gathered`  | all-gather     | own slice      | the same at all workers              |                         |
| `sliced`    | own slice      | all-gather     | parts, one at each worker            |                         |
| `collected` | all-gather     | reduce-scatter | parts, one at each worker            | g, sequence parallel    |
| `scattered` | reduce-scatter | all-gather     | the same for all slices              | g-bar, likewise         |

Slices are along one dimension, of given `sizes`. Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3;
Korthikanti et al., "Reducing Activation Recomputation", arXiv 2205.05198, section 4.2.

`Recording` finds the collectives of a part of a model and the operations between them, by one forward and one backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from dure.core.flop_counter import FlopCounter
from dure.core.node import Ghost
from dure.partition.backward import DeviceSpeed, Roofline

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


OnSlices = Callable[[Ways, Tensor, Sequence[int], int], Tensor]
"""A function of the ways, a tensor, and the sizes of the slices of a dimension."""


class _Copied(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, tensor: Tensor) -> Tensor:
        ctx.ways = ways
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, ctx.ways.all_reduce(gradients[0])


class _Summed(Function):
    @staticmethod
    def forward(ctx: Any, ways: Ways, tensor: Tensor) -> Tensor:
        return ways.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, gradients[0]


class _Across(Function):
    """An operator on slices of one dimension: `there` is its forward, `back` its backward."""

    @staticmethod
    def forward(
        ctx: Any, there: OnSlices, back: OnSlices, ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int
    ) -> Tensor:
        ctx.back, ctx.ways, ctx.sizes, ctx.dim = back, ways, sizes, dim
        return there(ways, tensor, sizes, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, ctx.back(ctx.ways, gradients[0], ctx.sizes, ctx.dim), None, None


def _own(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slice of this worker."""
    return torch.split(tensor, list(sizes), dim)[ways.rank].contiguous()


def _sum(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slice of this worker in the sum over all."""
    return ways.reduce_scatter(torch.split(tensor, list(sizes), dim))


def _all(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The slices of all workers, joined."""
    dim %= tensor.dim()
    shapes = [torch.Size((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :])) for size in sizes]
    return torch.cat(ways.all_gather(tensor, shapes), dim)


def copied(ways: Ways, tensor: Tensor) -> Tensor:
    """The tensor, which all workers have; its gradient is the sum of theirs.

    Layers that read the same tensor one after another share one copy, and so one all-reduce of its gradient.
    """
    found = ways.copy_of(tensor)
    if found is None:
        found = _Copied.apply(ways, tensor)  # type: ignore[no-untyped-call]
        ways.keep_copy(tensor, found)
    ways.enter()
    return found


def summed(ways: Ways, tensor: Tensor) -> Tensor:
    """The sum of the workers' tensors, which all workers have."""
    ways.leave()
    found: Tensor = _Summed.apply(ways, tensor)  # type: ignore[no-untyped-call]
    return found


def gathered(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The workers' slices joined, for operations that all workers repeat."""
    ways.leave()
    found: Tensor = _Across.apply(_all, _own, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    return found


def sliced(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """This worker's slice of a tensor that all workers have."""
    found: Tensor = _Across.apply(_own, _all, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found


def collected(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """The workers' slices joined, for operations of which each worker computes a part."""
    ways.leave()
    found: Tensor = _Across.apply(_all, _sum, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found


def scattered(ways: Ways, tensor: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    """This worker's slice of the sum of the workers' tensors."""
    ways.leave()
    found: Tensor = _Across.apply(_sum, _all, ways, tensor, sizes, dim)  # type: ignore[no-untyped-call]
    ways.enter()
    return found


class Piece(NamedTuple):
    """Operations up to a collective, of which only the sizes are known; None at the end of a pass.

    `flops` are operations of a device where its bytes and starts count, too (`Roofline`).
    """

    flops: float
    call: CollectiveCall | None


class Activations(NamedTuple):
    """Bytes of the memory that autograd keeps for the backward of some blocks: of all of them, and of each alone."""

    nbytes: int
    blocks: Sequence[int]

    @classmethod
    def of(cls, kept: Sequence[Mapping[int, int]]) -> Activations:
        """Those of blocks that keep these memories, by their numbers."""
        together = {place: nbytes for block in kept for place, nbytes in block.items()}
        return cls(sum(together.values()), [sum(block.values()) for block in kept])


class PassCost(NamedTuple):
    """The pieces of a forward and of a backward, and what autograd keeps between them."""

    forward: Sequence[Piece]
    backward: Sequence[Piece]
    kept: Activations


class Recording:
    """Answers collectives with zeros, and counts the operations before each: those of a device of `speed`, or FLOPs."""

    def __init__(self, speed: DeviceSpeed | None = None) -> None:
        self._speed = speed
        self._counter: FlopCounter | Roofline = FlopCounter()
        self._pieces: list[Piece] = []
        self._before = 0.0

    def pieces(self, function: Callable[[AbstractContextManager[Any]], None]) -> list[Piece]:
        """The pieces of a function whose collectives are those of `carry_out`. It opens the context that counts."""
        self._counter = FlopCounter() if self._speed is None else Roofline(self._speed)
        self._pieces, self._before = [], 0.0
        function(self._counter)
        self._add(None)
        return self._pieces

    def carry_out(self, call: CollectiveCall) -> Any:
        """Zeros of the shapes of a collective's result."""
        self._add(CollectiveCall(call.kind, [_sized(each) for each in call.sends], call.receives))
        found = [torch.zeros(shape, dtype=each.dtype, device=each.device) for shape, each in _results(call)]
        self._before = self._counted  # making zeros is no work of the part
        return found if call.kind in ("all_gather", "exchange") else found[0]

    def _add(self, call: CollectiveCall | None) -> None:
        self._pieces.append(Piece(self._counted - self._before, call))
        self._before = self._counted

    @property
    def _counted(self) -> float:
        counter = self._counter
        return counter.operations if isinstance(counter, Roofline) else float(counter.get_total_flops())


def _results(call: CollectiveCall) -> Sequence[tuple[torch.Size, Tensor]]:
    return [(shape, call.sends[0]) for shape in call.receives]


def _sized(tensor: Tensor) -> Any:
    return Ghost(tensor.numel(), tensor.element_size())
