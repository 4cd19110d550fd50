"""AsySVRG: variance-reduced SGD in shared memory, without locks and with a constant rate.

Zhao, Li, "Fast Asynchronous Parallel Stochastic Gradient Descent: A Lock-Free Approach with Convergence
Guarantee", AAAI 2016; SVRG is of Johnson and Zhang, NeurIPS 2013.

    for t = 0, 1, 2, ...                              at all threads
        F      <- (1/N) sum over i of the gradient of f_i at w_t        in parallel;   barrier
        u      <- w_t, in shared memory
        p M times altogether, by whichever thread is free
            u^   <- u                                 as it is, perhaps half written by others
            i    <- a random example
            v    <- gradient of f_i at u^  -  gradient of f_i at w_t  +  F
            u    <- u - eta v
        barrier;   w_(t+1) <- u

| in the paper                  | here                                                                            |
|-------------------------------|---------------------------------------------------------------------------------|
| example i                     | a mini-batch of the run; steps and samples count these, not those of F          |
| p M = 2 N                     | `inner` passes over the data, drawn from a counter that all share               |
| F in parallel                 | portions of `portion` samples, taken by whoever is free                         |
| barriers                      | two ticks of the clock per epoch: even ones begin F, odd ones the inner loop    |
| w_(t+1): current or averaged  | the current u                                                                   |
| no lock, lock on write, on both | `lock`                                                                        |
| eta                           | the job's rate                                                                  |

With one worker it is SVRG. A slow worker takes fewer portions and steps, and delays the others by one of them at each
barrier. If a worker fails while F is computed, its portions are missing: for that epoch F is the mean over the other
samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from dure.core.catalogue import parameter
from dure.job.data.split import Replicated
from dure.sync.base import Reasons, ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.core.node import Operation
    from dure.job.gradient import Gradient
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker

_PORTIONS, _SAMPLES = 0, 1


@dataclass(frozen=True, slots=True)
class AsySVRG:
    """Variance-reduced SGD on one model in shared memory, without locks and with a constant rate."""

    paper: ClassVar[str] = "Zhao and Li, Fast Asynchronous Parallel Stochastic Gradient Descent, AAAI 2016"

    inner: float = parameter(
        2.0, "passes over the data by the inner loop of an epoch", range="> 0, < inf", unit="passes"
    )
    lock: Literal["none", "write", "readwrite"] = parameter(
        "none", "accesses to the model that take a lock: none, write, or read and write"
    )
    portion: int = parameter(
        128, "samples of the full gradient that a free worker takes at a time", range=">= 1", unit="samples"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("memory",),
        reasons=Reasons(
            loop="it needs the gradient of all data, of which a loop of one's own sees a part",
            topology="its workers write to one model, in the memory of one machine",
            stages="it computes gradients of all samples too, and a stage works on the next mini-batch",
        ),
        keeps={"memory": ("total",), "server": ("snapshot", "mean")},
        sampling=Replicated(),
        chooses_samples=True,
    )

    def __post_init__(self) -> None:
        if not 0 < self.inner < float("inf"):
            raise ValueError(f"inner counts passes over the data per epoch and must be > 0, got {self.inner}. Use 2.")
        if self.portion < 1:
            raise ValueError(f"portion counts samples and must be >= 1, got {self.portion}. Use 128.")

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, Barrier(), reduce="sum")

    async def work(self, worker: Worker) -> None:
        while True:
            phase = await worker.server.admission()
            await worker.state.boundary.stop(worker.state)
            if phase % 2 == 0:
                await self.full_gradient(worker, phase)
            else:
                await self.inner_loop(worker)
            await worker.server.arrive()

    async def full_gradient(self, worker: Worker, phase: int) -> None:
        """Compute this worker's part of F at w_t, and contribute it to the mean."""
        snapshot, samples = worker.memory.vector("snapshot"), worker.state.data.samples
        total, kept = worker.keep("total"), worker.kept_plain
        if kept.get("phase") != phase:  # of another epoch; after a restart within F the sum goes on
            total.zero_()
            kept.update(phase=phase, weight=0)
        while True:
            await worker.state.boundary.stop(worker.state)
            start = worker.memory.claim(_PORTIONS, self.portion, limit=samples)
            if start is None:
                break
            indices = torch.arange(start, min(start + self.portion, samples))
            gradient = await _aside(worker, worker.state.data.gradient_at(worker.state, snapshot, indices, draw=start))
            total += gradient * len(indices)
            kept["weight"] += len(indices)
            worker.heartbeat()
        # The incarnation lets the memory refuse what this worker sent before a crash or an eviction.
        await worker.memory.contribute(total, kept["weight"], incarnation=worker.server.client.sender.incarnation)
        kept["phase"] = None

    async def inner_loop(self, worker: Worker) -> None:
        """Update u until all workers together have made the updates of an epoch."""
        memory, limit = worker.memory, round(self.inner * worker.state.data.samples)
        snapshot, mean = memory.vector("snapshot"), memory.vector("mean")
        while True:
            await worker.memory.read(alone=self.lock == "readwrite")
            # The boundary comes before the claim, so that no checkpoint leaves a claimed mini-batch undone.
            await worker.state.boundary.stop(worker.state)
            if memory.claim(_SAMPLES, worker.state.batch_size, limit=limit) is None:
                return
            gradient = await worker.gradient()
            again = await _aside(worker, worker.state.data.gradient_again(worker.state, snapshot))
            gradient = gradient - again + mean
            await worker.memory.add(gradient, alone=self.lock != "none")
            worker.heartbeat()


async def _aside(worker: Worker, computing: Operation[Gradient]) -> torch.Tensor:
    """Wait for a gradient that is no step, and record its seconds."""
    state = worker.state
    started = state.node.now()
    gradient = await computing
    state.meter.add("compute", started, state.node.now())
    return gradient.values
