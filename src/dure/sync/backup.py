"""Synchronous SGD with backup workers: a step needs all but the slowest workers' gradients.

Chen, Pan, Monga, Bengio, Jozefowicz, "Revisiting Distributed Synchronous SGD", 2016, algorithms 3 and 4.

    for t = 0, 1, 2, ...                              at every one of N + b workers
        w  <- version t
        g  <- gradient of f at w on a batch of samples drawn from the whole set
        push (g, t);   if version t is complete first: drop g
                                                      at the server
        wait for N gradients of version t
        w  <- Opt(w, their mean);   version t + 1;   what comes later with tag t is dropped

| in the paper                 | here                                                               |
|------------------------------|--------------------------------------------------------------------|
| N + b workers                | all live workers; N is what `backups`, b, leaves of them           |
| a late gradient is dropped   | it is refused before its bytes are sent, and its worker is told to stop computing it |
| tag t                        | the version that the gradient was computed on; the others are never counted |
| samples from the whole set   | `sampling`: a split that the user chooses goes first                |

Up to b slow workers cost nothing but their own gradients. With ``backups=0`` the method is BSP. A failed or paused
worker takes the place of one backup until it is evicted; then N is one smaller. A newcomer begins at the newest
version.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dure.core.parameter import parameter
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.admission import most
from dure.topology.parameter_server.policies import FirstOf

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec
    from dure.sync.worker import Worker


@dataclass(frozen=True, slots=True)
class Backup:
    """Synchronous SGD that drops the gradients of the `backups` slowest workers in every step."""

    paper: ClassVar[str] = "Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting Distributed Synchronous SGD, 2016"

    backups: int | None = parameter(
        None,
        "slowest workers that a step goes on without; none: one in twenty, at least one",
        range=">= 0",
        unit="workers",
        symbol="b",
    )

    traits: ClassVar[Traits] = Traits(
        needs=("servers",),
        reasons=Reasons(
            topology="it goes on without the slowest workers",
            collective="a collective needs all of them",
            stages="it leaves out the last gradients, and each stage would leave out others",
        ),
        messages=Messages(over=("servers",), votes=True),
        lockstep=True,
        sampling="whole",
    )

    def __post_init__(self) -> None:
        if self.backups is not None and self.backups < 0:
            raise ValueError(f"backups counts workers and must be >= 0, got {self.backups}. Use 0 to wait for all.")

    @property
    def _fewest(self) -> int:
        """The least number of workers."""
        return (self.backups or 0) + 1

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.traits, fewest=self._fewest)

    def quorum(self, workers: int) -> int:
        """N, the gradients of an update, with `workers` live ones."""
        return most(workers) if self.backups is None else max(1, workers - self.backups)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(optimizer, FirstOf(self.quorum, distinct=True), quorum=self.quorum)

    async def work(self, worker: Worker) -> None:
        while True:
            worker.set_clock(await worker.server.next_version(lend=True))
            gradient = await worker.gradient_unless_aborted()
            if gradient is not None:
                await worker.server.push(gradient)
