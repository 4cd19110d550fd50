"""A worker's calls to its coordinator: it asks for portions, fetches the point to evaluate, and stages the sum."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dure.core.node import EndOfWork, Reply, Suspend
from dure.errors import CallTimeout, DivergedError, Evicted, Refused
from dure.topology.parameter_server.coordinator import COORDINATOR

if TYPE_CHECKING:
    import torch

    from dure.core.meter import Meter
    from dure.core.node import Node
    from dure.job.data.split import Batches
    from dure.topology.parameter_server.client import ServerClient
    from dure.topology.parameter_server.coordinator import Run


class EvaluatingWorker(Protocol):
    """The attributes of a worker that a `PortionClient` uses."""

    number: int
    node: Node
    meter: Meter
    params: torch.Tensor

    def suspends(self) -> bool:
        """Whether the worker is to stop here for a checkpoint."""
        ...


class Portion(NamedTuple):
    """The samples of a portion, and the seed of its random layers: the same at every worker."""

    indices: torch.Tensor
    draw: int


class Assignment(NamedTuple):
    """Portions of one batch, to be evaluated at one point."""

    evaluation: int
    batch: int
    point: str
    run: Run

    def portions(self, batches: Batches) -> Iterator[Portion]:
        for number in range(*self.run):
            yield Portion(batches.indices(self.batch, number), self.batch * batches.count + number)


class Sums:
    """Gradients and losses of an assignment's portions, each times its number of samples."""

    def __init__(self, like: torch.Tensor) -> None:
        self.vector = like.clone().zero_()
        self.losses: list[float] = []

    def add(self, gradient: torch.Tensor, loss: float, samples: int) -> None:
        """One portion's means over its `samples`."""
        self.vector.add_(gradient, alpha=samples)
        self.losses.append(loss * samples)

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


class PortionClient:
    """A worker's calls to the coordinator. If the worker fails, other workers repeat the portions not yet reported.

    `joint`: several workers compute the gradient of a portion together. `node` is the worker's under its name in the
    run, by which the coordinator knows it.
    """

    def __init__(self, server: ServerClient, batches: Batches, node: Node, *, joint: bool = False) -> None:
        self.batches = batches
        self.joint = joint
        self._node = node
        self._server = server
        self._report: dict[str, Any] | None = None
        self._at = 0

    async def ask(self, worker: EvaluatingWorker) -> Assignment:
        """The next portions. `worker.params` then holds the point to evaluate them at, fetched once per evaluation.

        Raises `EndOfWork`, and `Suspend` for a checkpoint.
        """
        node = worker.node
        while True:
            started = node.now()
            fields = (await self._ask(worker)).fields
            worker.meter.add("wait", started, node.now())
            if "end" in fields:
                raise EndOfWork
            if "suspend" in fields:
                raise Suspend
            if "failed" in fields:
                raise DivergedError(fields["failed"])
            assignment = Assignment(**fields)
            if assignment.evaluation == self._at or await self._fetch(worker, assignment):
                return assignment

    async def _ask(self, worker: EvaluatingWorker) -> Reply:
        report, self._report = self._report, None
        incarnation = self._server.sender.incarnation
        fields: dict[str, Any] = {"worker": worker.number, "incarnation": incarnation, "report": report}
        due = worker.suspends()
        while True:
            with suppress(CallTimeout):
                return await self._node.call(COORDINATOR, "ask", due=due, **fields)

    async def _fetch(self, worker: EvaluatingWorker, assignment: Assignment) -> bool:
        """Fetch the point. False if the shards have freed it, because other workers have finished the evaluation.

        Those that compute `joint` gradients do so anyway: others of them may have fetched their parts before. The
        coordinator drops the sum.
        """
        started = worker.node.now()
        try:
            await self._server.fetch(worker.params, assignment.point)
        except Refused:
            return self.joint
        worker.meter.add("communicate", started, worker.node.now(), "fetch")
        self._at = assignment.evaluation
        return True

    async def push(self, worker: EvaluatingWorker, assignment: Assignment, sums: Sums) -> None:
        """Stage the sums of an assignment at the shards. The next `ask` reports them."""
        started = worker.node.now()
        losses, seq = sums.losses, None
        if not sums.finite:
            losses = []
        else:
            try:
                seq = await self._server.stage(sums.vector)
            except Evicted:
                raise
            except Refused:  # a shard's part holds NaN though the loss is finite; other shards have staged theirs
                losses, seq = [], self._server.sender.seq
        worker.meter.add("communicate", started, worker.node.now(), "push")
        self._report = {"evaluation": assignment.evaluation, "run": assignment.run, "seq": seq, "losses": losses}
