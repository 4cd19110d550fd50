"""Hogwild! and HogBatch: workers write to one model in shared memory, without locks.

Niu, Recht, Re, Wright, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NeurIPS 2011;
Sallinen et al., "High Performance Parallel Stochastic Gradient Descent in Shared Memory", IPDPS 2016.

    forever                                           at every core, without a lock
        sample an example e
        g      <- gradient of f_e at x                x as it is, perhaps half written by others
        x_v    <- x_v - gamma g_v                     for every v that e touches: component-wise adds
    after each epoch   gamma <- decay gamma

    HogBatch:   G <- the gradients of several examples, summed up privately;   x_v <- x_v - gamma G_v   once

| in the paper             | here                                                                          |
|--------------------------|-------------------------------------------------------------------------------|
| example e                | the run's mini-batch: the paper's is `--batch-size 1`                         |
| support of e             | what a sparse gradient names (`nn.Embedding(sparse=True)`); else all of x     |
| one random v, scaled     | all v of e, as practical code has it                                          |
| 0.9 after each epoch     | `decay`, per pass of a worker over its samples; 1 keeps gamma constant        |
| b examples of HogBatch   | `batch` mini-batches; their mean, or with `scale="sum"` their sum             |
|                          | a short batch (the first, the last) is divided by its own number of mini-batches |
| component-wise atomic add | `shared:mode=atomic`; `racy` (default) may lose one of two simultaneous adds |
| SGD                      | the job's optimizer, whose state is each worker's own, as in PyTorch's example |

A slow worker makes fewer and staler updates; no worker waits. If a worker fails, at most one update is lost, in whole
or in part, and no lock stays held. HogBatch workers write at different steps: the first batch of worker k is k modulo
`batch` mini-batches shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from dure.core.catalogue import parameter
from dure.core.node import EndOfWork, Ghost
from dure.sync.base import Reasons, ServerRule, Traits

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class Hogwild:
    """SGD without locks: all workers update one model in shared memory."""

    paper: ClassVar[str] = (
        "Niu, Recht, Re and Wright, Hogwild!: A Lock-Free Approach to Parallelizing SGD, NeurIPS 2011"
    )

    decay: float = parameter(
        1.0, "factor of the learning rate after each pass of a worker over its samples", range="> 0, <= 1", symbol="β"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("memory",),
        reasons=Reasons(
            loop="its workers write to one memory, in which a model of one's own does not lie",
            topology="its workers write to one model, in the memory of one machine",
            stages="its workers share the memory of one model, and the stages of a pipeline have one each",
        ),
        keeps={},
        sparse=True,
    )

    def __post_init__(self) -> None:
        _check_decay(self.decay)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, reduce="sum")

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.begin_step()
            _decay(worker, self.decay)
            await worker.memory.read()
            await worker.memory.add(await worker.gradient())


@dataclass(frozen=True, slots=True)
class HogBatch:
    """Hogwild! in which a worker writes to the shared model once in `batch` mini-batches."""

    paper: ClassVar[str] = (
        "Sallinen et al., High Performance Parallel Stochastic Gradient Descent in Shared Memory, IPDPS 2016"
    )

    batch: int = parameter(4, "mini-batches for each write to the shared model", range=">= 1", unit="mini-batches")
    scale: Literal["mean", "sum"] = parameter("mean", "mean or sum of their gradients is written")
    decay: float = parameter(
        1.0, "factor of the learning rate after each pass of a worker over its samples", range="> 0, <= 1"
    )

    traits: ClassVar[Traits] = replace(Hogwild.traits, keeps={"memory": ("accrued",)})

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(
                f"batch counts mini-batches per write and must be >= 1, got {self.batch}. Use 1 to write each one."
            )
        _check_decay(self.decay)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, reduce="sum")

    async def work(self, worker: Worker) -> None:
        try:
            while True:
                await worker.begin_step()
                _decay(worker, self.decay)
                if not worker.kept_plain.get("accrued"):
                    await worker.memory.read()
                _accrue(worker, await worker.gradient())
                if (worker.clock + worker.rank) % self.batch == 0:
                    await self.write(worker)
        except EndOfWork:
            if worker.kept_plain.get("accrued"):
                await self.write(worker)

    async def write(self, worker: Worker) -> None:
        total, count = _accrued(worker)
        if self.scale == "mean" and count > 1:
            total = total / count
        await worker.memory.add(total)
        _clear(worker)


def _accrue(worker: Worker, gradient: torch.Tensor) -> None:
    """Add a gradient to the sum that is not written yet. It is kept; a sparse sum by its indices and values."""
    count = worker.kept_plain.get("accrued", 0)
    worker.kept_plain["accrued"] = count + 1
    if isinstance(gradient, Ghost) or not gradient.is_sparse:
        total = worker.keep("accrued")
        total += gradient
        return
    if count:
        gradient = (_sparse(worker) + gradient).coalesce()
    worker.state.kept["touched"], worker.state.kept["sparse"] = gradient.indices()[0], gradient.values()


def _accrued(worker: Worker) -> tuple[torch.Tensor, int]:
    """Return the sum that is not written yet, and the number of its mini-batches."""
    count = worker.kept_plain["accrued"]
    return _sparse(worker) if "touched" in worker.state.kept else worker.keep("accrued"), count


def _clear(worker: Worker) -> None:
    worker.kept_plain["accrued"] = 0
    if "touched" not in worker.state.kept:
        worker.keep("accrued").zero_()


def _sparse(worker: Worker) -> torch.Tensor:
    indices, values = worker.state.kept["touched"].unsqueeze(0), worker.state.kept["sparse"]
    return torch.sparse_coo_tensor(indices, values, worker.params.shape, is_coalesced=True, check_invariants=False)


def _check_decay(decay: float) -> None:
    if not 0 < decay <= 1:
        raise ValueError(f"decay multiplies the rate after each epoch and must be > 0 and <= 1, got {decay}. Use 0.9.")


def _decay(worker: Worker, decay: float) -> None:
    """Set the learning rate of the next step: times `decay` for each completed pass."""
    if decay < 1:
        state = worker.state
        factor = decay ** int(state.data.epoch)
        rate = state.optimizer.spec.lr if state.rates is None else state.rates(state.clock)
        state.lr = rate * factor if isinstance(rate, (int, float)) else [each * factor for each in rate]
