"""The tensors that cross each border between two stages, the cost of each block, and the borders of shared layers.

One forward pass finds them. Where workers share layers, a model may be cut at borders at which they have whole tensors.

Behind a layer that is split by outputs each worker has a part of the tensors, until a layer that is split by inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dure.core.flop_counter import FlopCounter
from dure.core.user_code import explain_user_errors
from dure.errors import UsageError
from dure.job.data.dataset import Batch, described, tensors
from dure.partition.blocks import block_name, first_samples, holders_of
from dure.partition.tensor.ways import Activations, Recording, Ways

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.partition.tensor.plan import SplitPlan


Call = Callable[[nn.Module, Any], Any]
"""The call of a block with the output of the block before."""


class BorderTensor(NamedTuple):
    """A tensor that crosses a border; `gradient`: its gradient comes back."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    gradient: bool

    def empty(self, device: torch.device) -> Tensor:
        """Zeros in place of this tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device).requires_grad_(self.gradient)


@dataclass(frozen=True, slots=True)
class Border:
    """The tensors of a border: one, several of a tuple, or those of a mapping with `keys`."""

    tensors: tuple[BorderTensor, ...]
    keys: tuple[str, ...] | None = None
    single: bool = True

    @classmethod
    def of(cls, value: Any, block: str) -> Border:
        """The border behind a block that gave `value`. Raises `UsageError` for a value that is no `Batch`."""
        found: Batch = value
        parts = [value] if isinstance(value, Tensor) else None
        if isinstance(value, tuple | list) and value:
            found, parts = tuple(value), list(value)
        elif isinstance(value, Mapping) and value:
            parts = list(value.values())
        if parts is None or not all(isinstance(each, Tensor) for each in parts):
            raise UsageError(
                f"{block} returns {described(value)}, which cannot cross a border of stages: a block returns a tensor, "
                "or a tuple or a mapping of tensors. Let it return tensors only, or cut elsewhere."
            )
        specs = tuple(BorderTensor(each.dtype, tuple(each.shape), each.requires_grad) for each in parts)
        return cls(specs, tuple(value) if isinstance(value, Mapping) else None, isinstance(found, Tensor))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(torch.Size(each.shape).numel() * each.dtype.itemsize for each in self.tensors)

    def flat(self, value: Any) -> list[Tensor]:
        """The tensors of `value`, in order. Raises `UsageError` where they differ from those of the border."""
        found = tensors(tuple(value) if isinstance(value, list) else value)
        shapes = [(each.dtype, tuple(each.shape)) for each in found]
        right = [(each.dtype, each.shape) for each in self.tensors]
        if shapes != right:
            raise UsageError(
                f"a stage gave {described(value)} in place of {right}: the tensors between two stages have one shape "
                "for each number of samples. Pad the samples to one length, or cut elsewhere."
            )
        return found

    def value(self, parts: Sequence[Tensor]) -> Batch:
        """The value that `parts` are the tensors of."""
        if self.single:
            return parts[0]
        return tuple(parts) if self.keys is None else dict(zip(self.keys, parts, strict=True))


@dataclass(frozen=True, slots=True)
class BlockCost:
    """The cost of a block for one micro-batch: operations of its forward, and the memory that its backward keeps.

    `kept` has the bytes of each memory by a number of the memory, so that one that several blocks keep counts once.
    """

    flops: float
    kept: Mapping[int, int]


class KeptMemory(NamedTuple):
    """Bytes that are kept from a forward to its backward, and those beside them that the backward computes again."""

    between: int
    again: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """The borders of a model's blocks and the costs of the blocks, of one forward. `names` are those of the blocks.

    `borders` has the border before each block but the first, and that of the outputs, or why it cannot be one.
    `changes` has the first block that changes the tensors before a block in place, by the number of the latter.
    `reads` has the blocks of which a block reads a parameter or tensor beside its inputs, by the number of the latter.
    `edits` has a trained parameter of a block that its forward changes in place.
    """

    names: Sequence[str]
    borders: Mapping[int, Border | str]
    costs: Sequence[BlockCost]
    changes: Mapping[int, int]
    reads: Mapping[int, Sequence[int]]
    edits: Mapping[int, str]

    def border(self, number: int) -> Border:
        """The border before block `number`. Raises `UsageError` where the values there cannot cross one."""
        found = self.borders[number]
        if isinstance(found, str):
            raise UsageError(found)
        return found

    def activations(self, blocks: Iterable[int]) -> Activations:
        """The memory that autograd keeps for the backward of `blocks`."""
        return Activations.of([self.costs[number].kept for number in blocks])

    def recomputed(self, blocks: range, own: Activations) -> KeptMemory:
        """The memory kept where backward computes each of `blocks` again from its inputs; `own`: where it does not."""
        borders = [self.border(number).nbytes if number else 0 for number in blocks]
        return KeptMemory(sum(borders), max(max(0, n - border) for n, border in zip(own.blocks, borders, strict=True)))

    def check(self, bounds: Sequence[int]) -> None:
        """Raise `UsageError` if a block changes the inputs of its stage in place, or reads parameters of another stage.

        Stages lie between `bounds`.
        """
        for number, name in self.edits.items():
            raise UsageError(
                f"the forward of {self.names[number]} changes its parameter {name!r} in place, as nn.Embedding does "
                "with max_norm, and a stage computes with parameters that it gets anew: the change would be lost. "
                "Compute with a changed copy, as weight.clamp(-1, 1), or leave the partition out."
            )
        for start, stop in pairwise(bounds):
            if self.changes.get(start, stop) < stop:
                raise UsageError(
                    f"{self.names[self.changes[start]]} changes the inputs of its stage in place, and a stage keeps "
                    "its inputs for the backward. Write inplace=False in the model or x = x.clone() in the block, or "
                    "cut before another block."
                )
            for number, others in self.reads.items():
                if start <= number < stop and not any(start <= other < stop for other in others):
                    raise UsageError(
                        f"{self.names[number]} reads a parameter or a tensor of {self.names[others[0]]}, which is "
                        "computed apart from it, beside its inputs: its values or its gradient would be lost. Let the "
                        "block hold the parameter too, as in self.weight = other.weight, which ties both, and pass "
                        "tensors on from block to block as (x, skip)."
                    )


def measure(blocks: Sequence[nn.Module], call: Call, inputs: Any) -> MeasuredPass:
    """Run `inputs` through the blocks. Random state is left as it was; the caller takes care of buffers."""
    names = [block_name(number, block) for number, block in enumerate(blocks)]
    borders: dict[int, Border | str] = {}
    changes: dict[int, int] = {}
    reads, edits = dict[int, Sequence[int]](), dict[int, str]()
    costs, holders, made = [], holders_of(blocks), dict[Any, int]()
    border, first = set[Any](), 0  # the nodes of the inputs of block `first`
    value = inputs
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        alive: list[Tensor] = []  # a memory that is freed could give its number to another
        before = {0: _versions(tensors(inputs))}
        for number, block in enumerate(blocks):
            own = {name: (each, each._version) for name, each in block.named_parameters() if each.requires_grad}
            with explain_user_errors(f"{names[number]} raised"):
                (value, counter), kept = with_kept(block, alive, partial(_counted, block, call, value))
            for start in [start for start, versions in before.items() if _is_changed(versions)]:
                changes[start] = number
                del before[start]
            edited = [name for name, each in own.items() if _is_changed([each])]
            if edited:
                edits[number] = edited[0]
            costs.append(BlockCost(float(counter.get_total_flops()), kept))
            borders[number + 1] = found = _border(value, names[number])
            if isinstance(found, str):  # the next block is in the same stage
                before[number + 1] = []
                continue
            outputs = found.flat(value)
            before[number + 1] = _versions(outputs)
            for each in _reads(outputs, border, made, number, holders):
                if not any(first <= other <= number for other in each):
                    reads[number] = each
            border, first = {each.grad_fn for each in outputs}, number + 1
    return MeasuredPass(names, borders, costs, changes, reads, edits)


def _reads(
    outputs: Sequence[Tensor], border: Set[Any], made: dict[Any, int], number: int, holders: Mapping[int, Sequence[int]]
) -> list[Sequence[int]]:
    """The blocks that block `number` reads beside its inputs: of each parameter its holders, of each tensor its maker.

    The graph of its `outputs` is searched to the nodes of its inputs, which are those of `border`. `made` has the
    block of each node, and gets those of this one.
    """
    found: list[Sequence[int]] = []
    nodes: list[Any] = [each.grad_fn for each in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in border:
            continue
        if hasattr(node, "variable"):
            found.append(holders.get(id(node.variable), (number,)))
        elif node in made:
            found.append((made[node],))
        else:
            made[node] = number
            nodes += [behind for behind, _ in node.next_functions]
    return found


def _counted(block: nn.Module, call: Call, value: Any) -> tuple[Any, FlopCounter]:
    with FlopCounter() as counter:
        return call(block, value), counter


def _border(value: Any, block: str) -> Border | str:
    try:
        return Border.of(value, block)
    except UsageError as error:
        return str(error)


def _is_changed(found: Sequence[tuple[Tensor, int]]) -> bool:
    return any(each._version != version for each, version in found)


def _versions(found: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Tensors with the number of changes in place so far, of all views of their memory."""
    return [(each, each._version) for each in found]


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Context that finds the memory that autograd saves for the backward of a block, without its parameters.

    `nbytes` has the bytes of each memory by a number of the memory; `alive` gets a tensor of each. On the meta device
    attention keeps its inputs and its output, as the kernels of accelerators do, and not the weights of its steps.
    """

    def __init__(self, block: nn.Module, alive: list[Tensor]) -> None:
        self.nbytes: dict[int, int] = {}
        self._own = {each.untyped_storage()._cdata for each in block.parameters()}
        self._alive = alive
        self._attends = False
        self._attention = _Attention(self)
        super().__init__(self._keep, _same)

    def __enter__(self) -> None:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._attention.__exit__(*error)  # type: ignore[no-untyped-call]

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # has a number of its own on the meta device too, where `data_ptr` is 0
        if not self._attends and storage._cdata not in self._own:
            self.nbytes[storage._cdata] = storage.nbytes()
            self._alive.append(tensor.detach())
        return tensor.detach()  # an operation that keeps its own output would keep itself, and never be freed

    def attend(self, compute: Callable[[], Tensor], inputs: Any) -> Tensor:
        """The result of `compute`, of which `inputs` and the result are kept."""
        self._attends = True
        try:
            out = compute()
        finally:
            self._attends = False
        if torch.is_grad_enabled() and out.requires_grad:
            for each in tree_leaves((inputs, out)):
                if isinstance(each, Tensor):
                    self._keep(each)
        return out


class _Attention(TorchFunctionMode):
    """Context that gives attention on the meta device, which takes it in steps, to `Kept`."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self._kept = kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and args[0].is_meta:
            return self._kept.attend(lambda: func(*args, **kwargs), (args, kwargs))
        return func(*args, **kwargs)


def _same(tensor: Tensor) -> Tensor:
    return tensor


Result = TypeVar("Result")


def with_kept(block: nn.Module, alive: list[Tensor], forward: Callable[[], Result]) -> tuple[Result, dict[int, int]]:
    """The result of a block's `forward`, and `Kept.nbytes` of it.

    A block that differentiates by `torch.func` allows no hooks on saved tensors: 0 bytes are found for it.
    """
    kept = Kept(block, alive)
    try:
        with kept:
            return forward(), kept.nbytes
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
    return forward(), {}


Shapes = Sequence[tuple[torch.dtype, torch.Size]]


def whole_borders(
    job: Job, plan: SplitPlan, ways: int, call: Call, blocks_of: Callable[[nn.Module], Sequence[nn.Module]], rows: int
) -> list[int]:
    """The numbers of the blocks before which a worker has the tensors of the whole model, of `rows` samples.

    The worker is the last of `ways`, which has the smallest part of each layer.
    """
    module = job.build(0)
    inputs, _ = first_samples(job, rows, next(module.parameters()).device)
    whole = _shapes(blocks_of(module), call, inputs)
    own = Ways(ways - 1, ways, Recording().carry_out)
    part = _shapes(blocks_of(plan.apply(module, own)), call, inputs, own)
    return [number for number in range(1, len(whole)) if whole[number - 1] == part[number - 1]]


def _shapes(blocks: Sequence[nn.Module], call: Call, value: Any, ways: Ways | None = None) -> list[Shapes]:
    """The types and shapes of the outputs of each block."""
    found: list[Shapes] = []
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        if ways is not None:
            ways.begin()
        for number, block in enumerate(blocks):
            with explain_user_errors(f"{block_name(number, block)} raised"):
                value = call(block, value)
            found.append([(each.dtype, each.shape) for each in tree_leaves(value) if isinstance(each, Tensor)])
        if ways is not None:
            ways.end()
    return found
