"""Where the servers of a run are, and which part of the model each holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dure.core.node import Ghost
from dure.core.ranges import pieces

if TYPE_CHECKING:
    import torch

    from dure.codec.base import Codec
    from dure.codec.coder import SliceLayout
    from dure.core.node import Address
    from dure.core.ranges import Ranges


@dataclass(frozen=True, slots=True)
class ServerLayout:
    """Addresses of the shards and the clock, and how the model lies and travels: what a client must know of servers.

    `ranges` are those of each shard (`placement.split`). `ordered` updates go through the `clock`; the others are
    applied on arrival. `clocked` is the address of the only shard together with the clock (`ClockedShard`), if there
    is one shard. `may_refuse` is the policy's. Where shards `look_back`, a pull says which worker computes on it.
    `timing_only` runs move `Ghost`s of `itemsize` bytes an element. Updates are encoded by `codec`, each shard's part
    by its layout; pulled parameters are not.
    """

    shards: Sequence[Address]
    ranges: Sequence[Ranges]
    clock: Address | None = None
    ordered: bool = True
    may_refuse: bool = False
    timing_only: bool = False
    itemsize: int = 4
    look_back: bool = False
    codec: Codec | None = None
    layouts: Sequence[SliceLayout] = ()
    clocked: Address | None = None
    ghosts: Sequence[Sequence[torch.Tensor]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the tensors of each shard in a timing-only run, once for all clients."""
        ghosts = [[Ghost(stop - start, self.itemsize) for start, stop in ranges] for ranges in self.ranges]
        object.__setattr__(self, "ghosts", ghosts)

    def parts(self, flat: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        """Views of `flat`, by shard."""
        if self.timing_only:
            return self.ghosts
        return [pieces(flat, ranges) for ranges in self.ranges]

    @property
    def whole_nbytes(self) -> int | None:
        """Size of the model, where one shard holds it in one piece; None where it is cut."""
        if len(self.ranges) != 1 or len(self.ranges[0]) != 1:
            return None
        ((start, stop),) = self.ranges[0]
        return (stop - start) * self.itemsize
