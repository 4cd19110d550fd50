"""Forward and backward of the blocks, or of the parts of blocks, that one worker of a pipeline holds, at any weights.

Everything is computed on one thread, in virtual time too, so that its bits are those of a worker's process.

A forward reads weights through *leaves*: tensors that require a gradient and are views of a flat memory, one for each
parameter. A backward that comes later reads the same memory again. So the values in that memory at the time of the
backward are the weights that it reads, and autograd does not check them: leaves have version counters of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dure.errors import UsageError
from dure.job.gradient_engine import Isolated, RandomState
from dure.job.replica import Replica
from dure.partition.blocks import first_samples
from dure.partition.borders import Kept
from dure.partition.tensor.ways import Activations, PassCost, Recording, Ways, refused

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.partition.borders import Border, Call
    from dure.partition.layout import StageLayout


def nothing_during(block: nn.Module) -> AbstractContextManager[Any]:
    """A context without an effect."""
    return nullcontext()


@dataclass(slots=True)
class Leaves:
    """The parameters of a worker as leaves over the flat `memory`, by the number of the layer."""

    memory: Tensor
    tensors: Sequence[Tensor] | Mapping[int, Tensor]


@dataclass(slots=True)
class Passed:
    """The forward of `rows` samples whose backward is to come: inputs, outputs with their graph, and weights read.

    `batch` holds the job's inputs at the first stage, `targets` the job's targets at the last. A loss is multiplied by
    `share`. `gradients` are those of the outputs, once they are known.
    """

    inputs: Sequence[Tensor]
    leaves: Leaves
    rows: int
    batch: Any = None
    targets: Any = None
    share: float = 1.0
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor] = ()


class StageModule:
    """The chunks of worker `part` of a copy of the model.

    `replica` holds the parameters of this worker, with their names in the whole model. Their initial values are drawn
    from `seed`. `ways` are the workers that share its layers, if any do.
    """

    def __init__(self, layout: StageLayout, part: int, seed: int, device: str = "cpu") -> None:
        self.layout = layout
        self.job: Job = layout.job
        rank, way = divmod(part, layout.ways)
        self.stages = layout.stages_of(rank)
        module = self.job.build(seed)
        self.ways: Ways | None = None
        if layout.plan is not None:
            self.ways = Ways(way, layout.ways, refused)
            module = layout.plan.apply(module, self.ways)
        blocks = layout.blocks_of(module)
        self._blocks = [[blocks[number] for number in layout.blocks_in(stage)] for stage in self.stages]
        own = [block for blocks in self._blocks for block in blocks]
        move(own_part(module, own), own, torch.device(device))
        self.replica = replica = Replica(module)
        self._call: Call = layout.call
        numbers = {id(parameter): number for number, parameter in enumerate(replica.parameters)}
        self._slots = [_slots(blocks, numbers) for blocks in self._blocks]
        plan = layout.plan
        self._loss_function: Callable[[Any, Any], Tensor] = self.job.loss
        if plan is not None and plan.loss is not None:
            assert self.ways is not None
            self._loss_function = partial(plan.loss, self.ways)
        self._layers = [sorted({number for _, _, number in slots}) for slots in self._slots]
        self._draws = replica.is_stochastic
        self.drawn: RandomState | None = None
        self._figures = layout.whole.figures if _is_hashable(layout.shared) else {}
        self._fresh_buffers = replica.buffers_flat()
        self._buffers = _buffers(replica.module)

    @property
    def draws(self) -> bool:
        """Whether these blocks draw random numbers."""
        return self._draws

    @property
    def has_buffers(self) -> bool:
        """Whether training changes buffers of these blocks."""
        return bool(self._fresh_buffers.numel())

    def leaves(self, memory: Tensor) -> Leaves:
        """Leaves over a flat memory."""
        parts = [memory[layer.start : layer.stop].view(layer.shape) for layer in self.replica.layers]
        return Leaves(memory, [part.data.requires_grad_() for part in parts])  # `.data` has its own version counter

    def use_buffers(self, buffers: Tensor | None) -> None:
        """Set the buffers of the blocks to a worker's."""
        if self.has_buffers:
            self.replica.load_buffers(self._fresh_buffers if buffers is None else buffers)

    def place(self, chunk: int, passed: Passed) -> None:
        """Set the parameters of a chunk's blocks to the leaves of a forward."""
        for owner, name, number in self._slots[chunk]:
            owner[name] = passed.leaves.tensors[number]

    def forward(
        self,
        chunk: int,
        passed: Passed,
        draw: Sequence[int] | RandomState,
        border_in: Border | None,
        *,
        graph: bool = True,
        during: Callable[[nn.Module], AbstractContextManager[Any]] = nothing_during,
    ) -> None:
        """Compute the outputs of a chunk from `passed.inputs`; of the last stage its loss, times its share.

        Random layers draw from the numbers in `draw`, or go on from a state; `drawn` is the state behind them. Without
        a `graph` a backward is not possible. The context `during(block)` is open in each block, and not in the loss.
        """
        self.place(chunk, passed)
        value = passed.batch if border_in is None else border_in.value(passed.inputs)
        seed = (draw if isinstance(draw, RandomState) else seed_of(draw)) if self._draws else None
        with Isolated(True, seed, self.replica.device) as isolated, torch.set_grad_enabled(graph):
            if self.ways is not None:
                self.ways.begin()
            for block in self._blocks[chunk]:
                with during(block):
                    value = self._call(block, value)
            if self.ways is not None:
                self.ways.end()
            if self.stages[chunk] == self.layout.depth - 1:
                passed.outputs = (self._loss(value, passed.targets) * passed.share,)
            else:
                passed.outputs = self.layout.border(self.stages[chunk], passed.rows).flat(value)
            self.drawn = isolated.drawn() if self._draws else None
        self._renew_buffers()

    def _loss(self, outputs: Any, targets: Any) -> Tensor:
        loss: Tensor = self._loss_function(outputs, targets)
        if loss.numel() != 1:
            raise UsageError(
                f"a job's loss must be one number, the mean over the batch; got shape {tuple(loss.shape)}. "
                "Write loss=lambda outputs, targets: (...).mean()."
            )
        return loss.reshape(())

    def backward(
        self, chunk: int, passed: Passed, *, inputs: bool, weights: bool, keep: bool = False
    ) -> tuple[list[Tensor], list[tuple[int, Tensor]]]:
        """Compute the gradients of a chunk from those of its outputs (`passed.gradients`; none for a loss).

        Returns the gradients of the inputs that have one, and the gradient of each layer by number. `keep` the graph
        for another backward.
        """
        wanted = [each for each in passed.inputs if each.requires_grad] if inputs else []
        layers = self._layers[chunk] if weights else []
        leaves = [passed.leaves.tensors[number] for number in layers]
        roots = [each for each in passed.outputs if each.requires_grad]
        if not roots or not (wanted or leaves):
            return [torch.zeros_like(each) for each in wanted], []
        self.place(chunk, passed)  # a block with activation checkpoints computes its forward again
        with Isolated(True, None, self.replica.device):
            found = torch.autograd.grad(
                roots,
                [*wanted, *leaves],
                grad_outputs=list(passed.gradients) or None,
                retain_graph=keep,
                allow_unused=True,
            )
        of_inputs = [
            torch.zeros_like(each) if gradient is None else gradient
            for each, gradient in zip(wanted, found[: len(wanted)], strict=True)
        ]
        of_layers = [
            (number, gradient.to_dense() if gradient.layout != torch.strided else gradient)
            for number, gradient in zip(layers, found[len(wanted) :], strict=True)
            if gradient is not None
        ]
        return of_inputs, of_layers

    def cost(self, chunk: int, rows: int, kind: str = "B") -> PassCost:
        """The pieces of a forward and a backward of a chunk for `rows` samples, between collectives.

        The backward is that of an action of this `kind`: of inputs and weights (B), of inputs (I) or of weights (W). It
        computes a gradient, so that no process may be forked after it where there are accelerators.
        """
        key = self._pass(chunk, rows, kind)
        if key not in self._figures:
            self._figures[key] = self._recorded(chunk, rows, kind)
        found: PassCost = self._figures[key]
        return found

    def kept(self, chunk: int, rows: int) -> Activations:
        """The memory that autograd keeps for the backward of a chunk for `rows` samples, as by `cost`."""
        key = self._pass(chunk, rows, "kept")
        if key not in self._figures:
            known: PassCost | None = self._figures.get(self._pass(chunk, rows, "B"))
            self._figures[key] = (known or self._recorded(chunk, rows)).kept
        found: Activations = self._figures[key]
        return found

    def _pass(self, chunk: int, rows: int, kind: str) -> tuple[object, ...]:
        """The key of a chunk's figures: equal for layouts that cut and share these blocks alike."""
        assert self.ways is not None
        shared = self.layout.shared if self._figures is self.layout.whole.figures else None
        blocks = len(self.layout.blocks), self.layout.blocks_in(self.stages[chunk])
        return "part", shared, self.ways.rank, *blocks, rows, kind, self.layout.speed

    def _recorded(self, chunk: int, rows: int, kind: str | None = None) -> PassCost:
        assert self.ways is not None
        layout, stage, replica = self.layout, self.stages[chunk], self.replica
        border_in = layout.border(stage - 1, rows) if stage else None
        inputs = [] if border_in is None else [each.empty(replica.device) for each in border_in.tensors]
        passed = Passed(inputs, self.leaves(replica.params), rows)
        passed.batch, passed.targets = first_samples(self.job, rows, replica.device)
        before, recording = replica.buffers_flat(), Recording(layout.speed)
        alive: list[Tensor] = []
        self.ways.carry_out = recording.carry_out
        self.place(chunk, passed)  # parameters, which are not counted
        kept: list[Kept] = []

        def counted(block: nn.Module, counter: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
            kept.append(Kept(replica.module, alive))
            return _both(kept[-1], counter)

        forward = recording.pieces(
            lambda counter: self.forward(chunk, passed, (0,), border_in, during=partial(counted, counter=counter))
        )
        passed.gradients = () if stage == layout.depth - 1 else [torch.zeros_like(each) for each in passed.outputs]

        def back(counter: AbstractContextManager[Any]) -> None:
            if self.job.recompute and kind != "W":
                self.forward(chunk, passed, (0,), border_in, during=lambda block: counter)
            with counter:
                self.backward(chunk, passed, inputs=stage > 0 and kind != "W", weights=kind != "I")

        pieces = [] if kind is None else recording.pieces(back)
        self.ways.carry_out = refused
        if before.numel():
            replica.load_buffers(before)
        return PassCost(forward, pieces, Activations.of([each.nbytes for each in kept]))

    def _renew_buffers(self) -> None:
        """Let the graph keep the buffers of this forward, which no later one may change."""
        for owner, name in self._buffers:
            owner[name] = owner[name].clone()

    def left_buffers(self) -> Tensor | None:
        """As `buffers`, in the middle of a forward. `use_buffers` sets them again."""
        if not self.has_buffers:
            return None
        self._renew_buffers()
        return self.replica.buffers_flat()

    def buffers(self) -> Tensor | None:
        """A snapshot of the buffers; None where training changes none."""
        return self.replica.buffers_flat() if self.has_buffers else None


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    """A context of both: blocks are counted, and the loss is not, as for a whole model."""
    with first, second:
        yield


def _slots(blocks: Iterable[nn.Module], numbers: dict[int, int]) -> list[tuple[dict[str, Any], str, int]]:
    """The places of a chunk's trainable parameters: a module's dictionary, the name in it, and the layer's number."""
    found, seen = [], set()
    for block in blocks:
        for module in block.modules():
            if id(module) not in seen:
                seen.add(id(module))
                own: dict[str, Any] = module._parameters
                found += [(own, name, numbers[id(each)]) for name, each in own.items() if id(each) in numbers]
    return found


def _buffers(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """The places of the buffers that training may change: a module's dictionary and the name in it."""
    found = []
    for part in module.modules():
        own: dict[str, Any] = part._buffers
        lasting = [name for name in own if name not in part._non_persistent_buffers_set]
        found += [(own, name) for name in lasting if own[name] is not None and own[name].dtype != torch.bool]
    return found


def move(module: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Move `module` and its blocks to a device, so that the blocks go on to hold the tensors of the module.

    A block that is no part of the module may hold its parameters itself, and `Module.to` may replace a parameter.
    """
    before = [(id(each), name, each) for name, each in (*module.named_parameters(), *module.named_buffers())]
    module.to(device)
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    moved = {number: after[name] for number, name, _ in before}
    for part in {part for block in blocks for part in block.modules()}:
        tables: Sequence[dict[str, Any]] = (part._parameters, part._buffers)
        for held in tables:
            for name, tensor in held.items():
                held[name] = moved.get(id(tensor), tensor)
    for block in blocks:
        block.to(device)  # constants that the module does not hold


def own_part(module: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Remove from `module` the parameters and buffers that are in none of `blocks`, so that their memory is free."""
    parameters = {id(each) for block in blocks for each in block.parameters()}
    buffers = {id(each) for block in blocks for each in block.buffers()}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if id(parameter) not in parameters:
                part._parameters[name] = None
        for name, buffer in part._buffers.items():
            if id(buffer) not in buffers:
                part._buffers[name] = None
    return module


def seed_of(draw: Sequence[int]) -> int:
    """A seed for random layers, of the 32 bits that PyTorch's CPU generator uses."""
    text = "/".join(map(str, draw))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")


def _is_hashable(value: object) -> bool:
    """Whether a value can be a part of a key; a frozen dataclass with a list, for example, cannot."""
    try:
        hash(value)
    except TypeError:
        return False
    return True
