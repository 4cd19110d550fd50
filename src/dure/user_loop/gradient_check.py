"""The check of each gradient of a user's loop for NaN and infinity."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dure.core.finite import all_finite
from dure.errors import Quarantined
from dure.sync.refusals import MOST_REFUSED

if TYPE_CHECKING:
    import torch
    from torch.amp import GradScaler

    from dure.job.replica import Replica
    from dure.runtime.process.node import ProcessNode
    from dure.user_loop.source import LoopSource

log = logging.getLogger("dure")


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
