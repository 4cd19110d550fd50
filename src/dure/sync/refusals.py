"""Refusal of gradients that hold NaN or infinity: their steps are skipped, and too many in a row end the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.finite import all_finite
from dure.core.log import log
from dure.core.node import Ghost
from dure.errors import Quarantined

if TYPE_CHECKING:
    import torch

    from dure.job.gradient import Gradient
    from dure.topology.collective.topology import GroupSession
    from dure.topology.replica import WorkerReplica

MOST_REFUSED = 3
"""Refused gradients in a row after which a worker is quarantined."""


@dataclass(slots=True)
class Refusals:
    """The refused gradients of a worker: their number in `total`, and `in_a_row` since the last finite one."""

    total: int = 0
    in_a_row: int = 0

    def refuse(self, worker: WorkerReplica, gradient: Gradient, *, shared: bool) -> torch.Tensor:
        """Refuse a gradient whose step has been counted; return zeros in its place.

        `shared`: the gradient is the mean of a group. Raises `Quarantined` at the last of `MOST_REFUSED` in a row.
        """
        self.total += 1
        self.in_a_row += 1
        self._report(worker, gradient.faulty if shared else [worker.rank])
        values = gradient.values
        (values.values() if values.is_sparse else values).zero_()
        return values

    def _report(self, worker: WorkerReplica, ranks: Sequence[int]) -> None:
        """Log or raise that the gradients of `ranks` (none: not known which) are not finite."""
        step = worker.clock - 1
        whose = ", ".join(f"worker {rank}" for rank in ranks) or "a worker"
        if self.in_a_row >= MOST_REFUSED:
            raise Quarantined(
                f"the gradients of {whose} hold NaN or infinity in {self.in_a_row} steps in a row, the last of "
                f"them step {step}. Try a learning rate below {worker.optimizer.spec.lr:g}, and look at the "
                "data of these steps."
            )
        if worker.rank in (ranks or [0]):
            log.warning("the gradient of %s in step %d holds NaN or infinity: skipped.", whose, step)


def is_sound(gradient: Gradient) -> bool:
    """Whether all values of a gradient, and of its parts at other ranks, are finite."""
    values = gradient.values
    return not gradient.faulty and (gradient.checked or isinstance(values, Ghost) or all_finite(values))


async def examined_mean(gradient: Gradient, share: float, group: GroupSession) -> Gradient:
    """Return the sum of all members' gradients times their shares, with the ranks whose gradients are not finite.

    It costs one more message than `GroupSession.mean_gradient`, so it is used in the step after a refused gradient.
    """
    gradient = gradient.scaled(share)
    gradient.faulty = await group.ranks_at_fault(isinstance(gradient.values, Ghost) or all_finite(gradient.values))
    return gradient.with_values(await group.members.all_reduce(gradient.values))
