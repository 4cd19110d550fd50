"""A topology with a session of its own, and a method that needs it, as a user's file has them.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, on a directed ring:

    w_k <- (w_k + w_{k-1}) / 2 - lr * gradient of f at w_k
"""

from dataclasses import dataclass
from typing import ClassVar

import dure
from dure.core.state import State


class Left(dure.Session):
    """Averages with the worker on the left."""

    def __init__(self, worker, workers):
        self.worker = worker
        self.left, self.right = ((worker.rank + step) % workers for step in (-1, 1))
        self.averages = 0

    async def average(self):
        """Replace the model by its mean with that of the left neighbor."""
        worker = self.worker
        sent = worker.node.send(f"worker {self.right}", worker.params.clone())
        other = await worker.node.recv(f"worker {self.left}", worker.params.new_empty(worker.params.numel()))
        worker.params.lerp_(other, 0.5)
        await sent
        self.averages += 1

    def state(self):
        return State({}, {"averages": self.averages})

    def restore(self, state):
        self.averages = state.plain["averages"]


class LeftNeighborsTopology(dure.Topology):
    """The ring in one run."""

    needs_everybody = True

    def connect(self, worker, group):
        worker.sessions.own["left neighbor"] = Left(worker, self.plan.workers)


@dataclass(frozen=True)
class LeftNeighbors:
    """A directed ring of workers."""

    offers: ClassVar[tuple[str, ...]] = ("left neighbor",)
    deployed_as: ClassVar[type[dure.Topology]] = LeftNeighborsTopology


@dataclass(frozen=True)
class DPSGD:
    """Each step averages with the left neighbor."""

    traits: ClassVar[dure.Traits] = dure.Traits(needs=("left neighbor",), lockstep=True, delivers="mean", agreed=None)

    async def work(self, worker):
        left = worker.session("left neighbor")
        while True:
            gradient = await worker.gradient()
            await left.average()
            worker.step(gradient)
            assert left.averages == worker.clock, "the session was not restored"
