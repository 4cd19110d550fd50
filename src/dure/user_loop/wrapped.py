"""Wrappers that synchronize gradients or parameters themselves, around an attached model or a part of it.

A model that is wrapped is not attached (`check_unwrapped`). The module inside DistributedDataParallel may be attached,
if the loop calls that module. A call of the wrapper would make DDP average the gradients as well (`WrapperGuard`).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import DataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.job.replica import Replica

_FSDP = "torch.distributed.fsdp"


def check_unwrapped(model: nn.Module) -> None:
    """Raises `UsageError` where `model` or a submodule synchronizes itself: DDP, DataParallel, FSDP, fully_shard."""
    for name, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is None:
            continue
        place = "the model" if not name else f"the submodule {name!r}"
        raise UsageError(
            f"{place} is wrapped by {wrapper}, which synchronizes the ranks as well: both would do so. "
            f"{_advice(name, wrapper)}, and train it without {wrapper}."
        )


class WrapperGuard:
    """Refuses calls of a `DistributedDataParallel` that would synchronize parameters of `replica`, until `remove`.

    The wrapper may be made before or after the guard. A call without gradients, or inside `no_sync()`, synchronizes no
    gradient and is let through.
    """

    def __init__(self, replica: Replica) -> None:
        self._trained = {id(parameter) for parameter in replica.parameters}
        self._hooks = [register_module_module_registration_hook(self._registered)]
        for wrapper in _living():
            self._watch(wrapper, wrapper.module)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _registered(self, module: nn.Module, _: str, submodule: Any) -> None:
        """A module has got a submodule, as a wrapper gets the module inside."""
        if isinstance(module, DistributedDataParallel) and isinstance(submodule, nn.Module):
            self._watch(module, submodule)

    def _watch(self, wrapper: DistributedDataParallel, inside: nn.Module) -> None:
        if any(id(parameter) in self._trained for parameter in inside.parameters()):
            self._hooks.append(wrapper.register_forward_pre_hook(self._called))

    def _called(self, wrapper: DistributedDataParallel, _: Any) -> None:
        if not (torch.is_grad_enabled() and wrapper.require_backward_grad_sync):
            return
        for name, parameter in wrapper.module.named_parameters():
            if id(parameter) in self._trained and name not in wrapper.parameters_to_ignore:
                raise UsageError(
                    "DistributedDataParallel was called around an attached model: it would synchronize the gradient of "
                    f"parameter {name!r} as well, and both would change it. Call the module itself in the loop "
                    "(ddp.module in place of ddp), and make no wrapper; or leave dure.attach out and give "
                    'DistributedDataParallel a codec: ddp.register_comm_hook(None, dure.hook("strom:threshold=0.001")).'
                )


def _living() -> Iterator[DistributedDataParallel]:
    """The wrappers that exist now. No table lists them; without process groups none can have been made."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield from (each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel))


def _advice(name: str, wrapper: str) -> str:
    if wrapper == "fully_shard":
        return "Attach the module before it is sharded"
    inside = f"model.{name}.module" if name else "model.module"
    return f"Attach the module inside ({inside})" if not name else f"Put the module inside ({inside}) in its place"


def _wrapper(module: nn.Module) -> str | None:
    """The name of the wrapper that `module` is. FSDP is imported only where the user has done so: it takes long."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return type(module).__name__
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        return "FullyShardedDataParallel"
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "fully_shard"
    return None
