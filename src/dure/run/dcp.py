"""Checkpoints of `torch.distributed.checkpoint` (DCP), as scripts with `fully_shard` write and read them.

    {"model": model's state_dict, "optim": optimizer's state_dict}      as get_state_dict(module, optimizer) gives both

| here                  | there                                                                |
|-----------------------|----------------------------------------------------------------------|
| `params`              | `model.NAME`                                                         |
| `optimizer.mean`      | `optim.state.NAME.exp_avg`                                           |
| `optimizer.squares`   | `optim.state.NAME.exp_avg_sq` of Adam, `optim.state.NAME.sum` of Adagrad |
| `optimizer.velocity`  | `optim.state.NAME.momentum_buffer`                                   |

Both ways, one parameter after another is in memory.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dure.errors import UsageError
from dure.job.optimizer import TORCH_FORMS, OptimizerSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from dure.job.rates import Rates
    from dure.job.replica import Layer, Replica

Read = Callable[[str, int, int], Tensor]
"""Reads elements of a vector: `SavedModel.read`."""

_KEPT = {"mean": "exp_avg", "squares": "exp_avg_sq", "velocity": "momentum_buffer"}


def torch_name(spec: OptimizerSpec, vector: str) -> str:
    """The name of an optimizer's `vector`, as `optimizer.mean`, in the state of PyTorch's optimizer."""
    kept = vector.removeprefix("optimizer.")
    return "sum" if spec.name == "adagrad" else _KEPT[kept]


def optimizer_over(rates: Rates, replica: Replica, module: nn.Module) -> torch.optim.Optimizer:
    """PyTorch's optimizer of the rule of `rates`, with its groups, over the parameters of `module`.

    `module` has the parameters of `replica` by name. Raises `UsageError` for a rule that PyTorch has not.
    """
    spec = rates.spec
    if spec.name not in TORCH_FORMS:
        raise UsageError(
            f"PyTorch has no optimizer that equals {spec.name}, so its state has no form there. Export the model alone "
            "with --to safetensors."
        )
    form, named = TORCH_FORMS[spec.name], dict(module.named_parameters())
    groups: dict[int, dict[str, Any]] = {}
    for layer in replica.layers:
        number = next((each.group for each in rates.segments if each.start <= layer.start < each.stop), 0)
        own = replace(spec, **({} if number == 0 else rates.differences[number - 1]))
        shared = {name: getattr(own, name) for name in form.shared}
        groups.setdefault(number, {"params": [], "lr": own.lr, **shared})["params"].append(named[layer.name])
    kind: Any = form.kind
    found: torch.optim.Optimizer = kind([groups[number] for number in sorted(groups)], lr=spec.lr)
    return found


def on_meta(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters have shapes alone; buffers and constants are shared."""
    known: dict[int, Any] = {}
    for each in module.parameters():
        known[id(each)] = nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
    known |= {id(each): each for each in module.buffers()}
    return copy.deepcopy(module, known)


class _FromVectors(DefaultSavePlanner):
    """Writes the values of parameters and of the optimizer's state, that it reads when each is written."""

    def __init__(self, values: Mapping[str, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        read = self._values.get(index.fqn)
        return super().lookup_object(index) if read is None else read()


def write(
    path: Path, replica: Replica, rates: Rates, vectors: Sequence[str], read: Read, *, clock: int, steps: int
) -> None:
    """Write a folder of DCP with the model and the optimizer's state at `clock`, after `steps` of the optimizer.

    The module of `replica` has the buffers and the constants; `read` gives the `vectors`.
    """
    module = on_meta(replica.module)
    optimizer = optimizer_over(rates, replica, module)
    states: tuple[dict[str, Any], Any] = get_state_dict(module, optimizer)
    model, optim = states
    frozen = {name: each for name, each in replica.module.named_parameters() if not each.requires_grad}
    model |= {name: each.detach() for name, each in frozen.items()}
    rate = rates.at(clock)
    for number, group in enumerate(optim["param_groups"]):
        group["lr"] = rate[number] if isinstance(rate, list) else rate
    values = {f"model.{name}": _reader(read, "params", layer) for name, layer in names_of(replica).items()}
    for layer in replica.layers:
        state = optim["state"].get(layer.name, {})
        if "step" in state:
            state["step"] = torch.tensor(float(steps))
        for vector in vectors:
            if vector != "params":
                key = f"optim.state.{layer.name}.{torch_name(rates.spec, vector)}"
                values[key] = _reader(read, vector, layer)
    with _alone():
        save(
            {"model": model, "optim": optim},
            storage_writer=FileSystemWriter(path, single_file_per_rank=False),  # it keeps the tensors of a file
            planner=_FromVectors(values),
            no_dist=True,
        )


@contextmanager
def _alone() -> Iterator[None]:
    """Within, PyTorch does not warn that this process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def names_of(replica: Replica) -> dict[str, Layer]:
    """The trained parameters under all names that a module's `state_dict` has for them: a tied one has several."""
    layers = {id(each): layer for each, layer in zip(replica.parameters, replica.layers, strict=True)}
    named = replica.module.state_dict(keep_vars=True)
    return {name: layers[id(each)] for name, each in named.items() if id(each) in layers}


def _reader(read: Read, vector: str, layer: Layer) -> Callable[[], Tensor]:
    return lambda: read(vector, layer.start, layer.stop).view(layer.shape)


class TorchFolder:
    """The vectors of a model in a folder of DCP at `path`: of the parameters of `replica` under the optimizer `spec`.

    The states of model and optimizer may lie at any depth: their keys end with the names of parameters. A folder of DCP
    holds pickles, so reading one can run code. Raises `UsageError` where a parameter is missing, or is another.
    """

    def __init__(self, path: Path, replica: Replica, spec: OptimizerSpec, vectors: Sequence[str]) -> None:
        self.names = vectors
        self._path, self._replica, self._spec = path, replica, spec
        try:
            found = FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:
            raise UsageError(
                f"{path} cannot be read as a folder of torch.distributed.checkpoint ({type(error).__name__}: {error}). "
                "Name the folder that dcp.save has written."
            ) from error
        self._tensors = {key: each for key, each in found.items() if isinstance(each, TensorStorageMetadata)}
        self._model = self._prefix()
        first = replica.layers[0].name
        ends = [key for key in self._tensors if key.endswith(f"state.{first}.{self._kept_name(vectors)}")]
        self._optim = min(ends, key=len).rpartition(f"{first}.")[0] if ends else None
        for name in vectors if self.has_optimizer else ["params"]:
            self._check(name)

    def _kept_name(self, vectors: Sequence[str]) -> str:
        return next((torch_name(self._spec, name) for name in vectors if name != "params"), "step")

    def _prefix(self) -> str:
        """The part before the names of parameters in the keys of the model's state."""
        names = [layer.name for layer in self._replica.layers]
        prefixes = sorted({key.removesuffix(names[0]) for key in self._tensors if key.endswith(names[0])}, key=len)
        for prefix in prefixes:
            if all(f"{prefix}{name}" in self._tensors for name in names):
                return prefix
        lacks = next((n for n in names if not any(key.endswith(n) for key in self._tensors)), names[0])
        raise UsageError(f"{self._path} has no parameter {lacks!r}: it is the state of another model.")

    def _key(self, name: str, layer: Layer) -> str:
        if name == "params":
            return f"{self._model}{layer.name}"
        return f"{self._optim}{layer.name}.{torch_name(self._spec, name)}"

    def _check(self, name: str) -> None:
        """Raise `UsageError` for a tensor that is not there, or has another shape or type than its parameter."""
        for layer in self._replica.layers:
            key, dtype = self._key(name, layer), self._replica.dtype
            if key not in self._tensors:
                raise UsageError(f"{self._path} has no {key}: the state of the optimizer is that of another rule.")
            found = self._tensors[key]
            if tuple(found.size) != layer.shape or found.properties.dtype != dtype:
                raise UsageError(
                    f"{self._path}: {key} is {found.properties.dtype} of shape {tuple(found.size)}, and the parameter "
                    f"is {dtype} of shape {layer.shape}: it is the state of another model."
                )

    @property
    def has_optimizer(self) -> bool:
        """Whether the folder has the state of the optimizer, if that has any."""
        return self._optim is not None or len(self.names) == 1

    @property
    def steps(self) -> int | None:
        """The steps that the optimizer has made; None where its state has no count of them."""
        key = f"{self._optim}{self._replica.layers[0].name}.step"
        return int(self._read(key)) if key in self._tensors else None

    def pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A vector, one parameter after another; zeros for the optimizer's where the folder has none."""
        for layer in self._replica.layers:
            if name != "params" and not self.has_optimizer:
                yield layer.start, torch.zeros(layer.numel, dtype=self._replica.dtype)
            else:
                yield layer.start, self._read(self._key(name, layer)).reshape(-1)

    def load_buffers(self) -> None:
        """Copy the buffers that the folder has to the module of the replica."""
        for name, buffer in self._replica.module.named_buffers():
            key = f"{self._model}{name}"
            if key in self._tensors:
                load_buffer(self._path, name, buffer, self._read(key))

    def _read(self, key: str) -> Tensor:
        found = self._tensors[key]
        tensor = torch.empty(found.size, dtype=found.properties.dtype)
        try:
            with _alone():
                load({key: tensor}, storage_reader=FileSystemReader(self._path), no_dist=True)
        except CheckpointException as error:  # which is no Exception
            cause = next(iter(error.failures.values()))[0]
            first = str(cause).partition("\n")[0]
            raise UsageError(
                f"{self._path}: {key} cannot be read ({type(cause).__name__}: {first}). The folder is "
                "damaged or incomplete: copy or write it again."
            ) from error
        return tensor


def load_buffer(path: Path, name: str, buffer: Tensor, found: Tensor) -> None:
    """Copy to a buffer of the model the values that the state at `path` has for it.

    Raises `UsageError` for values of another shape, or of numbers of another kind.
    """
    alike = (found.is_floating_point(), found.dtype == torch.bool) == (
        buffer.is_floating_point(),
        buffer.dtype == torch.bool,
    )
    if found.shape != buffer.shape or not alike:
        raise UsageError(
            f"{path}: {name} is {found.dtype} of shape {tuple(found.shape)}, and the buffer is {buffer.dtype} of shape "
            f"{tuple(buffer.shape)}: it is the state of another model."
        )
    buffer.copy_(found)
