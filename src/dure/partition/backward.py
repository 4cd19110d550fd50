"""The times at which backward completes each gradient, from the seconds of the model's blocks.

    seconds of a block's passes        used where
    stated                             the job states them (`Job.block_seconds`)
    operations and bytes               the engine is one of accelerators, and the model is given as blocks
    equal for equal parameters         elsewhere; backward is the share of a step that the cluster states

A block of an accelerator takes, in each of its operations, the longer of computing and moving its bytes:

    forward    sum over operations of max(FLOP, bytes * intensity), and the start of each
    backward   twice that; once of the first block that is trained, as its inputs need no gradient, and of frozen blocks
               behind it; none of blocks before it; and once more where the job computes forwards again (`recompute`)
    update     five values for each parameter, moved once (momentum)

Within a block, gradients are completed from the last parameter to the first, equally many in each second. A parameter
that several blocks hold is complete with the first of them. Only shares count: the seconds of a step are the cluster's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dure.core.step_shape import GradientTensor, StepShape
from dure.errors import DureError
from dure.job.initial_model import is_on_meta, shapes_of
from dure.partition.blocks import blocks_of, call_of, first_samples, stated_seconds

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.job.replica import Replica

UPDATED = 5
"""Values that an update moves for each parameter: of the gradient, and of weight and momentum, read and written."""

UNSAFE_VIEW = torch.ops.aten._unsafe_view
"""A view of a tensor that nothing else reads, which PyTorch does not mark as one."""

Passes = Sequence[tuple[float, float]]
"""Forward and backward of each block, in shares of any unit."""


def even(job: Job, replica: Replica, backward: float) -> StepShape:
    """A step of which `backward` is a share, which completes equally many parameters in each second."""
    backward = 1 / (2 - backward) if job.recompute else backward  # 1 - backward more, as forward is computed again
    numel = replica.numel
    numbered = reversed([*enumerate(replica.layers)])
    tensors = tuple(GradientTensor(index, each.numel, 1 - each.start / numel) for index, each in numbered)
    return StepShape(backward / job.accumulate, 0.0, tensors)


def stated(job: Job, replica: Replica) -> StepShape | None:
    """A step with the seconds of blocks that `job` states; None if it states none. Raises `UsageError`."""
    if job.block_seconds is None:
        return None
    blocks = blocks_of(job, replica.module)
    return _of_blocks(replica, blocks, stated_seconds(job, len(blocks)), 0.0, job.accumulate)


class DeviceSpeed(NamedTuple):
    """The speed of a device in its own operations of matrix products: so many `intensity` in the time of a byte.

    `start`: those in the time in which an operation starts.
    """

    intensity: float
    start: float = 0.0


class BlockCosts(NamedTuple):
    """Forward and backward of each block for a mini-batch, and the update, in operations of the device."""

    passes: Passes
    update: float
    accumulate: int

    @property
    def step(self) -> float:
        """The operations of a step."""
        return self.accumulate * sum(ahead + back for ahead, back in self.passes) + self.update


def by_operations(job: Job, replica: Replica, batch: int, speed: DeviceSpeed) -> StepShape | None:
    """A step with the operations and bytes of blocks, for mini-batches of `batch`; None for a model without blocks."""
    costs = costs_of(job, replica.module, batch, speed)
    if costs is None:
        return None
    return _of_blocks(replica, blocks_of(job, replica.module), costs.passes, costs.update, costs.accumulate)


def costs_of(job: Job, module: nn.Module, batch: int, speed: DeviceSpeed) -> BlockCosts | None:
    """The costs of the blocks of `module`, the job's model; None for a model without blocks."""
    try:
        blocks = blocks_of(job, module)
        samples = max(1, batch // job.accumulate)
        costs = _costs(job if is_on_meta(job) else shapes_of(job), samples, speed)
    except (DureError, RuntimeError):  # a model without blocks, or one that the meta device cannot compute
        return None
    if len(costs) != len(blocks):
        return None
    times = _backward_times(blocks, recompute=job.recompute)
    passes = [(each, count * each) for each, count in zip(costs, times, strict=True)]
    if not sum(back for _, back in passes):
        return None
    trained = sum(each.nbytes for each in module.parameters() if each.requires_grad)
    return BlockCosts(passes, UPDATED * trained * speed.intensity, job.accumulate)


def _backward_times(blocks: Sequence[nn.Module], *, recompute: bool) -> list[int]:
    """Backward of each block, in times its forward: for gradients of parameters and of inputs, and to recompute."""
    found, behind = [], False
    for block in blocks:
        trained = [each.requires_grad for each in block.parameters()]
        gradients = (1 if behind else 0) + (1 if any(trained) or (behind and not trained) else 0)
        found.append(gradients + (1 if recompute and gradients else 0))
        behind = behind or any(trained)
    return found


def _of_blocks(
    replica: Replica, blocks: Sequence[nn.Module], passes: Passes, update: float, accumulate: int
) -> StepShape:
    """The shape of a step of `accumulate` mini-batches; gradients are complete in the last one's backward."""
    ahead, back = (sum(each[way] for each in passes) for way in range(2))
    first_holder: dict[int, int] = {}
    for number in reversed(range(len(blocks))):
        first_holder |= {id(each): number for each in blocks[number].parameters()}
    own: list[list[int]] = [[] for _ in blocks]
    for index, parameter in enumerate(replica.parameters):
        own[first_holder[id(parameter)]].append(index)
    tensors, before = [], 0.0
    for number in reversed(range(len(blocks))):
        whole = sum(replica.layers[index].numel for index in own[number])
        completed = 0
        for index in reversed(own[number]):
            numel = replica.layers[index].numel
            completed += numel
            share = completed / whole if whole else 1.0
            tensors.append(GradientTensor(index, numel, (before + passes[number][1] * share) / back))
        before += passes[number][1]
    step = accumulate * (ahead + back) + update
    return StepShape(back / step, update / step, tuple(tensors))


def _costs(job: Job, batch: int, speed: DeviceSpeed) -> list[float]:
    """The forward of each block in operations."""
    module = job.build(0)
    call, (value, _) = call_of(job), first_samples(job, batch, torch.device("meta"))
    found = []
    with torch.no_grad():
        for block in blocks_of(job, module):
            with Roofline(speed) as roofline:
                value = call(block, value)
            found.append(roofline.operations)
    return found


class Roofline(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that sums max(FLOP, bytes * intensity) and a start over operations; views move nothing.

    Attention is one operation of its products, which moves its inputs and outputs, as the kernels of accelerators do.
    """

    def __init__(self, speed: DeviceSpeed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations = 0.0
        self._flops = 0.0
        self._speed = speed
        self._attention = _Attention(self)

    def __enter__(self) -> Self:
        self._attention.__enter__()  # type: ignore[no-untyped-call]
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._attention.__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not func.is_view and func.overloadpacket is not UNSAFE_VIEW:
            counted = flop_registry.get(func.overloadpacket)
            self._add(float(counted(*args, **kwargs, out_val=out)) if counted else 0.0, (args, kwargs, out))
        return out

    def _add(self, flops: float, tensors: Any) -> None:
        """Count an operation, with all tensors that it moves."""
        moved = sum(each.nbytes for each in tree_leaves(tensors) if isinstance(each, Tensor))
        self._flops += flops
        self.operations += max(flops, moved * self._speed.intensity) + self._speed.start

    def attend(self, compute: Callable[[], Tensor], inputs: Any) -> Tensor:
        """The result of `compute`, whose operations count as one."""
        operations, flops = self.operations, self._flops
        out = compute()
        self.operations, flops, self._flops = operations, self._flops - flops, flops
        self._add(flops, (inputs, out))
        return out


class _Attention(TorchFunctionMode):
    """Context that gives attention to a roofline: on the meta device it is its steps, in single precision."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self._roofline = roofline

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention:
            return self._roofline.attend(lambda: func(*args, **kwargs), (args, kwargs))
        return func(*args, **kwargs)
