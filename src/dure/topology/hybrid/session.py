"""A worker's use of servers that hold rows, beside the group of all workers: `worker.rows`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.core.finite import all_finite
from dure.errors import Quarantined

if TYPE_CHECKING:
    from dure.core.node import Group
    from dure.job.gradient import Gradient, GradientWork
    from dure.topology.hybrid.rows import RowClient
    from dure.topology.replica import WorkerReplica


class RowSession:
    """Mean gradients of which servers get their part. `client` makes the calls to servers, `group` the collectives."""

    def __init__(self, worker: WorkerReplica, client: RowClient, group: Group) -> None:
        self.client = client
        self._worker = worker
        self._group = group

    async def mean_gradient(self, work: GradientWork) -> Gradient:
        """The mean gradient of what servers do not hold; they get their part, and make their step by it."""
        worker, client = self._worker, self.client
        node, version, started = worker.node, worker.clock, worker.node.now()
        assert work.inputs is not None
        await client.read(work.inputs, worker.params, version)
        read = node.now()
        worker.meter.add("communicate", started, read, "read")
        gradient: Gradient
        if client.plan.ring:
            gradient = await self._group.mean_gradient(work, worker.share)
        else:
            gradient = (await node.compute(work)).scaled(worker.share)
            worker.meter.add("compute", read, node.now())
        worker.check_loss(gradient)
        self._check_parts(gradient)
        started = node.now()
        assert gradient.for_servers is not None
        await client.push(gradient.for_servers, version, worker.lr)
        worker.meter.add("communicate", started, node.now(), "push")
        gradient.checked = True
        return gradient

    def _check_parts(self, gradient: Gradient) -> None:
        """Refuse a gradient that is not finite: a sum over all ranks cannot be skipped by one of them."""
        held = gradient.for_servers
        parts = () if held is None else (held.whole, *(rows for _, rows in held.rows))
        if not all(all_finite(part.reshape(-1)) for part in (gradient.values, *parts)):
            worker = self._worker
            raise Quarantined(
                f"the gradient of worker {worker.rank} in step {worker.clock} holds NaN or infinity, and hybrid skips "
                f"no step. Try a learning rate below {worker.optimizer.spec.lr:g}, and look at the data of this step."
            )
