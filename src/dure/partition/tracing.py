"""Blocks of a model that gives none, found by tracing its `forward` with torch.fx.

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
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn

from dure.core.user_code import explain_user_errors
from dure.errors import UsageError
from dure.job.data.dataset import Batch, arguments, keywords, mapped

_WRITE = "Give the blocks by Job.stages, with a wrapper module for the operations between submodules."


def traced_blocks(module: nn.Module, example: Batch, *, tensors: int | None = None) -> list[nn.Module]:
    """The blocks of `module`, which takes inputs like `example`. At most `tensors` cross each border; None: any number.

    Raises `UsageError` for a module whose own `forward` cannot be traced, or has no border.
    """
    kind = type(module).__name__
    with explain_user_errors(f"copying the {kind} raised"):
        twin = copy.deepcopy(module)
    hooked = _without_hooks(twin)
    given = _given(twin, example)
    graph = _graph(twin.train(), given, hooked)
    if str(_graph(twin.eval(), given, hooked)) != str(graph):
        raise UsageError(
            f"the forward of the {kind} reads `training`, and a traced forward would keep its value. Use layers that "
            f"read their own, such as nn.Dropout in place of F.dropout(..., training=self.training). {_WRITE}"
        )
    values = _Values(fx.GraphModule(twin, graph))
    inputs = [given[str(node.target)] for node in graph.find_nodes(op="placeholder")]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), explain_user_errors(f"the {kind} raised"):
        values.run(*inputs)
    starts = [0, *_starts(twin, list(graph.nodes), values.single, tensors)]
    if len(starts) == 1:
        raise UsageError(f"the forward of the {kind} has no place where only tensors go on. {_WRITE}")
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
                with explain_user_errors(f"{what} cannot be traced. {_WRITE} It raised"):
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


def _given(module: nn.Module, example: Batch) -> dict[str, Tensor]:
    """The arguments of `forward` by name, as `called` gives them; of the dtype and on the device of the parameters."""
    parameters = inspect.signature(module.forward).parameters.values()
    kind = type(module).__name__
    starred = [each.name for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    if starred:
        raise UsageError(f"the forward of the {kind} takes any number of arguments ({starred[0]!r}). {_WRITE}")
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
