"""A model of Accelerate that trains by a method of dure: three lines of a script change.

    from dure.integrations.accelerate import attach
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model, replica = attach(accelerator, model, optimizer, sync="averaging:period=8")
    ...
    replica.close()

`prepare` has wrapped the model in DistributedDataParallel. `attach` removes the wrapper and its hooks, and `_Ties`
replaces methods of this accelerator. Once the replica is closed, these methods do what they did before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dure
from dure.core.text import log
from dure.errors import UsageError
from dure.integrations.rank_files import load_rank, save_rank

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.codec.base import Codec
    from dure.sync.base import Sync
    from dure.topology.collective.choice import Collective
    from dure.topology.parameter_server.choice import ParameterServer
    from dure.user_loop.attached import Attached

TESTED = "1.15.0"
"""The version of Accelerate whose methods the tests have seen."""

METHODS = ("no_sync", "get_state_dict", "save_state", "load_state", "register_load_state_pre_hook", "prepare_model")


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sync: Sync | str | None = None,
    topology: Collective | ParameterServer | str | None = None,
    codec: Codec | str | None = None,
    frozen_after: float = 30.0,
    key_file: str | Path | None = None,
) -> tuple[nn.Module, Attached]:
    """Attach what `accelerator.prepare` gave to a method; returns the model to call, and the replica.

    `sync`, `topology`, `codec`, `frozen_after` (seconds) and `key_file` are those of `dure.attach`. Buffers are those
    of rank 0, as under DistributedDataParallel. The loop stays: `accelerator.accumulate`, `backward`,
    `clip_grad_norm_`, `optimizer.step()`, `save_state` and `load_state`. Close the replica after the last step.

    Raises:
        UsageError: the model or the optimizer is not what `accelerator.prepare` gave, Accelerate trains by another way
            than DistributedDataParallel or has a communication hook, or what `dure.attach` raises.
    """
    check_version("accelerate", TESTED, Accelerator, METHODS)
    module = _module_of(accelerator, model, optimizer)
    replica = dure.attach(
        module,
        optimizer,
        sync=sync,
        topology=topology,
        codec=codec,
        frozen_after=frozen_after,
        key_file=key_file,
        buffers="rank0",
    )
    if model is not module:
        cast("Any", model)._remove_autograd_hooks()
    route(optimizer, replica)
    _Ties(accelerator, module, replica)
    return module, replica


def check_version(package: str, tested: str, owner: type, methods: tuple[str, ...]) -> None:
    """Warn of a version of `package` other than `tested`; raises `UsageError` where `owner` lacks one of `methods`."""
    missing = [name for name in methods if not hasattr(owner, name)]
    found = version(package)
    if missing:
        raise UsageError(
            f"dure.integrations.{package} needs {owner.__name__}.{missing[0]}, which {package} {found} does not have. "
            f"Install {package}=={tested}, the version that is tested."
        )
    if found != tested:
        log.warning("dure.integrations.%s is tested with %s %s, and this is %s.", package, package, tested, found)


def route(optimizer: AcceleratedOptimizer, replica: Attached) -> None:
    """Make each step of Accelerate's wrapper a step of the replica, also under its gradient scaler."""
    optimizer.optimizer = routed = replica.routed_optimizer
    scaler = optimizer.scaler
    if scaler is None:
        return

    # A fused optimizer leaves the step out by itself, which Accelerate does not see: its schedulers go on.
    hides = getattr(replica.optimizer, "_step_supports_amp_scaling", False)

    @functools.wraps(routed.step)  # the scaler looks for `grad_scaler` in the signature
    def step(*args: Any, grad_scaler: GradScaler | None = None) -> Any:
        loss = type(routed).step(routed, *args, grad_scaler=grad_scaler)
        overflows = scaler._found_inf_per_device(routed).values()
        optimizer._accelerate_step_called = hides or not any(bool(each) for each in overflows)
        return loss

    optimizer._optimizer_original_step_method = routed.step
    optimizer._optimizer_patched_step_method = step


def hold_back(accelerator: Accelerator, module: nn.Module, replica: Attached) -> None:
    """Let `accelerator.no_sync` and `accumulate` defer the exchange of an attached module, until it is closed."""
    before = accelerator.no_sync

    @contextmanager
    def no_sync(model: nn.Module) -> Iterator[None]:
        mine = accelerator.unwrap_model(model, keep_torch_compile=False) is module and not replica.closed
        with replica.accumulate() if mine else before(model):
            yield

    accelerator.no_sync = no_sync


class _Ties:
    """The methods of an accelerator for an attached model.

    Parameters of an attached model are views of one buffer, which safetensors takes for one shared tensor: states are
    copied. `save_state` writes the model that the method delivers, and the state of each rank.
    """

    def __init__(self, accelerator: Accelerator, module: nn.Module, replica: Attached) -> None:
        self._module = module
        self._replica = replica
        index = next(index for index, each in enumerate(accelerator._models) if each is module)
        self._part = f"model_{index}" if index else ""
        self._get, self._save, self._load = accelerator.get_state_dict, accelerator.save_state, accelerator.load_state
        self._folder = ""
        hold_back(accelerator, module, replica)
        accelerator.get_state_dict = self.get_state_dict
        accelerator.save_state = self.save_state
        accelerator.load_state = self.load_state
        accelerator.register_load_state_pre_hook(self._note)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        found = self._get(model, unwrap)
        return unshared(found) if model is self._module and not self._replica.closed else found

    def save_state(self, *args: Any, **options: Any) -> Any:
        if self._replica.closed:
            return self._save(*args, **options)
        with self._replica.evaluation():
            folder = self._save(*args, **options)
            if self._replica.keeps_state:
                save_rank(folder / self._part, self._replica)
        return folder

    def load_state(self, *args: Any, **options: Any) -> None:
        self._load(*args, **options)
        if not self._replica.closed:
            load_rank_if_any(Path(self._folder, self._part), self._replica)

    def _note(self, models: list[nn.Module], folder: str) -> None:
        """Note the folder that Accelerate has found, and keep safetensors from the views of the attached model."""
        self._folder = folder
        if not self._replica.closed:
            models[:] = [_Unshared(each) if each is self._module else each for each in models]


class _Unshared(nn.Module):
    """Stands for a module whose parameters share memory where a state is loaded."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._inside = (module,)  # a tuple: no submodule

    def state_dict(self, *args: Any, **options: Any) -> Any:
        return unshared(self._inside[0].state_dict(*args, **options))

    def load_state_dict(self, *args: Any, **options: Any) -> Any:
        return self._inside[0].load_state_dict(*args, **options)


def load_rank_if_any(checkpoint: str | Path, replica: Attached) -> None:
    """Restore the state of this rank from `checkpoint`; if that has no states of ranks, log a warning.

    Raises `UsageError` if the states are those of another number of ranks.
    """
    if Path(checkpoint, "dure").exists():
        load_rank(checkpoint, replica)
    else:
        log.warning("%s has no states of ranks: all ranks go on from its one model and optimizer.", checkpoint)


def unshared(state: dict[str, Any]) -> dict[str, Any]:
    """A copy in which each tensor has memory of its own; tied weights stay one tensor."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if not value.numel() or place not in copies:
            copies[place] = value.detach().clone()
        return copies[place]

    return {name: copied(value) for name, value in state.items()}


def _module_of(accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer) -> nn.Module:
    """The module inside the wrapper that `prepare` made. Raises `UsageError` where there is none."""
    check_kind(accelerator)
    if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
        raise UsageError(
            "Accelerate has compiled DistributedDataParallel, which attach replaces. Leave dynamo_backend out, and "
            "write model = torch.compile(model) before accelerator.prepare."
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    if not any(module is each for each in accelerator._models) or not isinstance(optimizer, AcceleratedOptimizer):
        raise UsageError(
            "attach needs the model and the optimizer that accelerator.prepare returned, and got "
            f"{type(model).__name__} and {type(optimizer).__name__}. Write "
            "`model, optimizer = accelerator.prepare(model, optimizer)` first."
        )
    handler = accelerator.ddp_handler
    if handler is not None and handler.comm_hook.value != "no":
        raise UsageError(
            f"the hook {handler.comm_hook.value} of DistributedDataParallelKwargs would not run: attach synchronizes "
            'in place of DistributedDataParallel. Leave it out; attach(..., codec="int8") encodes what is sent.'
        )
    return module


def check_kind(accelerator: Accelerator) -> None:
    """Raises `UsageError` where Accelerate shards the model itself."""
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise UsageError(
            f"attach has the whole model at every rank, and Accelerate trains by {kind}. Choose distributed training "
            "without FSDP, DeepSpeed or Megatron-LM (accelerate config)."
        )
