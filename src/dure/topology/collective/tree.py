r"""All-reduce up a tree and down again: few rounds, each with the whole vector.

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005 (binomial trees).

    a tree of ranks lo .. hi - 1 has its root at lo: it is that of the left half, with that of the right as a child

            0                     up      a rank takes in its children, the smallest first, then tells its parent
          / | \                    down    a rank hears from its parent, then tells its children, the largest first
         1  2  4
            |  | \                  8 ranks, 3 rounds up and 3 down
            3  5  6
                  |
                  7

With halves that differ by one, no two children of a rank are ready in the same round, however many ranks there are: a
parent's card takes in one after the other. The sum is made at the root, and copied: all ranks end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dure.core.ranges import Range

if TYPE_CHECKING:
    import torch

    from dure.core.node import Operation
    from dure.topology.collective.ranks import Ranks

AHEAD = 2
"""Children whose vectors a rank has room for at one time."""


class Subtree(NamedTuple):
    """The ranks from `root`, which is the first of them, to `stop`."""

    root: int
    stop: int


def place_of(here: int, size: int) -> tuple[int | None, list[Subtree]]:
    """The parent of `here` in a tree of `size` ranks, and its children's subtrees, the largest first.

    >>> place_of(4, 8)
    (0, [Subtree(root=6, stop=8), Subtree(root=5, stop=6)])
    """
    parent, children = None, []
    lo, hi = 0, size
    while hi - lo > 1:
        middle = lo + (hi - lo) // 2
        if here < middle:
            if here == lo:
                children.append(Subtree(middle, hi))
            hi = middle
        else:
            if here == middle:
                parent = lo
            lo = middle
    return parent, children


@dataclass(frozen=True)
class Tree:
    """The ranks of `line`, the first of them at the root."""

    line: Ranks

    @cached_property
    def parent(self) -> int | None:
        return place_of(self.line.here, len(self.line))[0]

    @cached_property
    def children(self) -> list[Subtree]:
        return place_of(self.line.here, len(self.line))[1]

    async def all_reduce(self, whole: torch.Tensor) -> None:
        coming = self.ask_for(whole)
        await self.reduce(whole)
        await self.broadcast(whole, coming)

    async def all_gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Have everybody's `cuts[place]` of `whole` at every rank."""
        coming = self.ask_for(whole)
        await self.gather(whole, cuts)
        await self.broadcast(whole, coming)

    async def reduce(self, whole: torch.Tensor) -> None:
        """The sum at the root; at the others `whole` is left with that of their subtree."""
        line, rising = self.line, self.children[::-1]
        parts = [whole.new_empty(whole.numel()) for _ in rising[:AHEAD]]
        coming = [line.recv(child.root, part) for child, part in zip(rising, parts, strict=False)]
        for k, child in enumerate(rising):
            part = parts[k % AHEAD]
            await line.end(coming[k], child.root)
            await line.add(whole, part)
            if k + AHEAD < len(rising):
                coming.append(line.recv(rising[k + AHEAD].root, part))
        if self.parent is not None:
            await line.end(line.send(self.parent, whole), self.parent)

    async def gather(self, whole: torch.Tensor, cuts: Sequence[Range]) -> None:
        """Everybody's part at the root; at the others, those of their subtree."""
        line = self.line
        coming = [(child.root, line.recv(child.root, _of(child, whole, cuts))) for child in self.children[::-1]]
        for child, asked in coming:
            await line.end(asked, child)
        if self.parent is not None:
            stop = self.children[0].stop if self.children else line.here + 1
            await line.end(line.send(self.parent, _of(Subtree(line.here, stop), whole, cuts)), self.parent)

    def ask_for(self, whole: torch.Tensor) -> Operation[torch.Tensor] | None:
        """Ask ahead for what `broadcast` brings. `whole` may be sent up meanwhile: nothing comes down before."""
        return None if self.parent is None else self.line.recv(self.parent, whole)

    async def broadcast(self, whole: torch.Tensor, coming: Operation[torch.Tensor] | None) -> None:
        """The root's `whole` at every rank; `coming` is what `ask_for` gave."""
        if coming is not None and self.parent is not None:
            await self.line.end(coming, self.parent)
        for child in self.children:
            await self.line.end(self.line.send(child.root, whole), child.root)


def _of(tree: Subtree, whole: torch.Tensor, cuts: Sequence[Range]) -> torch.Tensor:
    return whole[cuts[tree.root][0] : cuts[tree.stop - 1][1]]
