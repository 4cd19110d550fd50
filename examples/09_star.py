"""Add a topology: a star, which dure does not contain, in its own file. Methods that need a group run over it.

Every worker sends its vector to the hub, the hub sums the vectors in the order of their ranks, and sends the sum back:

    worker k:  send v_k to the hub;  receive v
    hub:       v = sum of v_k;       send v to every worker

An all-reduce waits for two messages in a row, where a ring waits for 2 (K - 1). The link of the hub carries the vectors
of all workers, so with a large model the ring is faster.
"""

from dataclasses import dataclass
from typing import ClassVar

import dure


class Hub:
    """Collectives among the ranks of `line`, through the rank at place `hub`."""

    def __init__(self, line, hub):
        self.line, self.hub = line, hub
        self.others = [place for place in range(len(line)) if place != hub]

    async def all_reduce(self, whole):
        if self.line.here != self.hub:
            await self.exchange(whole, whole)
            return
        parts = {place: whole.new_empty(whole.numel()) for place in self.others}
        coming = {place: self.line.recv(place, part) for place, part in parts.items()}
        for place, asked in coming.items():
            await self.line.end(asked, place)
            await self.line.add(whole, parts[place])
        await self.spread(whole)

    async def all_gather(self, whole, cuts):
        if self.line.here != self.hub:
            await self.exchange(whole[slice(*cuts[self.line.here])], whole)
            return
        for place in self.others:
            await self.line.end(self.line.recv(place, whole[slice(*cuts[place])]), place)
        await self.spread(whole)

    async def exchange(self, part, whole):
        """Give the hub a part; receive the whole."""
        await self.line.end(self.line.send(self.hub, part), self.hub)
        await self.line.end(self.line.recv(self.hub, whole), self.hub)

    async def spread(self, whole):
        """Send the whole from the hub to all."""
        for place, sent in [(place, self.line.send(place, whole)) for place in self.others]:
            await self.line.end(sent, place)


class StarTopology(dure.Topology):
    """The star in one run."""

    needs_everybody = True

    def check(self):
        if not 0 <= self.choice.hub < self.plan.workers:
            raise dure.DureError(f"hub={self.choice.hub} is no rank of {self.plan.workers} workers. Use hub=0.")

    def group(self, node, meter):
        return dure.SentGroup(node, range(self.plan.workers), lambda line: Hub(line, self.choice.hub), meter)


@dataclass(frozen=True, slots=True)
class Star:
    """All workers, through one of them."""

    hub: int = 0

    offers: ClassVar[tuple[str, ...]] = ("group", "stages")
    deployed_as: ClassVar[type[dure.Topology]] = StarTopology


if __name__ == "__main__":
    print(f"{'method and topology':46}{'accuracy':>9}{'seconds':>9}")
    for topology in ("collective:algorithm=ring", f"{__file__}:Star:hub=2"):
        for sync in ("bsp", "averaging:period=8"):
            run = dure.train("digits-mlp", sync=sync, topology=topology, on="virtual", workers=4, steps=150, lr=0.4)
            figures = run.summary()
            name = f"{sync} {topology.rpartition('/')[2]}"
            print(f"{name:46}{figures['accuracy']:9.3f}{figures['seconds']:9.2f}")
