"""The history of one segment of a virtual run: the model that it delivers at any moment, and the rows that it adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.core.state import State
from dure.run.gathering import merged_buffers
from dure.run.history import History, RunCounts, Snapshot

if TYPE_CHECKING:
    from dure.job.companions import Grader
    from dure.run.checkpoint import Parts
    from dure.run.outcome import Totals
    from dure.run.prebuilt import Callbacks, Row
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
        """The root mean square distance of the workers' models from their mean, in gossip; empty without."""
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


class VirtualHistory(History):
    """The rows that one segment adds to the history of a virtual run; without a `grader` there are none."""

    def __init__(
        self,
        setup: Setup,
        callbacks: Callbacks,
        counts: RunCounts,
        more: Callable[[float], Row],
        *,
        model: VirtualModel,
        attendance: Attendance,
        grader: Grader | None,
    ) -> None:
        super().__init__(setup, callbacks, counts, lambda seconds: {**model.consensus(), **more(seconds)})
        self._model, self._attendance, self._grader = model, attendance, grader

    def evaluate(self, snapshot: Snapshot) -> None:
        assert self._grader is not None
        with self._callbacks.evaluating():
            self.add(snapshot.graded(self._grader))

    def at_boundary(self, worker: WorkerState) -> None:
        """Record that a worker begins its next step; a boundary at which a checkpoint is taken counts once."""
        rank, clock, attendance, setup = worker.number, worker.clock, self._attendance, self._setup
        before = attendance.at.get(rank)
        attendance.at[rank] = clock
        attendance.away.discard(rank)
        if before is None or clock <= before:
            return
        if not setup.synchronous:
            self.count_passed()
            return
        due = clock % setup.eval_every == 0 and clock > self._last_step
        if self._model.shards and not self._model.at_servers:
            if due and self._counts.slowest() == clock:
                # The last worker is here: servers have applied this step, and no later gradient.
                self._evaluate_delivered()
        elif due and setup.has_common_model(worker):
            at_servers = self._model.at_servers
            updates = self._model.updates_at_servers() if at_servers else setup.delivery.gradients_in_common(worker)
            self.evaluate_now(clock, updates, setup.delivery.shown(worker))
        else:
            if due:
                held = self._model.updates_at_servers()
                values, updates = setup.delivery.shown(worker), setup.delivery.gradients_of_part(worker)
                self.add_part(rank, clock, values, worker.buffers, updates=updates, at_servers=held)
            self.evaluate_means()

    def count_passed(self) -> None:
        """Count a step boundary of a method without common steps, and add a row after every so many of them."""
        self._attendance.passed += 1
        if self._attendance.passed % (self._setup.eval_every * self._setup.workers) == 0:
            self._evaluate_delivered()

    def _evaluate_delivered(self) -> None:
        """Evaluate the model that the method delivers now."""
        if self._grader is not None:
            model = self._model
            self.evaluate_now(self._counts.slowest(), model.updates(), model.delivered(), model.buffers())

    def end(self, totals: Totals) -> None:
        """Evaluate the result, when all work is done and counted."""
        if self._grader is not None:
            model, counts = self._model, {"step": self._counts.slowest(), "updates": self._model.updates()}
            self.evaluate_result(totals, model.delivered(), model.buffers(), **counts)
