"""Replicas whose inside `fully_shard` synchronizes: groups of ranks, and each rank's part of the model of its group.

    device mesh          inside 0               inside 1
    group 0              rank 0: rows 0 to 2    rank 1: rows 3 and 4      in every step: fully_shard, inside a group
    group 1              rank 2: rows 0 to 2    rank 3: rows 3 and 4
                         line (0, 2)            line (1, 3)               at a synchronization: dure, along a line

The ranks of a line have the same part of the model, each in a group. A method whose decisions depend on no value of the
model runs on each line by itself. Decisions that do depend on values, such as a skipped step, are those of all ranks.

`fully_shard` keeps the parts in memory of its own. So `PartReplica.params` is a copy: the method works on the copy,
and the optimizer of the loop on the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from dure.errors import ReplicaError, UsageError
from dure.job.replica import Layer, Replica, refuse_mixture, trainable
from dure.run.strategy import UNSTAGED, member_text, name_of
from dure.sync.base import traits_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dure.run.strategy import Strategy

_FOR_EACH_STEP = (
    "For a mean over all ranks in each step, leave dure.attach out and give fully_shard both dimensions of the mesh, "
    'fully_shard(model, mesh=mesh); or leave fully_shard and across out, and write shard="zero:stage=2".'
)


# ---- strategies


def check_strategy(strategy: Strategy) -> None:
    """Raises `UsageError` for a strategy that does not run across groups."""
    traits, topology = traits_of(strategy.sync), member_text("topology", strategy.topology)
    sync = member_text("sync", strategy.sync)
    if name_of("topology", strategy.topology) != "collective":
        raise UsageError(
            f"{sync} over {topology} does not run across groups: servers and neighbors take whole models, and a rank "
            'has a part of one. Take sync="averaging", "bmuf" or "diloco" with topology="collective".'
        )
    if topology != "collective":
        raise UsageError(
            f"{topology} does not run across groups: their ranks meet in the collectives of torch.distributed. Write "
            'topology="collective".'
        )
    if traits.delivers == "replica":
        raise UsageError(
            f"{sync} exchanges the gradients of every step, and fully_shard does that inside each group. "
            f'{_FOR_EACH_STEP} Across groups take sync="averaging", "bmuf" or "diloco".'
        )
    if not traits.staged or traits.reasons.stages:
        because = traits.reasons.stages or UNSTAGED
        raise UsageError(
            f"{sync} does not run across groups, since a rank has a part of the model, as in a stage: {because}. Take "
            'sync="averaging", "bmuf" or "diloco".'
        )


# ---- ranks


@dataclass(frozen=True, slots=True)
class Lines:
    """The ranks of a training in lines: those of a line have the same part of the model, each in another group.

    Without `fully_shard` all ranks are one line, and each is a group.
    """

    lines: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, placed: Sequence[Mapping[str, Any]]) -> Lines:
        """The lines of ranks with these `place_of`.

        Raises `UsageError` if ranks name different lines, or `fully_shard` has split a model over ranks of two groups.
        """
        if not any(each["line"] for each in placed):
            return cls((tuple(range(len(placed))),))
        lines = [tuple(each["line"]) for each in placed]
        for rank, line in enumerate(lines):
            other = next((other for other in line if lines[other] != line), rank)
            alike = rank in line and len(line) == len(lines[0]) and lines[other] == line
            if not alike or sorted(line) != [*line]:  # process groups of torch.distributed sort their ranks
                raise UsageError(
                    f"across has the ranks {list(line)} at rank {rank}, and {list(lines[other])} at rank {other}. All "
                    f"ranks must give the same dimension of one mesh of all ranks, in which they ascend. {_INSIDE}"
                )
        for rank, line in enumerate(lines):
            apart = [other for other in placed[rank]["inside"] if lines[other].index(other) != line.index(rank)]
            if apart:
                raise UsageError(
                    f"fully_shard has split the model of rank {rank} over rank {apart[0]} too, which is in another "
                    f"group. {_INSIDE}"
                )
        return cls(tuple(sorted(set(lines))))

    def line(self, rank: int) -> tuple[int, ...]:
        """The line of a rank, in the order of groups."""
        return next(line for line in self.lines if rank in line)

    def of_groups(self, sizes: Sequence[int]) -> list[int]:
        """The sum over the ranks of each group of their `sizes`."""
        return [sum(sizes[rank] for rank in group) for group in zip(*self.lines, strict=True)]


_INSIDE = (
    'Split it inside a group alone, and give dure the other dimension: fully_shard(model, mesh=mesh["inside"]) and '
    'across=mesh["groups"], for mesh = init_device_mesh(device, (groups, ranks of a group), mesh_dim_names=("groups", '
    '"inside")).'
)


def place_of(replica: Replica, across: DeviceMesh | None) -> dict[str, Any]:
    """The `line` of this rank in `across`, and the ranks `inside` its group; empty without `across`."""
    if across is None or not isinstance(replica, PartReplica):
        return {"line": [], "inside": []}
    return {"line": across.mesh.tolist(), "inside": replica.inside}


def check_across(across: object) -> None:
    """Raises `UsageError` for something other than one dimension of a device mesh."""
    from torch.distributed.device_mesh import DeviceMesh

    found = f"a mesh of {across.ndim} dimensions" if isinstance(across, DeviceMesh) else f"a {type(across).__name__}"
    if not isinstance(across, DeviceMesh) or across.ndim != 1:
        raise UsageError(
            f"across is the dimension of a device mesh along which dure synchronizes, got {found}. {_INSIDE}"
        )


# ---- the part of a rank


class PartReplica(Replica):
    """This rank's part of `module`, which `fully_shard` has split: `params` is a copy of it.

    `collect` copies the part of the module to `params`, and `publish` copies it back. `grads` is a copy too, which
    `check` makes and `zero_grad` frees. `layers` have the shapes of the part: a parameter with fewer rows than ranks is
    empty at some. `inside` are the group's ranks.

    Raises:
        UsageError: a trainable parameter is not split.
        ReplicaError: the part cannot be laid out flat.
    """

    is_part: ClassVar[bool] = True

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        from torch.distributed.fsdp import FSDPModule  # it takes long, and who gives `across` has imported it

        self._sharded = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self._reshard()
        found = trainable(module)
        _check_split(type(module).__name__, found)
        parts = [local(parameter) for _, parameter in found]
        refuse_mixture(type(module).__name__, [(name, part) for (name, _), part in zip(found, parts, strict=True)])
        stops = list(accumulate(part.numel() for part in parts))
        self.layers = tuple(
            Layer(name, stop - part.numel(), stop, tuple(part.shape))
            for (name, _), part, stop in zip(found, parts, stops, strict=True)
        )
        self._trained = tuple(parameter for _, parameter in found)
        self._slots = ()
        self.keeps_gradients, self._hidden = True, ()
        self.params = torch.cat([part.reshape(-1) for part in parts])
        self.grads = self.marked_grads = _zeros(self.params)
        meshes: list[DeviceMesh] = [each.device_mesh for _, each in found]  # type: ignore[attr-defined]
        self.inside = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
        self._note_registered()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        return self._trained

    def _reshard(self) -> None:
        """Have the module hold its part alone: a forward without gradients leaves whole parameters, which go stale."""
        for each in self._sharded:
            each.reshard()

    def _views(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the slice of a flat tensor that belongs to its part, in the shape of the part."""
        for layer, parameter in zip(self.layers, self._trained, strict=True):
            yield parameter, flat[layer.start : layer.stop].view(layer.shape)

    # ---- values

    def publish(self) -> None:
        self._reshard()
        for parameter, values in self._views(self.params):
            local(parameter).copy_(values)

    def collect(self) -> None:
        for parameter, values in self._views(self.params):
            values.copy_(local(parameter))

    def load(self, values: Tensor) -> None:
        super().load(values)
        self.publish()

    @contextmanager
    def stepping(self, unused: Iterable[int]) -> Iterator[None]:
        self.publish()
        for parameter, gradient in self._views(self.grads):
            if parameter.grad is not None:
                local(parameter.grad).copy_(gradient)
        yield
        self.collect()

    # ---- gradients: as in plain PyTorch, a parameter without a gradient has None

    def is_unused(self, index: int) -> bool:
        return self._trained[index].grad is None

    def is_emptied(self, but: int | None = None) -> bool:
        """False: `fully_shard` may hold gradients that it has not exchanged (`set_requires_gradient_sync`)."""
        return False

    @contextmanager
    def without_gradients(self, indices: Iterable[int]) -> Iterator[None]:
        """Set the gradients of these parameters to None, inside and afterwards."""
        for index in indices:
            self._trained[index].grad = None
        yield

    def kept_gradient(self) -> Tensor:
        return self.grads.contiguous()

    def zero_grad(self) -> None:
        """Set the gradients of the module to None, and free the copy."""
        for parameter in self._trained:
            parameter.grad = None
        self.grads = self.marked_grads = _zeros(self.params)

    # ---- the module

    def check(self) -> None:
        """Collect values and gradients. Raises `ReplicaError` if parameters or buffers are not those of the start."""
        self._reshard()
        self._check_noted()
        for layer, parameter in zip(self.layers, self._trained, strict=True):
            part = local(parameter)
            if tuple(part.shape) != layer.shape or part.dtype != self.dtype or part.device != self.device:
                raise ReplicaError(
                    f"the part of parameter {layer.name!r} at this rank had shape {layer.shape} and {self.dtype} on "
                    f"{self.device} when it was attached, and has {tuple(part.shape)} and {part.dtype} on "
                    f"{part.device} now. Convert or move the model before fully_shard, and attach afterwards."
                )
        self.collect()
        self._collect_gradients()

    def _collect_gradients(self) -> None:
        self.grads = self.marked_grads = torch.empty_like(self.params)
        for parameter, gradient in self._views(self.grads):
            if parameter.grad is None:
                gradient.zero_()
            else:
                gradient.copy_(local(parameter.grad))

    def release(self) -> None:
        """Set the gradients of the module to None; its parameters have memory of their own."""
        self.zero_grad()

    @property
    def constants(self) -> dict[str, Tensor]:
        return {name: local(tensor) for name, tensor in super().constants.items()}


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, in its memory; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _zeros(like: Tensor) -> Tensor:
    """As many zeros, without their memory."""
    return like.new_zeros(()).expand(like.numel())


def _check_split(kind: str, found: Sequence[tuple[str, nn.Parameter]]) -> None:
    whole = [name for name, parameter in found if not hasattr(parameter, "to_local")]
    if len(whole) == len(found):
        raise UsageError(
            f"across is for a model that fully_shard has split, and no trained parameter of {kind} is split. Leave "
            f"across out, or split the model first. {_INSIDE}"
        )
    if whole:
        raise UsageError(
            f"parameter {whole[0]!r} is trained and not split, so fully_shard would not synchronize it inside a group. "
            'Call fully_shard(model, mesh=mesh["inside"]) for the whole model too, after its blocks, and name no '
            "trained parameter in ignored_params."
        )
