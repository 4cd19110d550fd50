"""Blocks of a model: the smallest parts that a partition by layers puts into stages.

    | job                               | blocks                          | call of a block                        |
    |-----------------------------------|---------------------------------|----------------------------------------|
    | `Job.stages` is given             | what `stages(module)` returns   | `block(x)`, `block(*x)`, `block(**x)`  |
    | the model is an `nn.Sequential`   | its children                    | `block(x)`                             |

`x` is the output of the block before, or the inputs of the mini-batch. With `Job.stages` the structure of `x` (a
tensor, a tuple, a mapping) selects the call, as for a whole model (`job/data/dataset.py`).

A block is a submodule of the model, or a module of the user that wraps submodules and adds what the model's `forward`
does between them. The blocks hold every trainable parameter of the model, and no other. A parameter that several blocks
hold is *tied*: if they are in different stages, each stage has a copy. Pipelines that flush sum the gradients of the
copies; in other pipelines the copies would differ, so those refuse it (`refuse_ties`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from dure.core.user_code import explain_user_errors
from dure.errors import StrategyError, UsageError
from dure.job.data.dataset import Batch, called, mapped
from dure.job.replica import has_hooks

if TYPE_CHECKING:
    from dure.job.job import Job


_WRITE = "Write stages=lambda module: [module.embedding, *module.layers, module.head] in the Job."


def blocks_of(job: Job, module: nn.Module) -> list[nn.Module]:
    """The blocks of `module`, a model of `job`, in the order of the computation.

    Raises `UsageError` for a model that gives no blocks, and for blocks that do not hold each trainable parameter.
    """
    what = f"job {job.name!r}" if job.name else "this job"
    blocks = _given(job, module, what)
    _check_parameters(module, blocks, what)
    _check_buffers(module, blocks, what)
    return blocks


def is_one_block(job: Job, module: nn.Module) -> bool:
    """Whether a model has no blocks, so that it can be one stage alone."""
    return job.stages is None and not (is_sequence(module) and len(module))


def stated_seconds(job: Job, count: int) -> Sequence[tuple[float, float]]:
    """The seconds that `job` states for its `count` blocks; a backward that recomputes has those of forward, too.

    Raises `UsageError` for another number of blocks.
    """
    assert job.block_seconds is not None
    if count != len(job.block_seconds):
        raise UsageError(
            f"{job.name or 'the job'} states the seconds of {len(job.block_seconds)} blocks in block_seconds, and its "
            f"model has {count} blocks. State forward and backward of each block of the model."
        )
    return [(ahead, back + ahead * job.recompute) for ahead, back in job.block_seconds]


def call_of(job: Job, *, whole: bool = False) -> Callable[[nn.Module, Any], Any]:
    """The call of a block with the output of the block before, or of a `whole` model that is one block."""
    return _call_with_one if job.stages is None and not whole else called


def block_name(number: int, block: nn.Module) -> str:
    """The name of a block in messages.

    >>> block_name(3, nn.ReLU())
    'block 3 (ReLU)'
    """
    return f"block {number} ({type(block).__name__})"


def check_composition(job: Job, module: nn.Module, blocks: Sequence[nn.Module], rows: int = 2) -> None:
    """Compare the loss of `blocks`, called in order, with that of `module`: on the first samples, in evaluation mode.

    Raises `UsageError` if they differ: then the blocks leave out or repeat a part of the model's `forward`. The modes
    of the modules and the state of random generators stay as they were.
    """
    inputs, targets = first_samples(job, rows, next(module.parameters()).device)
    parts = [*module.modules(), *(part for block in blocks for part in block.modules())]
    modes = [(part, part.training) for part in parts]
    call, value = call_of(job), inputs
    try:
        for part in parts:
            part.training = False
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            whole = job.loss(called(module, inputs), targets).detach()
            for number, block in enumerate(blocks):
                with explain_user_errors(f"{block_name(number, block)} raised"):
                    value = call(block, value)
            with explain_user_errors("the loss of the last block's outputs raised"):
                cut = job.loss(value, targets).detach()
    finally:
        for part, mode in modes:
            part.training = mode
    if not whole.is_meta and not torch.allclose(whole, cut, rtol=1e-4, atol=1e-6, equal_nan=True):
        raise UsageError(
            f"the blocks in order have a loss of {float(cut):g} on the first {rows} samples, and the model one of "
            f"{float(whole):g}. Let Job.stages return every part of the model's forward once, in the order of forward. "
            "A wrapper module adds the operations between submodules."
        )


def first_samples(job: Job, rows: int, device: torch.device) -> tuple[Batch, Batch]:
    """Inputs and targets of the first `rows` samples of the training data, which starts again at its end."""
    inputs, targets = job.train.batch(torch.arange(rows) % len(job.train))
    return mapped(lambda each: each.to(device), inputs), mapped(lambda each: each.to(device), targets)


# ---- tied parameters


def tied(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, tuple[int, ...]]:
    """Names of the trainable parameters that several blocks hold, with the numbers of these blocks.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> model[2].weight = model[0].weight
    >>> tied(model, list(model))
    {'0.weight': (0, 2)}
    """
    holders = holders_of(blocks)
    named = ((name, holders.get(id(each), ())) for name, each in module.named_parameters() if each.requires_grad)
    return {name: tuple(numbers) for name, numbers in named if len(numbers) > 1}


def tied_stages(ties: Mapping[str, Sequence[int]], cuts: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Names of the parameters of `tied` that lie in several stages of a model cut at `cuts`, with these stages.

    >>> tied_stages({"table": (0, 5), "norm": (2, 3)}, cuts=(2, 4))
    {'table': (0, 2)}
    """
    stages = {name: tuple(sorted({bisect_right(cuts, each) for each in numbers})) for name, numbers in ties.items()}
    return {name: numbers for name, numbers in stages.items() if len(numbers) > 1}


FLUSHING = "a pipeline that flushes, such as gpipe or 1f1b, which sums the gradients of tied parameters"


def refuse_ties(method: str, ties: Mapping[str, Sequence[int]], instead: str = FLUSHING) -> None:
    """Raise `StrategyError` if `ties`, which `tied_stages` gave, has a parameter: `method` has no common update."""
    for name, stages in ties.items():
        raise StrategyError(
            f"the parameter {name!r} is tied: stages {_listed(stages)} hold it, and {method} updates each of them at a "
            f"time of its own, so the copies would differ. Use {instead}, or choose cuts that put the blocks with it "
            "into one stage."
        )


def refuse_hooks(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise `UsageError` for hooks of a model that its blocks, with parameters of their own, would not run."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"the parameter {name!r} has a hook on its gradient, and a stage does not run it: the stage computes "
                "with flat parameters in its place. Register the hook on a tensor in the model's forward, or leave the "
                "partition out."
            )
    inside = {id(part) for block in blocks for part in block.modules()}
    for name, part in module.named_modules():
        if id(part) not in inside and has_hooks(part):
            raise UsageError(
                f"the module {name or type(part).__name__!r} has a hook, and belongs to no block of the model, so "
                "that no stage runs the hook. Register the hook on a block, or leave the partition out."
            )


# ---- checks


def _given(job: Job, module: nn.Module, what: str) -> list[nn.Module]:
    if job.stages is None:
        if is_sequence(module) and len(module):
            return list(module)  # `children()` would list a layer that occurs twice once
        raise UsageError(
            f"{what} does not say how its model, a {type(module).__name__}, is cut into stages: it is "
            f"{_no_sequence(module)}. {_WRITE}"
        )
    with explain_user_errors(f"Job.stages of {what} raised"):
        found = job.stages(module)
        blocks = list(found) if isinstance(found, list | tuple | nn.ModuleList | nn.Sequential) else None
    if not blocks:
        raise UsageError(f"Job.stages of {what} must return a list of modules, got {found!r:.80}. {_WRITE}")
    for number, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise UsageError(
                f"Job.stages of {what} must return modules, got {type(block).__name__} as block {number}. Wrap "
                "functions: class Flat(nn.Module), whose forward calls the function."
            )
    return blocks


def is_sequence(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether a module calls its children in order: an `nn.Sequential`, or a subclass without a forward of its own."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _no_sequence(module: nn.Module) -> str:
    if not isinstance(module, nn.Sequential):
        return "no torch.nn.Sequential"
    return "empty" if is_sequence(module) else "a torch.nn.Sequential with a forward of its own"


def _check_parameters(module: nn.Module, blocks: Sequence[nn.Module], what: str) -> None:
    """Raise `UsageError` unless the blocks hold the trainable parameters of the module, and no others."""
    holders = holders_of(blocks)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in holders:
            raise UsageError(
                f"no block of {what} holds the parameter {name!r}, so no stage would train it: Job.stages leaves out "
                f"{_left_out(module, name, holders)}. Let one of the blocks be it or wrap it."
            )
    own = {id(each) for each in module.parameters()}
    for number, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if parameter.requires_grad and id(parameter) not in own:
                raise UsageError(
                    f"{block_name(number, block)} of {what} holds the parameter {name!r}, which is none of the "
                    "model's. Build blocks from the submodules of the module that Job.stages is given."
                )


def _check_buffers(module: nn.Module, blocks: Sequence[nn.Module], what: str) -> None:
    """Raise `UsageError` if two blocks hold buffers that training changes: each stage would change its own copy."""
    persistent = {id(each) for each in module.state_dict(keep_vars=True).values()}
    names = {id(each): name for name, each in module.named_buffers() if id(each) in persistent and _changes(each)}
    holder: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for buffer in block.buffers():
            first = holder.setdefault(id(buffer), number)
            if first != number and id(buffer) in names:
                owner = names[id(buffer)].rpartition(".")[0]
                raise UsageError(
                    f"blocks {first} and {number} of {what} both hold {_submodule(module, owner)}, whose buffer "
                    f"{names[id(buffer)]!r} changes in training: each stage would change a copy of its own. Put it "
                    "into one block, or give each block a module of its own."
                )


def _changes(buffer: Tensor) -> bool:
    """Whether training may change a buffer (`job/replica.py`): booleans and complex numbers are constants."""
    return buffer.dtype != torch.bool and not buffer.is_complex()


def holders_of(blocks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """The numbers of the blocks that hold each parameter, by the parameter's identity."""
    found: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            found.setdefault(id(parameter), []).append(number)
    return found


def _left_out(module: nn.Module, name: str, holders: Mapping[int, object]) -> str:
    """The outermost submodule with parameter `name` of which no block holds a parameter."""
    path = name.split(".")[:-1]
    for length in range(1, len(path) + 1):
        inner = ".".join(path[:length])
        if not any(id(each) in holders for each in module.get_submodule(inner).parameters()):
            return _submodule(module, inner)
    return f"{name!r} of {_submodule(module, '.'.join(path))}"


def _submodule(module: nn.Module, path: str) -> str:
    kind = type(module.get_submodule(path)).__name__
    return f"the submodule {path!r} ({kind})" if path else f"the model itself ({kind})"


def _call_with_one(block: nn.Module, value: Any) -> Any:
    return block(value)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
