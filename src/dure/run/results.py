"""The result of a run, from the reports of its workers and servers.

| topology                     | the model                   | updates in it               | updates applied           |
|------------------------------|-----------------------------|-----------------------------|---------------------------|
| servers with a clock         | the servers', pulled        | the servers' version        | counted by the servers    |
| operations need every worker | that of the first worker    | the sum of workers' reports | steps made, less refusals |
| any other                    | the mean of workers' models | the sum of workers' reports | steps made, less refusals |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.deployment import by_rank
from dure.core.node import Address
from dure.report.metrics import VersionCounts

if TYPE_CHECKING:
    from dure.core.node import Node
    from dure.run.commands import Commands
    from dure.run.outcome import Totals
    from dure.run.roster import ProcessRoster
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessNode

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


def count_steps(totals: Totals, finished: Reports, parts: int = 1) -> int:
    """Count the updates of a run without a clock: every step is one, of a model that `parts` workers hold together.

    Returns how many are in the model.
    """
    done = sum(int(report["done"]) - int(report.get("refused", 0)) for report in finished.values()) // parts
    totals.counts["updates_applied"] = done
    totals.staleness.histogram[0] = done
    return sum(int(report["updates"]) for report in finished.values()) // parts


def model_of_workers(setup: Setup, delivered: Mapping[str, Delivered]) -> torch.Tensor:
    """The parameters that the workers of a run without a clock deliver together."""
    models = [delivered[name].values for name in by_rank(delivered)]
    if setup.stages is not None:
        return setup.stages.delivered(models)
    return models[0] if setup.topology.needs_everybody else torch.stack(models).mean(dim=0)


async def model_at_servers(setup: Setup, node: Node) -> tuple[torch.Tensor, int]:
    """The newest parameters of all servers, received on `node`, and the number of gradients that each of them holds."""
    if setup.stages is None:
        return await setup.client(node, -1).look(setup.replica.params.clone())
    each = []
    for rank in range(setup.parts):
        own = setup.of_worker(rank)
        each.append(await own.client(setup.stages.view(node, rank), -1).look(own.replica.params.clone()))
    return setup.stages.joined([values for values, _ in each]), min(gradients for _, gradients in each)


def merged_buffers(setup: Setup, delivered: Mapping[str, Delivered]) -> torch.Tensor | None:
    """The buffers of all workers as one; None where training changes none."""
    found = [delivered[name].buffers for name in by_rank(delivered)]
    if setup.stages is not None:
        return setup.stages.buffers({number: each for number, each in enumerate(found) if each is not None})
    given = [buffers for buffers in found if buffers is not None]
    return setup.delivery.merge_buffers(given) if given else None


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

    async def collect(self, totals: Totals) -> tuple[torch.Tensor, int]:
        """The final parameters, and how many updates are in them; adds to `totals` what the servers have counted."""
        setup = self._setup
        if setup.topology.clocked:
            await self._commands.settle()
        for name in self._roster.servers:
            self.statuses[name] = (await self._node.call(Address(name, "shard"), "status")).fields
        count_servers(totals, self.statuses)
        if not setup.topology.clocked:
            return model_of_workers(setup, self.delivered), count_steps(totals, self._roster.finished, setup.parts)
        count_updates(totals, self.statuses)
        for name in self._commands.clocks:
            self.clock = (await self._node.call(Address(name, "clock"), "status")).fields
            totals.counts["updates_refused"] += self.clock["refused"]
        return await model_at_servers(setup, self._node)
