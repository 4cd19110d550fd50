"""The models of a real run: snapshots that its workers send for evaluation, and the result from the last reports.

| topology                     | the model                   | updates in it               | updates applied           |
|------------------------------|-----------------------------|-----------------------------|---------------------------|
| servers with a clock         | the servers', pulled        | the servers' version        | counted by the servers    |
| workers average in a group   | that of the first worker    | the sum of workers' reports | steps made, less refusals |
| any other                    | the mean of workers' models | the sum of workers' reports | steps made, less refusals |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.deployment import NodeId, by_rank
from dure.core.node import Address
from dure.errors import RemoteError
from dure.report.metrics import VersionCounts
from dure.run.gathering import merged_buffers
from dure.topology.offers import offers_of

if TYPE_CHECKING:
    from dure.core.node import Node, Operation, Reply, Task
    from dure.run.outcome import Totals
    from dure.run.roster import Commands, ProcessRoster
    from dure.run.setup import Setup
    from dure.run.stages import Stages
    from dure.runtime.process.node import ProcessNode
    from dure.sync.worker_state import WorkerState


Reports = Mapping[str, Mapping[str, Any]]
"""Fields by the name of the node that reported them."""

COUNTED = ("applied", "refused", "written")
"""Fields of a server's status that the summary has for each server."""


class Delivered(NamedTuple):
    """The model of a worker that has finished: its parameters, and its buffers if any."""

    values: torch.Tensor
    buffers: torch.Tensor | None


def count_servers(totals: Totals, statuses: Reports) -> None:
    """Add the updates that each server has counted."""
    for name, status in statuses.items():
        totals.count("per_shard", name, **{key: status[key] for key in COUNTED if key in status})


def count_updates(totals: Totals, statuses: Reports) -> None:
    """Count the updates of a run over servers with a clock."""
    totals.count_updates(
        [
            (
                VersionCounts.of(status["staleness"]).histogram,
                status["applied"],
                status["refused"],
            )
            for status in statuses.values()
        ]
    )


def count_steps(totals: Totals, finished: Reports, parts: int = 1, of_failed: int = 0) -> int:
    """Count the updates of a run without a clock: every step is one, of a model that `parts` workers hold together.

    `of_failed` are those in the model of workers that have failed. Returns how many are in the model.
    """
    done = sum(int(report["done"]) - int(report.get("refused", 0)) for report in finished.values()) // parts + of_failed
    totals.counts["updates_applied"] = done
    totals.staleness.histogram[0] = done
    return sum(int(report["updates"]) for report in finished.values()) // parts + of_failed


def model_of_workers(setup: Setup, delivered: Mapping[str, Delivered]) -> torch.Tensor:
    """The parameters that the workers of a run without a clock deliver together."""
    models = [delivered[name].values for name in by_rank(delivered)]
    if setup.stages is not None:
        return setup.stages.delivered(models)
    alike = setup.traits.delivers != "mean" or "mean gradient" in offers_of(setup.strategy.topology)
    return models[0] if alike else torch.stack(models).mean(dim=0)


async def model_at_servers(setup: Setup, node: Node) -> tuple[torch.Tensor, int]:
    """The newest parameters of all servers, received on `node`, and the number of gradients that each of them holds."""
    if setup.stages is None:
        return await setup.client(node, -1).look(setup.replica.params.clone())
    each = []
    for rank in range(setup.parts):
        own = setup.of_worker(rank)
        each.append(await own.client(setup.stages.view(node, rank), -1).look(own.replica.params.clone()))
    return setup.stages.joined([values for values, _ in each]), min(gradients for _, gradients in each)


class Results:
    """Collects the result of a real run when all workers have finished.

    `delivered` are the models of workers that have finished, `statuses` and `clock` the last reports of the servers.
    """

    def __init__(self, setup: Setup, node: ProcessNode, roster: ProcessRoster, commands: Commands) -> None:
        self.delivered: dict[str, Delivered] = {}
        self.statuses: dict[str, Mapping[str, Any]] = {}
        self.clock: Mapping[str, Any] = {}
        self._setup = setup
        self._node = node
        self._roster = roster
        self._commands = commands

    @property
    def buffers(self) -> torch.Tensor | None:
        """The buffers of all workers as one; None where training changes none."""
        own = {NodeId.of(name).rank: each.buffers for name, each in self.delivered.items()}
        return merged_buffers(self._setup, {rank: each for rank, each in own.items() if each is not None})

    async def collect(self, totals: Totals, of_failed: int = 0) -> tuple[torch.Tensor, int]:
        """The final parameters, and how many updates are in them; adds to `totals` what the servers have counted.

        `of_failed` are updates of failed workers in a model that no server has.
        """
        setup, finished = self._setup, self._roster.finished
        if setup.topology.clocked:
            await self._commands.settle()
        for name in self._roster.servers:
            self.statuses[name] = (await self._node.call(Address(name, "shard"), "status")).fields
        count_servers(totals, self.statuses)
        if not setup.topology.clocked:
            updates = count_steps(totals, finished, setup.parts, of_failed)
            return model_of_workers(setup, self.delivered), updates
        count_updates(totals, self.statuses)
        for name in self._commands.clocks:
            self.clock = (await self._node.call(Address(name, "clock"), "status")).fields
            totals.counts["updates_refused"] += self.clock["refused"]
        return await model_at_servers(setup, self._node)


DRIVER_ADDRESS = Address("driver", "driver")


class Snapshots:
    """Takes the snapshots of one worker, at its step boundaries: those of the table in `history.History`.

    `bytes_sent` gives the bytes that this worker has sent so far.
    """

    def __init__(self, setup: Setup, node: ProcessNode, bytes_sent: Callable[[], int]) -> None:
        self.setup = setup
        self.node = node
        self.evaluates = False
        self.due = setup.eval_every
        self._bytes_sent = bytes_sent
        self._clock = 0
        self._buffers: list[torch.Tensor] = []
        self._parts: dict[int, Task[None]] = {}

    @property
    def at(self) -> int:
        """The last step that this worker has made, and up to which all its parts of means have been sent."""
        return min(self._parts) - 1 if self._parts else self._clock

    def resume(self, clock: int) -> None:
        """Go on from `clock`; a snapshot that is due there has not been taken."""
        self.due = (max(clock - 1, 0) // self.setup.eval_every + 1) * self.setup.eval_every

    def is_due(self, done: int) -> bool:
        """Whether the model after `done` steps is to be graded, and this worker sends it."""
        return self.evaluates and done >= self.due

    async def settled(self) -> None:
        """Wait until all parts of means have been sent."""
        for task in list(self._parts.values()):
            await task

    def at_boundary(self, worker: WorkerState) -> None:
        """Take a snapshot that is due at a step boundary, where the model holds all gradients up to the clock."""
        setup, self._clock = self.setup, worker.clock
        if worker.sessions.rows is not None:
            self._buffers = _copied(worker.buffers)
        elif not setup.synchronous and not worker.sessions.own:
            self._take_of_others(worker)
        elif setup.has_common_model(worker):
            self._take(worker)
        elif worker.clock and worker.clock % setup.eval_every == 0:
            self._send_part(worker)

    def at_step(self, worker: WorkerState) -> None:
        """Take a snapshot that is due when a gradient has been computed and not yet been used."""
        done = worker.clock - 1
        if self.setup.coordinated:
            self._clock = worker.clock  # the coordinator hands out the work: there are no step boundaries
            self._take_of_others(worker)
        elif worker.sessions.rows is not None and self.is_due(done):  # then all rows have been read for this step
            self._send(worker.params, self._buffers, done, worker.world_size * done)

    def _take(self, worker: WorkerState) -> None:
        if self.is_due(worker.clock):
            common = not worker.over_servers
            updates = self.setup.delivery.gradients_in_common(worker) if common else worker.server.gradients_held()
            self._send(self.setup.delivery.shown(worker), [], worker.clock, updates)

    def _send(
        self, values: torch.Tensor, buffers: list[torch.Tensor], done: int, updates: int | Sequence[Operation[Reply]]
    ) -> None:
        self._next_after(done)
        said = {"seconds": self.node.now(), "steps": done, "bytes": self._bytes_sent()}
        work = self._sending(values.clone(), buffers, updates, said)
        self.node.spawn(work, f"a snapshot of {self.node.name}")

    def _next_after(self, done: int) -> None:
        self.due = (done // self.setup.eval_every + 1) * self.setup.eval_every

    async def _sending(
        self,
        values: torch.Tensor,
        buffers: list[torch.Tensor],
        updates: int | Sequence[Operation[Reply]],
        said: dict[str, Any],
    ) -> None:
        with suppress(RemoteError):  # a failed server or driver is reported elsewhere
            await self.node.call(DRIVER_ADDRESS, "snapshot", values, *buffers, updates=await _counted(updates), **said)

    def _send_part(self, worker: WorkerState) -> None:
        own = self.setup.delivery.gradients_of_part(worker)
        at_servers = worker.server.gradients_held() if worker.over_servers else 0
        values, buffers, step = self.setup.delivery.shown(worker).clone(), _copied(worker.buffers), worker.clock
        counts = {"steps": step, "updates": own, "refused": worker.refusals.total}
        work = self._sending_part(values, buffers, counts, at_servers)
        self._parts[step] = self.node.spawn(work, f"a part of step {step} of {self.node.name}")

    async def _sending_part(
        self,
        values: torch.Tensor,
        buffers: list[torch.Tensor],
        counts: dict[str, int],
        at_servers: int | Sequence[Operation[Reply]],
    ) -> None:
        step = counts["steps"]
        with suppress(RemoteError):
            held = await _counted(at_servers)
            del self._parts[step]  # `at` now counts this step: the part is sent before any later report of `at`
            said: dict[str, Any] = counts | {"at_servers": held, "at": self.at}
            await self.node.call(DRIVER_ADDRESS, "part", values, *buffers, **said)
        self._parts.pop(step, None)

    def _take_of_others(self, worker: WorkerState) -> None:
        if self.setup.stages is not None and worker.buffers is not None:
            return  # no worker has the buffers of all stages
        if self.is_due(worker.clock):
            self._next_after(worker.clock)
            self.node.spawn(self._asking_others(worker), f"a snapshot of {self.node.name}")

    async def _asking_others(self, worker: WorkerState) -> None:
        """Send the servers' or the peers' newest model. It holds at least the steps that the driver knew of before."""
        buffers = _copied(worker.buffers)
        with suppress(RemoteError):
            slowest = (await self.node.call(DRIVER_ADDRESS, "slowest")).fields["steps"]
            values, updates = await self._others(worker)
            said = {"seconds": self.node.now(), "steps": slowest, "bytes": self._bytes_sent(), "updates": updates}
            await self.node.call(DRIVER_ADDRESS, "snapshot", values, *buffers, **said)

    async def _others(self, worker: WorkerState) -> tuple[torch.Tensor, int]:
        """The servers' or the peers' newest model, and the number of gradients in it."""
        stages = self.setup.stages
        if stages is not None:
            if worker.sessions.peer is not None:
                return await _model_of_peers(stages, worker, self.node)
            return await model_at_servers(self.setup, self.node)
        if worker.sessions.peer is not None:
            return await worker.peer.look()
        return await worker.server.client.look(worker.params.clone())


async def _model_of_peers(stages: Stages, worker: WorkerState, node: Node) -> tuple[torch.Tensor, int]:
    """The mean of the models of all pipelines in gossip, asked for on `node`, and the number of gradients in them."""
    models, gradients = [], 0
    for rank in stages.layout.parts:
        total, found = torch.zeros_like(stages.of(rank).model.params), []
        for name in stages.workers_of(rank):
            into, held = worker.params, worker.clock - worker.joined_at
            if name != node.name:
                into = torch.empty_like(total)
                held = (await node.call(Address(name, "peer"), "look", into=(into,))).fields["gradients"]
            total += into
            found.append(held)
        models.append(total / len(found))
        gradients = sum(found)
    return stages.joined(models), gradients


def _copied(buffers: torch.Tensor | None) -> list[torch.Tensor]:
    """A model's buffers, if it has any, as they are now."""
    return [] if buffers is None else [buffers.clone()]


async def _counted(gradients: int | Sequence[Operation[Reply]]) -> int:
    """A number of gradients: as given, or the least that a shard holds, as servers answer; 0 if none was asked."""
    if isinstance(gradients, int):
        return gradients
    return min([(await each).fields["gradients"] for each in gradients], default=0)
