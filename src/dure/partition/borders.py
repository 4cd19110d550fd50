"""The tensors that cross each border between two stages, the cost of each block, and the borders of shared layers.

One forward pass finds them. Where workers share layers, a model may be cut at borders at which they have whole tensors.

Behind a layer that is split by outputs each worker has a part of the tensors, until a layer that is split by inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from dure.partition.blocks import block_name, first_samples
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


class _Read(NamedTuple):
    """A parameter by its name in the block `holder`."""

    name: str
    holder: int


@dataclass(frozen=True, slots=True)
class MeasuredPass:
    """The borders of a model's blocks and the costs of the blocks, of one forward. `names` are those of the blocks.

    `borders` has the border before each block but the first, and that of the outputs, or why it cannot be one.
    `changes` has the first block that changes the tensors before a block in place, by the number of the latter.
    By the number of a block, `reads` has the trained parameters of other blocks that it computes with, and `edits` one
    of its own that its forward changes in place.
    """

    names: Sequence[str]
    borders: Mapping[int, Border | str]
    costs: Sequence[BlockCost]
    changes: Mapping[int, int]
    reads: Mapping[int, Sequence[_Read]]
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
        """Raise `UsageError` for a block that cannot be computed in its stage. Stages lie between `bounds`.

        A block must not change parameters or the inputs of its stage in place, nor read parameters that blocks of other
        stages alone hold.
        """
        for start, stop in pairwise(bounds):
            for number in range(start, stop):
                self._check_parameters(number, range(start, stop))
            if self.changes.get(start, stop) < stop:
                raise UsageError(
                    f"{self.names[self.changes[start]]} changes the inputs of its stage in place, and a stage keeps "
                    "its inputs for the backward. Write inplace=False in the model or x = x.clone() in the block, or "
                    "cut before another block."
                )

    def _check_parameters(self, number: int, stage: range) -> None:
        if number in self.edits:
            raise UsageError(
                f"the forward of {self.names[number]} changes its parameter {self.edits[number]!r} in place, as "
                "nn.Embedding does with max_norm, and a stage computes with parameters that it gets anew: the change "
                "would be lost. Compute with a changed copy, as weight.clamp(-1, 1), or leave the partition out."
            )
        for name, holder in self.reads.get(number, ()):
            if holder not in stage:
                raise UsageError(
                    f"{self.names[number]} computes with the parameter {name!r} of {self.names[holder]} without "
                    "holding it, so a stage would not have it. Register the module of this parameter in the block, too "
                    "(self.other = other in place of a list or a closure): then it is tied, and trained in both."
                )


def measure(blocks: Sequence[nn.Module], call: Call, inputs: Any) -> MeasuredPass:
    """Run `inputs` through the blocks. Random state is left as it was; the caller takes care of buffers."""
    names = [block_name(number, block) for number, block in enumerate(blocks)]
    borders: dict[int, Border | str] = {}
    changes: dict[int, int] = {}
    reads, edits = dict[int, list[_Read]](), dict[int, str]()
    named = _trained(blocks)
    costs = []
    value = inputs
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        alive: list[Tensor] = []  # a memory that is freed could give its number to another
        before = {0: _versions(tensors(inputs))}
        for number, block in enumerate(blocks):
            nodes, parameters = _nodes(value), _versions([each for each in block.parameters() if each.requires_grad])
            with explain_user_errors(f"{names[number]} raised"):
                (value, counter), kept = with_kept(block, alive, partial(_counted, block, call, value))
            own = {id(each) for each, _ in parameters}
            reads[number] = [named[id(each)] for each in _leaves(value, nodes) if id(each) in named.keys() - own]
            for each, version in parameters:
                if each._version != version:
                    edits[number] = named[id(each)].name
            for start in [start for start, versions in before.items() if _is_changed(versions)]:
                changes[start] = number
                del before[start]
            costs.append(BlockCost(float(counter.get_total_flops()), kept))
            borders[number + 1] = found = _border(value, names[number])
            before[number + 1] = [] if isinstance(found, str) else _versions(found.flat(value))
    return MeasuredPass(names, borders, costs, changes, reads, edits)


def _trained(blocks: Sequence[nn.Module]) -> dict[int, _Read]:
    """The trained parameters of the blocks by `id`, with the first block that holds them."""
    found: dict[int, _Read] = {}
    for number, block in enumerate(blocks):
        for name, each in block.named_parameters():
            if each.requires_grad:
                found.setdefault(id(each), _Read(name, number))
    return found


def _nodes(value: Any) -> set[Any]:
    """The nodes of autograd's graph that have computed the tensors of `value`."""
    return {each.grad_fn for each in tree_leaves(value) if isinstance(each, Tensor) and each.grad_fn is not None}


def _leaves(value: Any, behind: Collection[Any]) -> list[Tensor]:
    """The leaves of the graph that has computed `value` from the outputs of the nodes `behind`."""
    found, seen, waiting = [], set(behind), [*(_nodes(value) - set(behind))]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        if hasattr(node, "variable"):
            found.append(node.variable)
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
