"""The checks of each gradient of a user's loop: for NaN and infinity, and for a gradient that is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dure.core.finite import all_finite
from dure.core.log import log
from dure.errors import Quarantined
from dure.sync.worker_state import MOST_REFUSED

if TYPE_CHECKING:
    from torch.amp import GradScaler

    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode
    from dure.user_loop.source import LoopSource


class GradientCheck:
    """Decides whether a step with the gradients of `replica` must be skipped."""

    def __init__(self, node: ProcessNode, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        self._node = node
        self._replica = replica
        self._optimizer = optimizer
        self._refused = 0

    def overflowed(self, scaler: GradScaler) -> bool:
        """Unscale the gradients, unless the user has done so; returns whether they hold NaN or infinity."""
        try:
            scaler.unscale_(self._optimizer)
        except RuntimeError as error:
            if "already" not in str(error):
                raise
        return not all_finite(self._replica.grads)

    def lower_scale(self, scaler: GradScaler) -> None:
        """Let the next `update` of `scaler` see an overflow, which may be another rank's: scales stay equal."""
        for found in scaler._found_inf_per_device(self._optimizer).values():
            found.fill_(1.0)

    def refuses(self, source: LoopSource, clock: int) -> bool:
        """Whether the gradients of step `clock` hold NaN or infinity.

        Raises `Quarantined` if those of several steps in a row do.
        """
        rank, exchange = self._node.rank, source.exchange if source.wants_mean else None
        refused = not all_finite(self._replica.grads)
        self._refused = self._refused + 1 if refused else 0
        if exchange is not None:
            exchange.examines = refused
        if self._refused >= MOST_REFUSED:
            ranks = [rank]
            if exchange is not None:
                asking = self._node.spawn(exchange.faulty_ranks(), self._node.name)
                ranks = self._node.loop.run_until(asking)
            whose = ", ".join(f"rank {each}" for each in ranks) or "a rank"
            raise Quarantined(
                f"the gradients of {source.name} at {whose} hold NaN or infinity in {self._refused} steps in a row, "
                f"the last of them step {clock}. Try a lower learning rate, and look at the data of these steps."
            )
        if refused:
            log.warning(
                "the gradient of step %d of %s at rank %d holds NaN or infinity: skipped.", clock, source.name, rank
            )
        return refused


class MissingGradient:
    """Logs a warning, once, at a step that no `backward()` came before, or whose gradients `zero_grad()` has removed.

    A backward whose gradients are all zero is in order, and so are gradients that the loop itself has assigned.
    """

    def __init__(self, replica: Replica, optimizer: torch.optim.Optimizer) -> None:
        self._replica = replica
        self._optimizer = optimizer
        self._ran = False
        self._had_values = False
        self._unsure = True  # until a step has had values: then the loop's zero_grad() stands in the right place
        self._warned = False
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]
            for parameter in replica.parameters
        ]

    def look(self, clock: int, *, exchanged: bool) -> None:
        """Look at the gradients before step `clock`; `exchanged`: they are the mean of all ranks already."""
        if self._warned:
            return
        groups = self._optimizer.param_groups
        gradients = [each.grad for group in groups for each in group["params"] if each.requires_grad]
        found = [each for each in gradients if each is not None]
        assigned = any(each._base is not self._replica.grads for each in found)
        if not self._ran and not assigned and not any(map(_has_values, found)):
            self._warn(
                clock,
                "no backward() came before it. Call loss.backward() before replica.step(), or replica.skip() for a "
                "step without a batch",
            )
        elif self._ran and not found:
            self._warn(clock, _REMOVED)
        elif self._unsure:
            self._unsure = not any(map(_has_values, found))
            if self._unsure and self._had_values and not exchanged:  # a mean may be zero where its parts are not
                self._warn(clock, _REMOVED)

    def reset(self) -> None:
        """A step has been taken or skipped."""
        self._ran = self._had_values = False

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for hook in self._hooks:
            hook.remove()

    def _completed(self, parameter: torch.Tensor) -> None:
        self._ran = True
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
    return gradient.layout != torch.strided or bool(gradient.any())
