"""Memory of a shard: versions that readers hold while the next one is being made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from dure.core.node import Ghost, Node, Reply


class Buffer:
    """A slice's worth of memory, back in its pool when the last who holds it releases it.

    `pieces` are views of it in the parts in which tensors travel. `reply` answers a pull of it. `gradients` is the
    number of gradients in its values.
    """

    __slots__ = ("gradients", "holders", "pieces", "pool", "reply", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, pieces: Sequence[torch.Tensor], pool: list[Buffer]) -> None:
        self.tensor = tensor
        self.pieces = pieces
        self.pool = pool
        self.holders = 0
        self.version = -1
        self.gradients = 0
        self.reply = Reply()

    def publish(self, version: int) -> None:
        self.version = version
        self.reply = Reply({"version": version}, self.pieces, self.release)

    def lease(self) -> Reply:
        """The reply to a pull; whoever sends it releases it."""
        self.holders += 1
        return self.reply

    def release(self) -> None:
        self.holders -= 1
        if not self.holders:
            self.pool.append(self)


class Pool:
    """Buffers of one size, made when none is free."""

    __slots__ = ("_free", "_ghosts", "_like", "_node", "_sizes", "made")

    def __init__(self, node: Node, like: torch.Tensor, sizes: Sequence[int]) -> None:
        self._free: list[Buffer] = []
        self._node = node
        self._like = like
        self._sizes = sizes
        self._ghosts: list[torch.Tensor] = []  # of all buffers, where they hold nothing
        if isinstance(like, Ghost):
            itemsize = like.nbytes // max(like.numel(), 1)
            self._ghosts = [cast(torch.Tensor, Ghost(elements, itemsize)) for elements in sizes]
        self.made = 0

    def take(self) -> Buffer:
        if self._free:
            buffer = self._free.pop()
        else:
            self.made += 1
            buffer = self._make()
        buffer.holders = 1
        return buffer

    def _make(self) -> Buffer:
        if isinstance(self._like, Ghost):
            return Buffer(self._like, self._ghosts, self._free)
        tensor = self._node.room_like(self._like)
        return Buffer(tensor, torch.split(tensor, list(self._sizes)) if self._sizes else (), self._free)
