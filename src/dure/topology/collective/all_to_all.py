"""All-reduce by an exchange of all with all: one round, in which every rank sends its whole vector to every other one.

It is the exchange without an algorithm, for comparison: each rank sends (K - 1) n bytes, a ring sends 2 (K - 1) / K n,
and each holds K vectors at once. Vectors are added in the order of the ranks, so that all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dure.core.ranges import Range

if TYPE_CHECKING:
    import torch

    from dure.topology.collective.ranks import Ranks


@dataclass(frozen=True, slots=True)
class AllToAll:
    """The ranks of `line`, each with all others."""

    line: Ranks

    async def all_reduce(self, whole: torch.Tensor) -> None:
        own = whole.clone()  # it is added in its turn, and `whole` begins with the vector of the first rank
        vectors = [own if place == self.line.here else whole.new_empty(whole.numel()) for place in self._places()]
        await self._exchange(own, vectors)
        whole.copy_(vectors[0])
        for vector in vectors[1:]:
            await self.line.add(whole, vector)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Have everybody's `cuts[place]` of `whole` at every rank."""
        parts = [whole[start:stop] for start, stop in cuts]
        await self._exchange(parts[self.line.here], parts)

    async def _exchange(self, own: torch.Tensor, vectors: Sequence[torch.Tensor]) -> None:
        """Send `own` to all others, and receive theirs into `vectors`."""
        line = self.line
        others = [place for place in self._places() if place != line.here]
        coming = [line.recv(place, vectors[place]) for place in others]
        sent = [line.send(place, own) for place in others]
        for place, received, given in zip(others, coming, sent, strict=True):
            await line.end(received, place)
            await line.end(given, place)

    def _places(self) -> range:
        return range(len(self.line))
