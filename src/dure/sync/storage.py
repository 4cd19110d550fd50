"""Memory of a worker's parameters: what it pulled, what a server lends it, and room for the next pull."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.node import Ghost, nothing
from dure.errors import UsageError
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    import torch

    from dure.topology.replica import WorkerReplica


@dataclass(slots=True)
class Storage:
    """The memory around `Worker.params`.

    `pulled` are the parameters that were adopted last, with their versions. `spare` is memory that is not in use.
    `lent` are parameters that may be the server's own, which the method must not write to; `writes` is how often their
    memory had been written to when they were lent. `home` is the memory of a module, which is never spare: a pull
    beside the gradient would write to it while the module computes.
    """

    pulled: Pulled | None = None
    spare: torch.Tensor | None = None
    lent: Pulled | None = None
    writes: int = 0
    home: torch.Tensor | None = None

    def room(self, worker: WorkerReplica) -> torch.Tensor:
        """Return memory for parameters that are received while the present ones are in use."""
        room, self.spare = self.spare, None
        return worker.params.clone() if room is None else room

    def adopt(self, worker: WorkerReplica, pulled: Pulled) -> None:
        """Replace the parameters by those that were pulled."""
        self._leave(worker)
        worker.params = pulled.values
        self.pulled = pulled
        if pulled.release is not nothing:
            self.lent, self.writes = pulled, _writes(pulled.values)

    def settle(self, worker: WorkerReplica, home: torch.Tensor) -> None:
        """Copy the parameters to `home`, the memory that a module uses, and go on there."""
        self.home = home
        if worker.params is home:
            return
        home.copy_(worker.params)
        self._leave(worker)
        worker.params = home

    def _leave(self, worker: WorkerReplica) -> None:
        """Keep the memory of the present parameters as spare, or give it back to the server that lent it."""
        lent = self.lent
        if lent is None:
            if worker.params is not self.home:
                self.spare = worker.params
            return
        self.lent = None
        if _writes(lent.values) != self.writes:
            raise UsageError(
                f"a method wrote to the parameters that worker {worker.rank} had from pull(lend=True), which may be "
                "the server's own. Write worker.server.pull() in its place."
            )
        lent.release()


def _writes(tensor: torch.Tensor) -> int:
    """Return how often a tensor's memory has been written to, as PyTorch counts."""
    return 0 if isinstance(tensor, Ghost) else tensor._version
