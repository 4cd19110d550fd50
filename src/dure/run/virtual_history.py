"""The history of one segment of a virtual run: the model that it delivers at any moment, and the rows that it adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from dure.core.state import State
from dure.job.metrics import check_row
from dure.run.gathering import Gathering, merged_buffers

if TYPE_CHECKING:
    from dure.job.companions import Grader
    from dure.run.callbacks import Callbacks, Row
    from dure.run.checkpoint import Parts
    from dure.run.outcome import Totals
    from dure.run.servers import HostedServer
    from dure.run.setup import Setup
    from dure.run.virtual_membership import Attendance
    from dure.sync.worker_state import WorkerState


class VirtualModel:
    """Reads the model from `servers`, or from `workers` and from the saved models of workers that have finished."""

    def __init__(
        self,
        setup: Setup,
        servers: Sequence[HostedServer],
        workers: Mapping[int, WorkerState],
        attendance: Attendance,
        parts: Parts | None,
    ) -> None:
        self._setup = setup
        self._servers = servers
        self._workers = workers
        self._attendance = attendance
        plain = parts["run"].plain if parts is not None else {}
        self._retired = {} if parts is None else {rank: parts[f"retired-{rank}"] for rank in plain["retired"]}
        self._retired_updates: dict[int, int] = dict(plain.get("retired_updates", ()))

    @property
    def shards(self) -> list[Any]:
        """The shard of each server."""
        return [server.shard for server in self._servers]

    @property
    def at_servers(self) -> bool:
        """Whether servers hold the whole model."""
        return self._setup.topology.clocked

    def delivered(self) -> torch.Tensor:
        """The parameters that the method delivers."""
        models = [] if self.at_servers else [model["params"] for model in self._models().values()]
        return self._setup.topology.result(self.shards, models)

    def buffers(self) -> torch.Tensor | None:
        """The merged buffers of the workers; None where training changes none."""
        found = {number: model["buffers"] for number, model in self._models().items() if "buffers" in model}
        return merged_buffers(self._setup, found)

    def updates(self) -> int:
        """The number of gradients in `delivered`."""
        if self.at_servers:
            return self.updates_at_servers()
        living = (worker for rank, worker in self._workers.items() if rank not in self._attendance.crashed)
        gradients = sum(map(self._setup.delivery.gradients_in, living)) + sum(self._retired_updates.values())
        return gradients // self._setup.parts

    def updates_at_servers(self) -> int:
        """The number of gradients that every shard of the model has applied; 0 where servers do not hold it."""
        return min(shard.gradients for shard in self.shards) if self.at_servers else 0

    def consensus(self) -> dict[str, float]:
        """Of gossip: the distance of the workers' models from their mean, as the root of the mean of squares."""
        if self._setup.topology.graph is None:
            return {}
        models, parts = [model["params"] for model in self._models().values()], self._setup.parts
        apart = sum(_apart(torch.stack(models[rank::parts])) for rank in range(parts))
        return {"consensus": math.sqrt(apart / (len(models) / parts))}

    def _models(self) -> dict[int, dict[str, torch.Tensor]]:
        """The tensors that each worker delivers, by rank and in rank order; crashed workers are left out."""
        models = {rank: dict(part.tensors) for rank, part in self._retired.items()}
        for rank, worker in self._workers.items():
            if rank not in self._attendance.crashed:
                models[rank] = {"params": worker.delivering(self._setup.traits.delivers)}
                if worker.buffers is not None:
                    models[rank]["buffers"] = worker.buffers
        return dict(sorted(models.items()))

    def parts(self) -> tuple[dict[str, Any], Parts]:
        """The finished workers in a checkpoint: plain values of its part "run", and a part for each model."""
        retired = self._retired_models()
        plain = {"retired": sorted(retired), "retired_updates": sorted(self._updates_of_retired().items())}
        return plain, {f"retired-{rank}": part for rank, part in retired.items()}

    def _retired_models(self) -> dict[int, State]:
        """The models of finished workers, where they are part of the model that is delivered."""
        if self.at_servers or self._setup.config.timing_only:
            return {}
        retired = dict(self._retired)
        for rank in self._attendance.finished & self._workers.keys():
            worker = self._workers[rank]
            tensors = {"params": worker.params, **({} if worker.buffers is None else {"buffers": worker.buffers})}
            retired[rank] = State(tensors).cloned()
        return retired

    def _updates_of_retired(self) -> dict[int, int]:
        """The number of gradients in the models of finished workers, where these models are part of the result."""
        if self.at_servers:
            return {}
        through = self._attendance.finished & self._workers.keys()
        count = self._setup.delivery.gradients_in
        return self._retired_updates | {rank: count(self._workers[rank]) for rank in through}


def _apart(models: torch.Tensor) -> float:
    """The sum of squared distances of models from their mean."""
    return float((models - models.mean(dim=0)).square().sum(dtype=torch.float64))


@dataclass(slots=True)
class VirtualRows:
    """Grades models when they are due and appends rows to `history`; without an `evaluator` there are none.

    | method                                 | graded at                            | model                       |
    |----------------------------------------|--------------------------------------|-----------------------------|
    | synchronous, all have the same model   | the first worker's due boundary      | its own                     |
    | synchronous, models differ, or buffers | the last worker's due boundary       | the mean of all, gathered   |
    | any other                              | so many boundaries of all workers    | servers', or mean of peers  |

    `now` gives the virtual time and `bytes_sent` the bytes that workers have sent in this segment,
    `more` what a row has besides.
    """

    setup: Setup
    callbacks: Callbacks
    evaluator: Grader | None
    history: list[Row]
    model: VirtualModel
    attendance: Attendance
    totals: Totals
    now: Callable[[], float]
    bytes_sent: Callable[[], int]
    more: Callable[[], Row] = dict
    gathering: Gathering = field(init=False)

    def __post_init__(self) -> None:
        self.gathering = Gathering(self.setup)

    def at_boundary(self, worker: WorkerState) -> None:
        """Record that a worker begins its next step; a boundary at which a checkpoint is taken counts once."""
        rank, clock, attendance = worker.number, worker.clock, self.attendance
        before = attendance.at.get(rank)
        attendance.at[rank] = clock
        attendance.away.discard(rank)
        if before is None or clock <= before:
            return
        if not self.setup.synchronous:
            self.count_passed()
            return
        due = clock % self.setup.eval_every == 0 and clock > self._last
        if self.model.shards and not self.model.at_servers:
            if due and self._slowest() == clock:
                self.add()  # the last worker is here: servers have applied this step, and no later gradient
        elif (
            due
            and self.setup.stages is None
            and worker.buffers is None
            and self.setup.delivery.is_common(worker, clock)
        ):
            self._add_common(worker)
        else:
            if due:
                self._gather(worker)
            self.grade_means()

    def count_passed(self) -> None:
        """Count a step boundary of a method without common steps, and add a row after every so many of them."""
        self.attendance.passed += 1
        if self.attendance.passed % (self.setup.eval_every * self.setup.workers) == 0:
            self.add()

    def grade_means(self) -> None:
        """Grade the means of all steps that every worker has made."""
        if self.gathering:
            for found in self.gathering.complete(self._slowest()):
                updates = self.model.updates_at_servers() + found.updates
                self._append(found.values, found.buffers, found.step, updates)

    def add(self, *, final: bool = False) -> None:
        """Grade the model that the method delivers now; `final`, when all work is done and counted."""
        if self.evaluator is not None:
            model = self.model
            self._append(model.delivered(), model.buffers(), self._slowest(), model.updates(), final=final)

    @property
    def _last(self) -> int:
        return self.history[-1]["step"] if self.history else 0

    def _slowest(self) -> int:
        return self.attendance.slowest(self._last)

    def _add_common(self, worker: WorkerState) -> None:
        """Grade the model that all workers have, as this worker has it."""
        delivery, model = self.setup.delivery, self.model
        updates = model.updates_at_servers() if model.at_servers else delivery.gradients_in_common(worker)
        self._append(delivery.shown(worker), None, worker.clock, updates)

    def _gather(self, worker: WorkerState) -> None:
        """Add a worker's model after this step to the mean that is graded."""
        delivery = self.setup.delivery
        updates = worker.clock - worker.given if self.model.at_servers else delivery.gradients_in(worker)
        self.gathering.add(
            worker.clock,
            worker.number,
            delivery.shown(worker),
            updates=updates,
            weight=delivery.weight(self.setup.replica_of(worker.number)),
            buffers=worker.buffers,
        )

    def _append(
        self, values: torch.Tensor, buffers: torch.Tensor | None, step: int, updates: int, *, final: bool = False
    ) -> None:
        assert self.evaluator is not None
        with self.callbacks.evaluating():
            grade = self.evaluator.grade(values, buffers)
        row = {
            "seconds": self.totals.seconds if final else self.now(),
            "step": max(step, self._last),  # also where a newcomer has just begun
            "updates": updates,
            "samples": self.totals.counts["samples"],
            "loss": grade.loss,
            "accuracy": grade.accuracy,
            "bytes": self.totals.counts["bytes_sent"] + (0 if final else self.bytes_sent()),
            **self.model.consensus(),
            **grade.figures,
            **self.more(),
        }
        self.history.append(row)
        self.callbacks.row(row)
        check_row(row)
