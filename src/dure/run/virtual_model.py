"""The model that a virtual run delivers, as it is at any moment of a segment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.core.state import State

if TYPE_CHECKING:
    from dure.run.checkpoint import Parts
    from dure.run.servers import HostedServer
    from dure.run.setup import Setup
    from dure.run.virtual_attendance import Attendance
    from dure.sync.worker import Worker


class VirtualModel:
    """Reads the model from `servers`, or from `workers` and from the saved models of workers that have finished."""

    def __init__(
        self,
        setup: Setup,
        servers: Sequence[HostedServer],
        workers: Mapping[int, Worker],
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
        models = [] if self.at_servers else [tensors["params"] for tensors in self._models()]
        return self._setup.topology.result(self.shards, models)

    def buffers(self) -> torch.Tensor | None:
        """The merged buffers of the workers; None where training changes none."""
        stages = self._setup.stages
        if stages is not None:
            return stages.buffers({n: model["buffers"] for n, model in enumerate(self._models()) if "buffers" in model})
        found = [tensors["buffers"] for tensors in self._models() if "buffers" in tensors]
        return self._setup.delivery.merge_buffers(found) if found else None

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
        models, parts = [tensors["params"] for tensors in self._models()], self._setup.parts
        apart = sum(_apart(torch.stack(models[rank::parts])) for rank in range(parts))
        return {"consensus": math.sqrt(apart / (len(models) / parts))}

    def _models(self) -> list[dict[str, torch.Tensor]]:
        """The tensors that each worker delivers, in rank order; crashed workers are left out."""
        models = {rank: dict(part.tensors) for rank, part in self._retired.items()}
        for rank, worker in self._workers.items():
            if rank not in self._attendance.crashed:
                models[rank] = {"params": worker.delivering(self._setup.traits.delivers)}
                if worker.buffers is not None:
                    models[rank]["buffers"] = worker.buffers
        return [models[rank] for rank in sorted(models)]

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
