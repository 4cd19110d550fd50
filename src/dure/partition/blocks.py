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

Blocks of a model that gives none, found by tracing its `forward` with torch.fx.

    job = Job(model, loss, train, stages=lambda module: traced_blocks(module, example_inputs))

The operations of `forward` are recorded in their order. Between two operations that read trainable parameters is a
border, if it has a place where only tensors go on: the place with the fewest tensors, and of several the last. A border
carries all tensors that a later block reads, so residual connections and masks pass through the blocks between.

Tracing works on a copy of the module, and the blocks hold the submodules and the parameters of the module itself. So
the module stays as it was, names of parameters stay, and tied parameters stay one object. A submodule whose `forward`
cannot be traced, since it branches on values of tensors for example, is one operation as a whole.
"""

from __future__ import annotations

import copy
import inspect
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, fx, nn

from dure.core.user_code import explain_user_errors
from dure.errors import StrategyError, UsageError
from dure.job.data.dataset import Batch, arguments, called, keywords, mapped
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
    holders = _holders(blocks)
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
                f"the parameter {name!r} has a hook on its gradient, which a stage, with a part of the flat parameters "
                "in its place, does not run. Register the hook on a tensor in the model's forward, or leave the "
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
    holders = _holders(blocks)
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


def _holders(blocks: Sequence[nn.Module]) -> dict[int, list[int]]:
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


_GIVE_STAGES = "Give the blocks by Job.stages, with a wrapper module for the operations between submodules."


def traced_blocks(module: nn.Module, example: Batch, *, tensors: int | None = None) -> list[nn.Module]:
    """The blocks of `module`, which takes inputs like `example`. At most `tensors` cross each border; None: any number.

    Raises `UsageError` for a module whose own `forward` cannot be traced, or has no border.
    """
    kind = type(module).__name__
    with explain_user_errors(f"copying the {kind} raised"):
        twin = copy.deepcopy(module)
    hooked = _without_hooks(twin)
    given = _given_arguments(twin, example)
    graph = _graph(twin.train(), given, hooked)
    if str(_graph(twin.eval(), given, hooked)) != str(graph):
        raise UsageError(
            f"the forward of the {kind} reads `training`, and a traced forward would keep its value. Use layers that "
            f"read their own, such as nn.Dropout in place of F.dropout(..., training=self.training). {_GIVE_STAGES}"
        )
    values = _Values(fx.GraphModule(twin, graph))
    inputs = [given[str(node.target)] for node in graph.find_nodes(op="placeholder")]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), explain_user_errors(f"the {kind} raised"):
        values.run(*inputs)
    starts = [0, *_starts(twin, list(graph.nodes), values.single, tensors)]
    if len(starts) == 1:
        raise UsageError(f"the forward of the {kind} has no place where only tensors go on. {_GIVE_STAGES}")
    return _split(module, twin, graph, starts)


# ---- tracing


class _Tracer(fx.Tracer):
    """A tracer that takes the submodules in `whole` as one operation each, and knows the submodule that it is in."""

    def __init__(self, whole: Collection[str]) -> None:
        super().__init__()
        self.whole = whole
        self.inside = [""]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        self.inside.append(self.path_of_module(m))
        result = super().call_module(m, forward, args, kwargs)
        self.inside.pop()  # not after an exception: the last is then where it was raised
        return result


def _without_hooks(module: nn.Module) -> set[str]:
    """Remove hooks, so that they see neither traces nor the example; return the names of the submodules that had some.

    These are operations as a whole: the submodule of the user runs its hooks.
    """
    found = set()
    for name, part in module.named_modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            if hooks:
                found.add(name)
                hooks.clear()
    return found


def _graph(module: nn.Module, given: Mapping[str, Tensor], hooked: Collection[str]) -> fx.Graph:
    """The graph of `module`, called with the arguments `given`; other arguments have their defaults."""
    parameters = inspect.signature(module.forward).parameters
    defaults = {name: each.default for name, each in parameters.items() if name not in given}
    whole = set(hooked)
    while True:
        tracer = _Tracer(whole)
        try:
            return _with_given(tracer.trace(module, defaults), given)
        except Exception as error:
            place = tracer.inside[-1]
            if not place or place in whole:
                what = f"the submodule {place!r}" if place else f"the forward of the {type(module).__name__}"
                with explain_user_errors(f"{what} cannot be traced. {_GIVE_STAGES} It raised"):
                    raise error
            whole.add(place)


def _with_given(graph: fx.Graph, given: Collection[str]) -> fx.Graph:
    """Remove arguments that are not `given`. The operations that read them only assert that they are the defaults."""
    fixed = [node for node in graph.find_nodes(op="placeholder") if node.target not in given]
    for node in fixed:
        fixed += node.users
    for node in reversed(list(dict.fromkeys(fixed))):
        graph.erase_node(node)
    return graph


def _given_arguments(module: nn.Module, example: Batch) -> dict[str, Tensor]:
    """The arguments of `forward` by name, as `called` gives them; of the dtype and on the device of the parameters."""
    parameters = inspect.signature(module.forward).parameters.values()
    kind = type(module).__name__
    starred = [each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if starred:
        raise UsageError(f"the forward of the {kind} takes any number of arguments ({starred[0]!r}). {_GIVE_STAGES}")
    like = next(module.parameters(), torch.empty(0))
    example = mapped(lambda each: each.to(like if each.is_floating_point() else like.device), example)
    with explain_user_errors(f"the forward of the {kind} does not take the example inputs:"):
        return dict(inspect.signature(module.forward).bind(*arguments(example), **keywords(example)).arguments)


class _Values(fx.Interpreter):
    """Runs a graph, and notes the operations whose value is one tensor."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.single: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.single.add(n)
        return value


# ---- cutting


def _starts(module: nn.Module, nodes: Sequence[fx.Node], single: set[fx.Node], most: int | None) -> Iterator[int]:
    """Numbers of the first operations of the blocks but the first: one border at most between two that train."""
    training = [number for number, node in enumerate(nodes) if _trains(module, node)]
    for before, after in pairwise(training):
        crossing = {number: _live(module, nodes, number) for number in range(before + 1, after + 1)}
        possible = [
            (len(live), -number)
            for number, live in crossing.items()
            if single.issuperset(live) and (most is None or len(live) <= most)
        ]
        if possible:
            yield -min(possible)[1]


def _trains(module: nn.Module, node: fx.Node) -> bool:
    """Whether an operation reads trainable parameters."""
    if node.op == "call_module":
        return any(each.requires_grad for each in module.get_submodule(str(node.target)).parameters())
    return any(_is_parameter(module, each) for each in node.all_input_nodes)


def _is_parameter(module: nn.Module, node: fx.Node) -> bool:
    return node.op == "get_attr" and isinstance(_attribute(module, str(node.target)), nn.Parameter)


def _live(module: nn.Module, nodes: Sequence[fx.Node], number: int) -> list[fx.Node]:
    """The operations before `number` whose values are read at it or later, in their order.

    A parameter does not cross a border: each block that reads it holds it, so that it is tied.
    """
    later = set(nodes[number:])
    return [node for node in nodes[:number] if later.intersection(node.users) and not _is_parameter(module, node)]


def _split(module: nn.Module, twin: nn.Module, graph: fx.Graph, starts: Sequence[int]) -> list[nn.Module]:
    nodes = list(graph.nodes)
    stops = [*starts[1:], len(nodes)]
    return [
        _block(module, twin, nodes[start:stop], _live(twin, nodes, start), _live(twin, nodes, stop))
        for start, stop in zip(starts, stops, strict=True)
    ]


def _block(
    module: nn.Module, twin: nn.Module, nodes: Sequence[fx.Node], taken: Sequence[fx.Node], given: Sequence[fx.Node]
) -> fx.GraphModule:
    """The operations `nodes` as a module that takes the values of `taken` by name and returns those of `given`."""
    graph = fx.Graph()
    held: dict[str, Any] = {}
    own = {node: graph.placeholder(node.name) for node in taken}

    def copied(node: fx.Node) -> fx.Node:
        if node not in own:
            own[node] = graph.node_copy(node, copied)  # and before it the parameters that it reads
            if node.op in ("call_module", "get_attr"):
                held[str(node.target)] = _held(module, twin, str(node.target))
        return own[node]

    for node in nodes:
        if not _is_parameter(twin, node):
            copied(node)
    if given:
        graph.output({node.name: own[node] for node in given})
    return fx.GraphModule(held, graph, class_name="TracedBlock")


def _held(module: nn.Module, twin: nn.Module, target: str) -> Any:
    """The attribute `target` of the module, or of its copy for a constant that the trace added."""
    try:
        return _attribute(module, target)
    except AttributeError:
        return _attribute(twin, target)


def _attribute(module: nn.Module, target: str) -> Any:
    path, _, name = target.rpartition(".")
    return getattr(module.get_submodule(path), name)
