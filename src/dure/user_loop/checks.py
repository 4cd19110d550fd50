"""Checks of a user's loop: of wrappers around the model, of the gradients of a step, and of changes of the model.

| check             | finds                                                                                  |
|-------------------|----------------------------------------------------------------------------------------|
| `check_unwrapped` | a model that a wrapper synchronizes as well, or a part of it                           |
| `WrapperGuard`    | a call of DistributedDataParallel around an attached model                             |
| `GradientCheck`   | gradients with NaN or infinity: the step is skipped                                    |
| `MissingGradient` | a step without a `backward()`, or behind a `zero_grad()`                               |
| `ModelCheck`      | a model that the loop has changed in place, where the method would undo that           |
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.nn import DataParallel
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from dure.core.text import log
from dure.core.vectors import all_finite
from dure.errors import Quarantined, UsageError
from dure.job.replica import as_bytes
from dure.sync.worker_state import MOST_REFUSED
from dure.user_loop.groups import local

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode
    from dure.user_loop.source import LoopSource


# ---- wrappers

_FSDP = "torch.distributed.fsdp"


def check_unwrapped(model: nn.Module, allowed: str = "") -> None:
    """Raises `UsageError` where `model` or a submodule synchronizes itself: DDP, DataParallel, FSDP, fully_shard.

    The wrapper that is `allowed` is not refused.
    """
    for name, module in model.named_modules():
        wrapper = _wrapper(module)
        if wrapper is None or wrapper == allowed:
            continue
        place = "the model" if not name else f"the submodule {name!r}"
        raise UsageError(
            f"{place} is wrapped by {wrapper}, which synchronizes the ranks as well: both would do so. "
            f"{_advice(name, wrapper)}, and train it without {wrapper}."
        )


class WrapperGuard:
    """Refuses calls of a `DistributedDataParallel` that would synchronize parameters of `replica`, until `remove`.

    The wrapper may be made before or after the guard. The module inside may be attached, if the loop calls that module.
    A call without gradients, or inside `no_sync()`, synchronizes no gradient and is permitted.
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
        """Watch a wrapper that gets the module inside as a submodule."""
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
        return (
            "If it is split inside groups of ranks, and a method is to synchronize the groups, give the dimension of "
            'the groups: dure.attach(..., across=mesh["groups"]). Or attach the module before it is sharded, where '
            'shard="zero:stage=2" of dure.attach shards it'
        )
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


# ---- gradients


class GradientCheck:
    """Decides whether a step with the gradients of `replica` must be skipped.

    A gradient scaler knows them by one of `optimizers`: the user's, and the routed one that has its parameters.
    """

    def __init__(self, node: ProcessNode, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._scaled = optimizers[0]
        self._optimizers = optimizers
        self._node = node
        self._replica = replica
        self._refused = 0

    def begin(self, scaler: GradScaler, stepped: torch.optim.Optimizer) -> None:
        """A step of `stepped` begins, whose gradients the loop may have unscaled by the other optimizer.

        Raises `UsageError` if they were unscaled by both: they are too small then.
        """
        states = scaler._per_optimizer_states
        done = [each for each in self._optimizers if states.get(id(each), {}).get("stage") is OptState.UNSCALED]
        if len(done) > 1:
            raise UsageError(
                "the gradients were unscaled twice, for the optimizer and for replica.routed_optimizer, which have the "
                "same parameters. Call scaler.unscale_ for one of them."
            )
        self._scaled = done[0] if done else stepped

    def overflowed(self, scaler: GradScaler) -> bool:
        """Unscale the gradients, unless the user has done so; returns whether they hold NaN or infinity."""
        try:
            scaler.unscale_(self._scaled)
        except RuntimeError as error:
            if "already" not in str(error):
                raise
        self._replica.check()  # where `grads` is a copy, it is still that of the scaled gradients
        return not all_finite(self._replica.grads)

    def skips(self, scaler: GradScaler, known: bool | None) -> bool:
        """Whether the step is skipped because scaled gradients overflowed; these tell that where it is not `known`.

        The next `update` of `scaler` then sees an overflow, which may be another rank's: scales stay equal.
        """
        skipping = self.overflowed(scaler) if known is None else known
        if skipping:
            for found in scaler._found_inf_per_device(self._scaled).values():
                found.fill_(1.0)
        return skipping

    def refuses(self, source: LoopSource, clock: int, *, elsewhere: bool) -> bool:
        """Whether the gradients of step `clock` hold NaN or infinity, at this rank or `elsewhere` in the model.

        Raises `Quarantined` if those of several steps in a row do.
        """
        rank, exchange = self._node.rank, source.exchange if source.wants_mean else None
        mine = not (all_finite(self._replica.grads) if exchange is None else exchange.is_finite)
        refused = mine or elsewhere
        self._refused = self._refused + 1 if refused else 0
        if exchange is not None:
            exchange.examines = refused
        if self._refused >= MOST_REFUSED:
            ranks = [rank] if mine else []
            if exchange is not None:
                asking = self._node.spawn(exchange.faulty_ranks(), self._node.name)
                ranks = self._node.loop.run_until(asking)
            whose = ", ".join(f"rank {each}" for each in ranks) or "another rank"
            raise Quarantined(
                f"the gradients of {source.name} at {whose} hold NaN or infinity in {self._refused} steps in a row, "
                f"the last of them step {clock}. Try a lower learning rate, and look at the data of these steps."
            )
        if mine:
            log.warning(
                "the gradient of step %d of %s at rank %d holds NaN or infinity: skipped.", clock, source.name, rank
            )
        return refused


class MissingGradient:
    """Logs a warning, once, at a step that no `backward()` came before, or whose gradients `zero_grad()` has removed.

    A backward whose gradients are all zero is in order, and so are gradients that the loop itself has assigned. It
    knows the parameters that no backward has reached, too (`unused`).
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        self._replica = replica
        self._optimizer = optimizer
        self._reached: set[int] = set()
        self._had_values = False
        self._unsure = True  # until a step has had values: then the loop's zero_grad() stands in the right place
        self._warned = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._completed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(replica.parameters)
        ]

    def unused(self) -> list[int]:
        """The numbers of the parameters that no backward has reached since the last step, and that have no gradient."""
        parameters = enumerate(self._replica.parameters)
        rest = [index for index, each in parameters if index not in self._reached or each.grad is None]
        return [index for index in rest if self._replica.is_unused(index)]

    def look(self, clock: int, *, exchanged: bool) -> None:
        """Look at the gradients before step `clock`; `exchanged`: they are the mean of all ranks already."""
        if self._warned or self._replica.hides_gradients:
            return
        groups = self._optimizer.param_groups
        gradients = [each.grad for group in groups for each in group["params"] if each.requires_grad]
        found = [each for each in gradients if each is not None]
        assigned = any(each._base is not self._replica.marked_grads for each in found)
        ran = bool(self._reached)
        if not ran and not assigned and not any(map(_has_values, found)):
            self._warn(
                clock,
                "no backward() came before it. Call loss.backward() before replica.step(), or replica.skip() for a "
                "step without a batch",
            )
        elif ran and not found:
            self._warn(clock, _REMOVED)
        elif self._unsure:
            self._unsure = not any(map(_has_values, found))
            if self._unsure and self._had_values and not exchanged:  # a mean may be zero where its parts are not
                self._warn(clock, _REMOVED)

    def reset(self) -> None:
        """A step has been taken or skipped."""
        self._reached.clear()
        self._had_values = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _completed(self, index: int, parameter: torch.Tensor) -> None:
        self._reached.add(index)
        if self._unsure and not self._had_values and parameter.grad is not None:
            self._had_values = _has_values(parameter.grad)

    def _warn(self, clock: int, reason: str) -> None:
        self._warned = True
        log.warning("step %d has no gradient and counts as one whose gradient is zero: %s.", clock, reason)


_REMOVED = (
    "zero_grad() came between backward() and replica.step(). Leave zero_grad() out, since replica.step() zeroes the "
    "gradients, or call it before backward()"
)


def _has_values(gradient: torch.Tensor) -> bool:
    """Whether a gradient, or its part at this rank, is not zero; a sparse one counts as such."""
    return gradient.layout != torch.strided or bool(local(gradient).any())


# ---- changes in place

RUN_NBYTES = 512
"""Bytes of a run: 64 whole numbers, enough for PyTorch to add them at the speed of the memory."""

MOST_NAMES = 3
"""Parameters that an error names."""


class ModelCheck:
    """Raises `UsageError` in the calls named `undone_at` if the parameters of `replica` have changed since `note`.

        step()   the method pulls or averages ... the model is loaded        note
        user's code: forward, backward, and perhaps p.data.clamp_(...)
        step()   is the model as it was loaded?                              check

    Servers hold the model of most methods, and a pull replaces that of each rank. The version counter of a parameter
    does not tell: a write to `parameter.data` does not advance it. So the values themselves are compared, by the sums
    of their bits over short runs. That is two passes over the model in each step: 22 ms of one core for 25 million
    parameters, where a rank's own part of a step over servers takes 650 ms.
    """

    def __init__(self, replica: Replica, undone_at: Collection[str]) -> None:
        self._replica = replica
        self._undone_at = undone_at
        self._noted: torch.Tensor | None = None

    def note(self) -> None:
        """Note the parameters as the method has left them."""
        if self._undone_at:
            self._noted = sums_of_runs(self._replica.params)

    def check(self, call: str) -> None:
        if call not in self._undone_at or self._noted is None:
            return
        now = sums_of_runs(self._replica.params)
        if torch.equal(now, self._noted):
            return
        where = self._where(now != self._noted)
        if call == "close":
            raise UsageError(
                f"{where} changed in place after the last step, and close() loads what the method delivers in its "
                "place. Make this change after the block: after replica.close()."
            )
        raise UsageError(
            f"{where} changed in place after the last step. The next values of the servers, or of the neighbors in "
            "gossip, would undo that. A loop that clips weights, projects them or loads others while it trains needs a "
            'method whose steps are local: sync="bsp" or "averaging" with topology="collective". To go on from loaded '
            "weights there, close the block, load them, make a new optimizer and attach again."
        )

    def _where(self, changed: torch.Tensor) -> str:
        """Text that names the parameters in the runs that changed. A run may hold parts of several parameters."""
        size, layers = self._replica.params.element_size(), self._replica.layers
        runs = [(layer.start * size // RUN_NBYTES, -(-layer.stop * size // RUN_NBYTES)) for layer in layers]
        changes = [bool(changed[start:stop].any()) for start, stop in runs]
        names = [repr(layer.name) for layer in compress(layers, changes)]
        if len(names) == len(layers):
            return "the model's parameters were"
        rest = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        return f"values among the parameters {', '.join(names[:MOST_NAMES])}{rest} were"


def sums_of_runs(values: torch.Tensor) -> torch.Tensor:
    """The sum of the bits of each run of `RUN_NBYTES` of flat values, as 64-bit integers. The last run may be shorter.

    A changed element changes the sum of its run; only changes that cancel within a run, such as two elements of it that
    change places, are not seen.
    """
    flat = as_bytes(values.detach())
    whole = flat.numel() // RUN_NBYTES * RUN_NBYTES
    rest = flat.new_zeros(RUN_NBYTES)
    rest[: flat.numel() - whole] = flat[whole:]
    runs = flat[:whole].view(torch.int64).view(-1, RUN_NBYTES // 8)
    return torch.cat([runs.sum(1), rest.view(torch.int64).sum().view(1)])


# ---- the end of the process


def raised() -> bool:
    """Whether an uncaught exception ends the interpreter: its traceback says enough, and no warning is needed."""
    return getattr(sys, "last_value", None) is not None
