"""Models that a user's loop must not attach: wrappers that synchronize gradients or parameters themselves."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel

from dure.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

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
