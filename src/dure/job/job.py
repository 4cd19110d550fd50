"""Jobs: a model, a loss and data, with the settings of training on one worker.

A job is named by a word (`names.py`), by `FILE.py:FUNCTION`, a function that returns a `Job`, or by a file of stated
seconds (`stated.py`). Parameters follow the name, as in `mnist-mlp:depth=7,hidden=64`.

A measurement without a given number of samples, such as the count of operations, uses a *trial batch*.
Batch norm rejects a batch of one; a loss of pairs or triplets takes multiples of two or three.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from dure.core import user_code
from dure.core.flop_counter import FlopCounter
from dure.core.regular_file import is_regular
from dure.core.spec_text import names, nearest, parse_member, parse_value
from dure.errors import DureError, UsageError
from dure.job.companions import Companions
from dure.job.data.dataset import Data, DataSet, Samples, called, check_map_style, mapped
from dure.job.data.loaders import data_root as find_root
from dure.job.data.split import BatchSampler, Split, parse_split
from dure.job.data.stream import Stream
from dure.job.names import function_of, unknown
from dure.job.optimizer import OptimizerSpec
from dure.job.rates import Groups, Schedule, schedule_of

COUNTED = "_counted"
"""The attribute of a job with its count of operations, and the model, the loss and the data that were counted."""

PRECISIONS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""Precisions of matrix products, and the type of the parameters and gradients beside them."""


@dataclass
class Job:
    """A model, its loss and its data, with the settings that suit one worker.

    `model()` builds a new module. `train` and `test` are `Data`, a `Stream` or a map-style data set; a data set with a
    collate function is `Samples(dataset, collate)`. Inputs are a tensor, a mapping or a tuple of tensors; the model is
    called as `model(inputs)`, `model(**inputs)` or `model(*inputs)`. `loss(outputs, targets)` returns the mean over the
    batch, a scalar; `accuracy(outputs, targets)` returns a share from 0 to 1. `steps` counts mini-batches per worker.
    `split` says which samples each worker has. `optimum`, if known, is the minimum of the loss as a flat tensor of all
    parameters. `source` describes the data in words.

    `rows(inputs)` is for topologies whose servers hold parameters in rows (`hybrid`). It maps the name of each
    parameter of which a batch reads only some rows to the indices of those rows: 1-D int64, in any order, repeated or
    not. Rows that do not affect the loss, such as padding, may be left out.

    `groups(name, parameter)` returns the fields of `optimizer` that differ for a parameter. `schedule` is a function of
    the step that returns a factor for all learning rates, or a text such as "cosine:steps=1000"; the step counts the
    mini-batches of a worker from 0.

    `stages(module)` is for partitions that split the model by layers. It returns the blocks of the model in the order
    of the computation, each an `nn.Module` that takes the output of the block before it. A model that is an
    `nn.Sequential` needs none.

    `companions` are nodes beside workers and servers, from which the workers' gradients come, as in reinforcement
    learning. Then `train` has only the shapes of a sample, and `loss` is not the loss of the training.

    `block_seconds` has the seconds of forward and backward of each block for a mini-batch. In virtual time they decide
    when backward completes each gradient, and where a pipeline is cut. Only their shares count, because the cluster
    gives the seconds of a step.

    Plans and timing-only runs read three fields; real runs ignore them. `accumulate` mini-batches, of `batch_size`
    samples together, are one step: a worker sums their gradients before it reduces them. `precision` is the precision
    of matrix products ("fp32", "tf32", "fp16", "bf16", "fp8"); if empty, that of the parameters. With `recompute`,
    backward computes the forward of each block again, and only the borders of blocks are kept.

    `own_batch_size` is the `batch_size` with which the job was made, whatever replaces it later. The `seconds` of a
    step in a cluster file are those of such a mini-batch.

    A function of a job file may take `data_root` (a `Path`) and parameters of its own, all with defaults.
    """

    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor]
    train: Any
    test: Any = None
    batch_size: int = 32
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    steps: int = 500
    accuracy: Callable[[Any, Any], float] | None = None
    split: Split | str = "iid"
    name: str = ""
    optimum: Tensor | None = None
    source: str = ""
    rows: Callable[[Any], Mapping[str, Tensor]] | None = None
    groups: Groups | None = None
    schedule: Schedule | str | None = None
    stages: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    companions: Companions | None = None
    block_seconds: Sequence[tuple[float, float]] | None = None
    accumulate: int = 1
    precision: str = ""
    recompute: bool = False
    own_batch_size: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        if hasattr(self.model, "named_parameters") and not isinstance(self.model, type):
            raise UsageError("Job.model must make a fresh module when called, got a module. Write model=lambda: Net().")
        for key in ("model", "loss"):
            if not callable(getattr(self, key)):
                raise UsageError(f"Job.{key} must be a function, got {getattr(self, key)!r}.")
        for key in ("accuracy", "rows"):
            value = getattr(self, key)
            if value is not None and not callable(value):
                raise UsageError(f"Job.{key} must be a function or None, got {value!r:.80}.")
        if not isinstance(self.optimizer, OptimizerSpec):
            raise UsageError(
                f"Job.optimizer must be an OptimizerSpec, got {self.optimizer!r:.80}. "
                'Write dure.OptimizerSpec("adam", lr=0.001).'
            )
        for key in ("train", "test"):
            data = getattr(self, key)
            if not (key == "test" and data is None):
                setattr(self, key, _as_data_set(data, f"Job.{key}"))
        _check_counts(self.batch_size, self.steps, self.accumulate)
        if self.precision and self.precision not in PRECISIONS:
            raise UsageError(f"Job.precision must be one of {names(PRECISIONS)}, got {self.precision!r}.")
        if not isinstance(self.recompute, bool):
            raise UsageError(f"Job.recompute must be True or False, got {self.recompute!r:.80}.")
        self.own_batch_size = self.own_batch_size or self.batch_size
        if self.groups is not None and not callable(self.groups):
            raise UsageError(
                f"Job.groups must be a function of a parameter's name and the parameter, got {self.groups!r:.80}. "
                'Write groups=lambda name, parameter: {"weight_decay": 0.0} if parameter.dim() < 2 else {}.'
            )
        if self.stages is not None and not callable(self.stages):
            raise UsageError(
                f"Job.stages must be a function of the module that returns its blocks, got {self.stages!r:.80}. "
                "Write stages=lambda module: [module.embedding, *module.layers, module.head]."
            )
        if self.block_seconds is not None:
            _check_seconds(self.block_seconds)
        self.schedule = schedule_of(self.schedule)
        if isinstance(self.split, str):
            self.split = parse_split(self.split)

    def build(self, seed: int = 0) -> nn.Module:
        """Build a new module whose initial values depend only on `seed`; the global generator is left as it was.

        Raises `UsageError` if `model` raises, as for a model that is larger than the memory.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            with user_code.explain_user_errors("its model() raised"):
                return _made(self.model)

    def samplers(self, batch_sizes: Sequence[int], *, seed: int) -> Sequence[BatchSampler]:
        """One sampler of `train` per worker; worker k has batches of `batch_sizes[k]`."""
        split = parse_split(self.split) if isinstance(self.split, str) else self.split
        data: DataSet = self.train
        return data.samplers(split, batch_sizes, seed=seed)

    @property
    def graded(self) -> DataSet:
        """The data of evaluations: `test`, else `train`; a `Stream` is read in windows that do not overlap."""
        data: DataSet = self.train if self.test is None else self.test
        return dataclasses.replace(data, windows="contiguous") if isinstance(data, Stream) else data

    @property
    def own_flops(self) -> float:
        """Floating-point operations of a step of the job's own mini-batch."""
        return self.own_batch_size * self.flops_per_sample

    @property
    def flops_per_sample(self) -> float:
        """Floating-point operations of one sample's forward and backward pass, counted by PyTorch's counter.

        The counter includes matrix products and convolutions only. A model without them is charged six operations per
        parameter, the cost of a dense layer. With `recompute`, the forward counts twice.
        """
        of = (self.model, self.loss, self.train, self.recompute)
        counted: tuple[tuple[object, ...], float] | None = self.__dict__.get(COUNTED)
        if counted is None or any(one is not other for one, other in zip(counted[0], of, strict=True)):
            counted = self.__dict__[COUNTED] = of, _count_flops(self)
        return counted[1]

    def adjusted(self, **changes: Any) -> Job:
        """The same job with other values, such as its optimizer; the count of a sample's operations is kept."""
        found = dataclasses.replace(self, **changes)
        if COUNTED in self.__dict__:
            found.__dict__[COUNTED] = self.__dict__[COUNTED]
        return found

    def to(self, dtype: torch.dtype) -> Job:
        """The same job with floating-point data and parameters of `dtype`."""
        train = self.train.to(dtype)
        test = None if self.test is None else self.test.to(dtype)
        optimum = None if self.optimum is None else self.optimum.to(dtype)
        model = partial(_build_as, self.model, dtype)
        return dataclasses.replace(self, train=train, test=test, optimum=optimum, model=model)


def _check_counts(batch_size: Any, steps: Any, accumulate: Any) -> None:
    for key, value in (("batch_size", batch_size), ("steps", steps), ("accumulate", accumulate)):
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"Job.{key} must be a whole number of at least 1, got {value!r}.")
    if accumulate > batch_size:
        raise UsageError(
            f"Job.accumulate={accumulate} divides a step of batch_size={batch_size} samples, which has fewer: write "
            f"accumulate={batch_size} or less, or a larger batch_size."
        )


def _check_seconds(given: Any) -> None:
    """Raise `UsageError` unless `given` are pairs of finite seconds, of which some are above 0 in both passes."""
    right = "Write forward and backward of each block, as in block_seconds=[(0.01, 0.02), (0.002, 0.004)]."
    pairs = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else []
    if not pairs:
        raise UsageError(f"Job.block_seconds must be a list of pairs of seconds or None, got {given!r:.80}. {right}")
    for number, pair in enumerate(pairs):
        values = list(pair) if isinstance(pair, list | tuple) else []
        if len(values) != 2 or not all(isinstance(each, int | float) and 0 <= each < math.inf for each in values):
            raise UsageError(
                f"Job.block_seconds[{number}] must be two finite numbers of at least 0, got {pair!r:.80}. {right}"
            )
    for way, index in (("forward", 0), ("backward", 1)):
        if not any(pair[index] for pair in pairs):
            raise UsageError(f"Job.block_seconds has no seconds of {way} above 0, got {given!r:.80}. {right}")


def _as_data_set(data: Any, what: str) -> DataSet:
    """`data` itself if it is a `DataSet`, else `Samples(data)`. Raises `UsageError` unless `data` is map-style."""
    if isinstance(data, Data | Samples | Stream):
        return data
    if isinstance(data, Tensor | Mapping | tuple | str) or data is None:
        raise UsageError(f"{what} must be Data, got {type(data).__name__}. Write dure.Data(inputs, targets).")
    check_map_style(data, what)
    return Samples(data)


def load_job(name_or_path: str, data_root: Path | str | None = None, **overrides: Any) -> Job:
    """Load the job called `name_or_path`: a name of `names.py`, `FILE.py:FUNCTION`, or a file of stated seconds.

    The text may give parameters of the job's function: `mnist-mlp:depth=7,hidden=64`, `FILE.py:FUNCTION:rows=8`.
    `data_root` is the folder of data sets (`data/loaders.py` defines the default). Each of `overrides` replaces a
    parameter of the job's function (`hidden`, `dim`), a field of `Job` (`batch_size`, `steps`, `split`), a field of its
    optimizer (`lr`, `momentum`), or `dtype` ("float32", "float64"). An override of None has no effect.

    Raises `UsageError` for a name or an override that does not exist, `DataError` for data that is not available.
    """
    name, texts = parse_member(name_or_path)
    given = {key: value for key, value in overrides.items() if value is not None}
    offered = function_of(name)
    file, function_name = ("", "") if offered is not None else _file(name)
    with user_code.imports_beside(Path(file)) if file else nullcontext():
        function = offered or _function(user_code.run(file), function_name, name)
        parameters = set(inspect.signature(function).parameters)
        own = _values(function, texts, name)
        own |= {key: given.pop(key) for key in list(given) if key in parameters and key != "data_root"}
        _check_overrides(given, parameters, name)
        if "data_root" in parameters:
            own["data_root"] = find_root(data_root)
        _check_call(function, own, name)
        with user_code.explain_user_errors(f"{name} raised"):
            job = function(**own)
    if not isinstance(job, Job):
        raise UsageError(f"{name} must return a dure.Job, it returned {type(job).__name__}.")
    job = _override(job, given)
    job.name = job.name or function_name or name
    if file:
        job.model = user_code.beside(file, job.model)
    return job


def _file(text: str) -> tuple[str, str]:
    """The file and the function of FILE.py:FUNCTION. Raises `UsageError` for any other text."""
    path, _, function = text.rpartition(":")
    if path.endswith(".py"):
        if not is_regular(Path(path)):
            raise UsageError(f"there is no file {path} (looked from {Path.cwd()}). Write FILE.py:FUNCTION.")
        return path, function
    if text.endswith(".py"):
        raise UsageError(f"{text} does not say which function makes the job. Write {text}:FUNCTION.")
    raise UsageError(unknown(text))


def _function(module: ModuleType, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if not callable(function):
        functions = inspect.getmembers(module, inspect.isfunction)
        known = [key for key, value in functions if value.__module__ == module.__name__]
        raise UsageError(f"{text}: the file has {names(known) or 'no functions'}, not {name!r}.{nearest(name, known)}")
    return function  # type: ignore[no-any-return]


def _values(function: Callable[..., Any], texts: Mapping[str, str], name: str) -> dict[str, Any]:
    """Parameters of a job's function from `texts`, with the type of the annotation, else of the default."""
    hints = get_type_hints(function) if texts else {}
    known = {key: each for key, each in inspect.signature(function).parameters.items() if key != "data_root"}
    values: dict[str, Any] = {}
    for key, text in texts.items():
        if key not in known:
            raise UsageError(f"{name} has no parameter {key!r}; it has {names(known) or 'none'}.{nearest(key, known)}")
        try:
            values[key] = parse_value(text, hints.get(key, type(known[key].default)))
        except ValueError as error:
            raise UsageError(f"{name}: {key} must be {error}, got {text!r}.") from error
    return values


def _check_call(function: Callable[..., Any], given: Mapping[str, Any], text: str) -> None:
    for key, parameter in inspect.signature(function).parameters.items():
        starred = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and key not in given and not starred:
            raise UsageError(
                f"{text} needs a value for {key!r}, and none is given. Give every parameter of a job's function a "
                f"default (but data_root): {key}=..."
            )


def _check_overrides(given: Mapping[str, Any], parameters: Iterable[str], text: str) -> None:
    fields = {each.name for kind in (Job, OptimizerSpec) for each in dataclasses.fields(kind)}
    right = {*parameters, *fields, "dtype"} - {"data_root", "name", "own_batch_size"}
    for key in given:
        if key not in right:
            raise UsageError(f"{text} has no setting {key!r}; it has {names(sorted(right))}.{nearest(key, right)}")


def _override(job: Job, given: Mapping[str, Any]) -> Job:
    fields = {each.name for each in dataclasses.fields(Job)}
    own = {key: value for key, value in given.items() if key in fields}
    rule = {key: value for key, value in given.items() if key not in fields and key != "dtype"}
    job = dataclasses.replace(job, **own)
    job.optimizer = dataclasses.replace(job.optimizer, **rule)
    return job.to(dtype_named(given["dtype"])) if "dtype" in given else job


def dtype_named(text: str) -> torch.dtype:
    """The floating-point dtype that `text` names.

    >>> dtype_named("float64")
    torch.float64
    """
    right = {"float32": torch.float32, "float64": torch.float64}
    if text not in right:
        raise UsageError(f"a job's dtype is {' or '.join(right)}, got {text!r}.")
    return right[text]


def _build_as(model: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    return _made(model).to(dtype)


def _made(model: Callable[[], nn.Module]) -> nn.Module:
    module = model()
    if not isinstance(module, nn.Module):
        raise UsageError(f"Job.model must make a torch.nn.Module, it made {module!r:.80}. Write model=lambda: Net().")
    return module


# ---- trial batches

ROWS = 2
"""Samples of a trial batch, where the job takes so many."""


def _count_flops(job: Job) -> float:
    """Count the operations of one sample: of ROWS, or else of a mini-batch, such as that of a loss of triplets."""
    try:
        return _count_rows(job, ROWS)
    except DureError:
        if job.batch_size == ROWS:
            raise
    return _count_rows(job, job.batch_size)


def _count_rows(job: Job, rows: int) -> float:
    module = job.build()
    inputs, targets = job.train.batch(torch.arange(rows) % len(job.train))
    counter = FlopCounter()
    explained = user_code.explain_user_errors("counting its model's operations raised")
    with explained, torch.random.fork_rng(devices=[]), counter:
        loss = job.loss(called(module, inputs), targets)
        ahead = counter.get_total_flops()
        check_graph(loss)
        loss.backward()  # type: ignore[no-untyped-call]
    again = ahead if job.recompute else 0
    charged = (2.0 * job.recompute + 6.0) * sum(each.numel() for each in module.parameters() if each.requires_grad)
    return (counter.get_total_flops() + again) / rows or charged


def trial_rows(job: Job, module: nn.Module) -> int:
    """The number of samples of a trial batch: ROWS, or a mini-batch of a job that does not take ROWS."""
    return ROWS if refusal(job, module, ROWS) is None else job.batch_size


def refusal(job: Job, module: nn.Module, rows: int) -> str | None:
    """The error of the model or the loss on a batch of `rows` samples; None without one.

    Runs a forward, and one with gradients where that fails: a model may differentiate in its forward. Without them
    the activations of a whole pipeline are not kept. Buffers and random state are left as they were.
    """
    found = _refusal(job, module, rows, gradients=False)
    return found if found is None else _refusal(job, module, rows, gradients=True)


def _refusal(job: Job, module: nn.Module, rows: int, *, gradients: bool) -> str | None:
    device = next(module.parameters()).device
    buffers = [(each, each.clone()) for each in module.buffers()]
    try:
        with user_code.explain_user_errors(f"a batch of {rows} samples raised"), torch.random.fork_rng(devices=[]):
            batch = job.train.batch(torch.arange(rows) % len(job.train))
            inputs, targets = (mapped(lambda each: each.to(device, copy=True), each) for each in batch)
            with torch.set_grad_enabled(gradients):
                job.loss(called(module, inputs), targets)
    except DureError as error:
        return str(error)
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    return None


def check_graph(loss: Tensor) -> None:
    """Raise `UsageError` for a loss whose gradients `torch.autograd.grad` cannot compute, or not all of them."""
    if "CheckpointFunctionBackward" in _nodes(loss):  # its parameters would have no gradient, or autograd raises
        raise UsageError(
            "its model calls torch.utils.checkpoint with use_reentrant=True, and dure computes gradients by "
            "torch.autograd.grad, with which PyTorch supports use_reentrant=False only. Write "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False): the gradients are the same."
        )


def _nodes(loss: Tensor) -> set[str]:
    """The names of the operations in the graph of `loss`."""
    found, seen, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(node.name())
            left += [each for each, _ in node.next_functions]
    return found
