"""Jobs whose seconds are stated: the times and sizes of blocks, read from a file. They train in virtual time only.

    FILE.yaml                               # every quantity may have a unit (docs/reference/cluster-file.md)
        batch_size: 128                     # samples of the mini-batch that the rest is about
        input_nbytes: 77070336              # of its inputs
        blocks:                             # in the order of the computation
        - {name: conv, forward: 20 ms, backward: 45 ms, parameter_nbytes: 2 MB, output_nbytes: 822 MB}
        - name: dense
          forward: 1 ms
          backward: 2 ms
          parameters: [64 MB, 16 kB]        # bytes of each tensor, in place of one of `parameter_nbytes`
          output_nbytes: 512 kB
          activation_nbytes: 1 MB           # kept from forward to backward; `output_nbytes` if left out

    graph.txt                               # of PipeDream's profiler: a line for each operation, then one for each edge
        node2 -- Conv2d(3, 64) -- forward_compute_time=22.3, backward_compute_time=24.6,
                 activation_size=1644167168.0, parameter_size=7168.0            (milliseconds and bytes, in one line)
        <tab>node1 -- node2

The operations of a graph become blocks in topological order, by number where several are possible. Behind a block, all
tensors that later blocks read cross a border: of branches, more than the block's own. Nodes `Input...` are the inputs;
the time in which they were loaded does not count. The file does not state the samples of its mini-batch: they are the
parameter `samples`, as in `graph.txt:samples=64`.

The model is an `nn.Sequential` on PyTorch's meta device. Its blocks have parameters of the stated bytes, and outputs of
them, in whole float32 values for each sample. They make so many operations that a machine of `SPEED` without overhead
takes the stated seconds for a mini-batch of the stated size; other sizes and speeds are in proportion.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from torch import Tensor, nn

from dure.core import units
from dure.core.regular_file import read_regular
from dure.core.text import quoted
from dure.core.units import Seconds, Size
from dure.core.validated import LARGEST, FieldError, Validated, read_described
from dure.errors import UsageError
from dure.job.data.dataset import Data
from dure.job.job import Job

SPEED = 20e9
"""Operations per second of a machine that takes the stated seconds: the default of a cluster's `flops_per_second`."""

SAMPLES = 128
"""Samples of the mini-batch of a `graph.txt`, if nothing else is said."""

LENGTH = 100_000
"""Samples of the data set, which has no values."""

FLOAT32 = 4

MOST_SECONDS = 1e6
"""Longest pass of a block: torch counts the elements of tensors in 63 bits, and so does a block its operations."""

MOST_NBYTES = 10**13
"""Largest tensor of a block, for the same reason."""


def _nbytes(given: object) -> object:
    return given if given == 0 else units.size(given)


def _no_more_than(most: float, shown: str) -> AfterValidator:
    def check(value: float) -> float:
        if value > most:
            raise ValueError(f"{value:g} is more than {shown}: write less")
        return value

    return AfterValidator(check)


Nbytes = Annotated[int, BeforeValidator(_nbytes), _no_more_than(MOST_NBYTES, "10 TB")]
Pass = Annotated[Seconds, _no_more_than(MOST_SECONDS, "a million seconds")]


def of_yaml(path: Path) -> Callable[..., Job]:
    """The function of a job in YAML. Raises `UsageError` with the file and the key, as the function does."""

    def stated() -> Job:
        return _job(_described(path), path)

    return stated


def of_graph(path: Path) -> Callable[..., Job]:
    """The function of a job of PipeDream's profiler. It raises `UsageError` with the file and the line."""

    def profiled(samples: int = SAMPLES) -> Job:
        if not 1 <= samples <= LENGTH:
            problem = f"samples counts those of a mini-batch and must be from 1 to {LENGTH:,}, got {samples}"
            raise UsageError(f"{path}: {problem}.")
        return _job(_of_graph(path, samples), path)

    return profiled


# ---- descriptions


class StatedBlock(Validated):
    """A block of a job: seconds and bytes of a mini-batch. `parameters` are the bytes of each of its tensors."""

    name: str = ""
    forward: Pass
    backward: Pass
    parameter_nbytes: Nbytes = 0
    parameters: tuple[Annotated[Size, _no_more_than(MOST_NBYTES, "10 TB")], ...] = ()
    output_nbytes: Nbytes
    activation_nbytes: Nbytes | None = None

    @model_validator(mode="after")
    def _whole_values(self) -> StatedBlock:
        if self.parameters and self.parameter_nbytes:
            raise FieldError(("parameters",), "parameter_nbytes is there too: write one of them")
        for key, nbytes in (("parameter_nbytes", self.parameter_nbytes), *(("parameters", n) for n in self.parameters)):
            if nbytes % FLOAT32:
                raise FieldError((key,), f"{nbytes} is no whole number of float32 values: write a multiple of 4 bytes")
        return self

    @property
    def tensors(self) -> tuple[int, ...]:
        """The bytes of each parameter."""
        return self.parameters or ((self.parameter_nbytes,) if self.parameter_nbytes else ())

    @property
    def kept(self) -> int:
        """The bytes that forward keeps for backward."""
        return self.output_nbytes if self.activation_nbytes is None else self.activation_nbytes


class StatedBlocks(Validated):
    """The blocks of a job, with the seconds and bytes of a mini-batch of `batch_size` samples."""

    batch_size: int = Field(ge=1, le=LENGTH)
    input_nbytes: Nbytes
    blocks: tuple[StatedBlock, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _something_to_do(self) -> StatedBlocks:
        for way in ("forward", "backward"):
            if not any(getattr(each, way) for each in self.blocks):
                raise FieldError(("blocks",), f"none has seconds of {way}: state them, such as 5 ms")
        if not any(each.tensors for each in self.blocks):
            raise FieldError(("blocks",), "none has parameters to train: state their bytes, such as 4 MB")
        return self


def _described(path: Path) -> StatedBlocks:
    def made(given: dict[str, Any]) -> StatedBlocks:
        blocks = given.get("blocks")
        if isinstance(blocks, list):  # one by one, so that errors have the number of the block
            given |= {"blocks": [_block(number, each) for number, each in enumerate(blocks)]}
        return StatedBlocks(**given)

    return read_described(path, "the file of a job", StatedBlocks.model_fields, made)


def _block(number: int, given: Any) -> StatedBlock:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        example = "{name: dense, forward: 1 ms, backward: 2 ms, output_nbytes: 4 kB}"
        raise FieldError(("blocks", number), f"{quoted(given)} is no block: write keys and values, such as {example}")
    try:
        return StatedBlock(**given)
    except FieldError as error:
        raise FieldError(("blocks", number, *error.place), error.problem) from None


# ---- PipeDream's graphs

_NUMBER = r"[0-9]+(?:\.[0-9]*)?"
_NAME = r"[0-9]{1,9}"
_NODE = re.compile(
    rf"node(?P<number>{_NAME}) -- (?P<name>.*) -- forward_compute_time=(?P<forward>{_NUMBER}), "
    rf"backward_compute_time=(?P<backward>{_NUMBER}), activation_size=(?P<activation>{_NUMBER}|\[[^]]*\]), "
    rf"parameter_size=(?P<parameter>{_NUMBER})(?: -- stage_id=[0-9]+)?"
)
_EDGE = re.compile(rf"\tnode({_NAME}) -- node({_NAME})")
_FORMS = (
    "write node2 -- Conv2d -- forward_compute_time=1.5, backward_compute_time=2.5, activation_size=4096.0, "
    "parameter_size=1024.0, or an edge as <tab>node1 -- node2"
)


class GraphNode(NamedTuple):
    """An operation of a graph: seconds of its passes, and bytes of its outputs and parameters."""

    name: str
    forward: float
    backward: float
    output_nbytes: int
    parameter_nbytes: int

    @property
    def is_input(self) -> bool:
        """Whether it stands for inputs of the model."""
        return self.name.startswith("Input")


def _of_graph(path: Path, samples: int) -> StatedBlocks:
    nodes, edges = _lines(path)
    order = [number for number in _topological(path, nodes, edges) if not nodes[number].is_input]
    if not order:
        raise UsageError(f"{path}: it has no operations: {_FORMS}.")
    place = {number: at for at, number in enumerate(order)}
    last = {number: place.get(number, -1) for number in nodes}  # the last block that reads the outputs of a node
    for source, reader in edges:
        last[source] = max(last[source], place.get(reader, -1))
    changes = [0] * (len(order) + 1)  # of the bytes that cross a border, from that behind the block before
    for number, node in nodes.items():
        changes[max(0, place.get(number, -1))] += node.output_nbytes
        changes[max(0, last[number])] -= node.output_nbytes
    inputs = sum(each.output_nbytes for each in nodes.values() if each.is_input)
    borders = [*accumulate(changes[: len(order) - 1]), nodes[order[-1]].output_nbytes]
    blocks = [_block_of(path, number, nodes[number], border) for number, border in zip(order, borders, strict=True)]
    try:
        return StatedBlocks(batch_size=samples, input_nbytes=inputs, blocks=tuple(blocks))
    except FieldError as error:
        raise UsageError(f"{path}: {error}") from None


def _block_of(path: Path, number: int, node: GraphNode, border: int) -> StatedBlock:
    """The block of a node, behind which so many bytes cross the border."""
    try:
        return StatedBlock(
            name=node.name,
            forward=node.forward,
            backward=node.backward,
            parameter_nbytes=node.parameter_nbytes,
            output_nbytes=border,
            activation_nbytes=node.output_nbytes,
        )
    except FieldError as error:
        raise UsageError(f"{path}: node{number}: {error}") from None


def _lines(path: Path) -> tuple[dict[int, GraphNode], list[tuple[int, int]]]:
    """The nodes of a graph by number, and its edges."""
    try:
        text = read_regular(path, LARGEST).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise UsageError(f"{path} cannot be read ({reason}): give a graph.txt of PipeDream's profiler.") from error
    nodes: dict[int, GraphNode] = {}
    edges: list[tuple[int, int, int]] = []
    for line, content in enumerate(text.splitlines(), start=1):
        if edge := _EDGE.fullmatch(content.rstrip()):
            edges.append((int(edge[1]), int(edge[2]), line))
        elif content.strip():
            number, node = _node(content.strip(), f"{path}, line {line}")
            if number in nodes:
                raise UsageError(f"{path}, line {line}: node{number} is there twice: write it once.")
            nodes[number] = node
    for source, reader, line in edges:
        for number in (source, reader):
            if number not in nodes:
                raise UsageError(f"{path}, line {line}: there is no node{number}: write a line for it, or other ends.")
    return nodes, [(source, reader) for source, reader, _ in edges]


def _node(content: str, where: str) -> tuple[int, GraphNode]:
    found = _NODE.fullmatch(content)
    if found is None:
        raise UsageError(f"{where}: {quoted(content)} is no node and no edge: {_FORMS}.")
    try:
        outputs = [float(each) for each in found["activation"].strip("[]").split(";")]
    except ValueError:
        outputs = [math.nan]
    parameter = float(found["parameter"])
    if any(each < 0 or each % 1 for each in outputs):
        given = quoted(found["activation"])
        raise UsageError(f"{where}: activation_size={given} must be whole bytes, such as 4096.0.")
    if parameter % FLOAT32:
        right = "must be bytes of float32 values, a multiple of 4, such as 4096.0"
        raise UsageError(f"{where}: parameter_size={quoted(found['parameter'])} {right}.")
    forward, backward = (float(found[way]) / 1000 for way in ("forward", "backward"))
    return int(found["number"]), GraphNode(found["name"], forward, backward, int(sum(outputs)), int(parameter))


def _topological(path: Path, nodes: dict[int, GraphNode], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The numbers of the nodes, each after those that it reads; the smallest first where several are possible."""
    waits, readers = dict.fromkeys(nodes, 0), {number: list[int]() for number in nodes}
    for source, reader in edges:
        waits[reader] += 1
        readers[source].append(reader)
    ready = [number for number, count in waits.items() if not count]
    heapify(ready)
    order = []
    while ready:
        order.append(heappop(ready))
        for reader in readers[order[-1]]:
            waits[reader] -= 1
            if not waits[reader]:
                heappush(ready, reader)
    if len(order) < len(nodes):
        first = min(set(nodes) - set(order))
        raise UsageError(f"{path}: node{first} is in a cycle of edges or behind one: leave out an edge of the cycle.")
    return order


# ---- the job


def _job(described: StatedBlocks, path: Path) -> Job:
    inputs = torch.empty(LENGTH, _values(described.input_nbytes, described.batch_size), device="meta")

    def model() -> nn.Sequential:
        found = nn.Sequential()
        for number, block in enumerate(described.blocks):
            name = f"{number}-{block.name}".replace(".", "_")
            found.add_module(name, OperationsBlock(block, described.batch_size))
        return found

    return Job(
        name=path.stem,
        model=model,
        loss=_mean,
        train=Data(inputs, torch.empty(LENGTH, device="meta")),
        batch_size=described.batch_size,
        steps=10,
        source=f"times and sizes of {path}, no values",
        block_seconds=[(each.forward, each.backward) for each in described.blocks],
    )


def _values(nbytes: int, samples: int) -> int:
    """The float32 values of a sample whose mini-batch has so many bytes: at least one, as a tensor has values."""
    return max(1, math.ceil(nbytes / (FLOAT32 * samples)))


def _mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


class OperationsBlock(nn.Module):
    """A block of stated sizes and operations, on the meta device: inputs (batch, any), outputs (batch, values)."""

    def __init__(self, stated: StatedBlock, samples: int) -> None:
        super().__init__()
        sizes = [nbytes // FLOAT32 for nbytes in stated.tensors]
        self.tensors = nn.ParameterList(nn.Parameter(torch.empty(size, device="meta")) for size in sizes)
        self.outputs = _values(stated.output_nbytes, samples)
        self.kept = math.ceil(stated.kept / samples)
        self.forward_products = round(stated.forward * SPEED / 2 / samples)
        self.backward_products = round(stated.backward * SPEED / 2 / samples)

    def forward(self, inputs: Tensor) -> Tensor:
        """Tensors without values."""
        always = inputs.new_empty(0).requires_grad_()  # a first block without parameters has a backward too
        found: Tensor = _Operations.apply(self, inputs, always, *self.tensors)  # type: ignore[no-untyped-call]
        return found


class _Operations(torch.autograd.Function):
    """The passes of a block: products of matrices with the right number of operations."""

    @staticmethod
    def forward(ctx: Any, block: OperationsBlock, inputs: Tensor, *tensors: Tensor) -> Tensor:
        _multiply(inputs, block.forward_products)
        ctx.block, ctx.inputs, ctx.tensors = block, inputs.shape, [each.shape for each in tensors]
        ctx.save_for_backward(inputs.new_empty((len(inputs), block.kept), dtype=torch.uint8))
        return inputs.new_empty((len(inputs), block.outputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        _multiply(gradient, ctx.block.backward_products)
        return None, gradient.new_empty(ctx.inputs), *(gradient.new_empty(shape) for shape in ctx.tensors)


def _multiply(like: Tensor, products: int) -> None:
    """Make two operations per product and sample."""
    _ = like.new_empty((len(like), products)) @ like.new_empty((products, 1))
