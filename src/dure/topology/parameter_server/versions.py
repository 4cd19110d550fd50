"""Versions of one shard's slice: memory of them, the newest, older ones that may still be pulled, and versions to come.

The clock says which versions stay (`Pins`), a reader holds the memory of a version until it is released (`Buffer`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from dure.core.node import Ghost, Node, Reply
from dure.core.state import State
from dure.errors import Evicted

if TYPE_CHECKING:
    from dure.core.node import Call, Operation


class Buffer:
    """Memory of the size of a slice. It returns to its pool when its last holder releases it.

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
        """The reply to a pull; its sender releases it."""
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


GENERATION = 1 << 40
"""Versions of one generation of a shard that applies on arrival; a version is its generation times this, plus a count.
"""


def skew(versions: Iterable[int]) -> int:
    """Versions from the oldest to the newest part of a model; a restarted shard counts on in its new generation.

    >>> skew([5, 7, 6]), skew([7, GENERATION + 4])
    (2, 3)
    """
    counts = [version % GENERATION for version in versions]
    return max(counts) - min(counts)


class Versions:
    """The versions of a slice; version 0 is a copy of `values`.

    `current` is the newest. A version before it stays until `let_go`, where `advance` was told to keep it.
    """

    def __init__(self, node: Node, values: torch.Tensor, sizes: Sequence[int]) -> None:
        self.node = node
        like = values if isinstance(values, Ghost) else values.new_empty(1).expand(values.shape)  # keeps no values
        self.pool = Pool(node, like, sizes)
        self.current = self.pool.take()
        if not isinstance(values, Ghost):
            self.current.tensor.copy_(values)
        self.current.publish(0)
        self._kept: dict[int, Buffer] = {}
        self._awaited: dict[int, list[Operation[Reply]]] = {}
        self._restarted_at = 0

    # ---- readers

    def pull(self, call: Call) -> Reply | Awaitable[Reply]:
        """The version that a call asks for, once it is there; the newest where it names none.

        Raises `Evicted` for a version that is gone.
        """
        version = call.fields.get("version")
        current = self.current
        if version is None or version == current.version:
            lease = current.lease()
            return lease if "counted" not in call.fields else self._counted(lease)
        kept = self._kept.get(version)
        if kept is not None:
            return kept.lease()
        if version > current.version:
            promise = self.node.promise(f"version {version} of the shard at {self.node.name}")
            self._awaited.setdefault(version, []).append(promise)
            return promise
        raise Evicted(  # the clock keeps the versions that it has started workers on
            f"version {version} is gone from {self.node.name}, which is at {current.version}: join again."
        )

    def _counted(self, lease: Reply) -> Reply:
        return Reply({**lease.fields, "gradients": self.current.gradients}, lease.tensors, lease.release)

    def held(self, call: Call) -> Reply:
        """The number of gradients in a version, or in the newest one where that version is gone."""
        buffer = self._kept.get(call.fields["version"], self.current)
        return Reply({"gradients": buffer.gradients})

    def find(self, version: int) -> Buffer | None:
        """The buffer of a version; None where that is gone or still to come."""
        return self.current if version == self.current.version else self._kept.get(version)

    # ---- the next version

    def advance(self, fresh: Buffer, gradients: int, *, keep: bool = False) -> None:
        """Make `fresh`, to which so many `gradients` have led, the next version; `keep` the one before."""
        old = self.current
        fresh.gradients = gradients
        fresh.publish(old.version + 1)
        self.current = fresh
        if keep:
            self._kept[old.version] = old
        elif old is not fresh:  # not where the step was made in place
            old.release()
        # Those who asked for this version before it existed: each holds it until its reply is sent.
        for promise in self._awaited.pop(fresh.version, ()):
            promise.resolve(fresh.lease())

    def let_go(self, version: int) -> None:
        """Keep `version` no longer."""
        buffer = self._kept.pop(version, None)
        if buffer is not None:
            buffer.release()

    def behind(self, base: int | None) -> int:
        """Versions since `base`; since the restart, where `base` is older than that."""
        return 0 if base is None else self.current.version - max(base, self._restarted_at)

    # ---- checkpoints

    def kept(self, only: Sequence[int] | None = None) -> list[int]:
        """The versions before the newest that are kept; of those in `only`, if given."""
        return sorted(version for version in self._kept if only is None or version in only)

    def state(self, kept: Sequence[int]) -> State:
        """The state that a checkpoint keeps, with the versions in `kept`. The tensors are no copies.

        A timing-only run has no tensors.
        """
        tensors: dict[str, torch.Tensor] = {}
        if not isinstance(self.current.tensor, Ghost):
            tensors["values"] = self.current.tensor
            tensors |= {f"kept.{version}": self._kept[version].tensor for version in kept}
        return State(tensors, {"version": self.current.version, "kept": kept})

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        if not isinstance(self.current.tensor, Ghost):
            self.current.tensor.copy_(state.tensors["values"])
        self.current.publish(int(state.plain["version"]))
        for version in state.plain["kept"]:
            self._kept[version] = self.refill(state.tensors, f"kept.{version}")
            self._kept[version].publish(version)

    def start_generation(self, lives: int) -> None:
        """Number the next versions so that they exceed every version that a worker may have seen before.

        `lives` counts the restarts of this shard in its run.
        """
        # Workers have seen versions that this shard lost with its memory. A version must never stand for other values
        # than before the restart, so the count goes on in a range of numbers that no earlier life has used.
        version = self.current.version
        self._restarted_at = (version // GENERATION + lives) * GENERATION + version % GENERATION
        self.current.publish(self._restarted_at)

    def holding(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[int], Buffer]:
        """A function that gives the buffer of a version that a worker has read, with one holder more."""
        found = {self.current.version: self.current, **self._kept}

        def held(version: int) -> Buffer:
            if version in found:
                found[version].holders += 1
            else:
                found[version] = self.refill(tensors, f"read.{version}")
                found[version].publish(version)
            return found[version]

        return held

    def refill(self, tensors: Mapping[str, torch.Tensor], name: str) -> Buffer:
        """A buffer with the values of the tensor of that name."""
        buffer = self.pool.take()
        if not isinstance(buffer.tensor, Ghost):
            buffer.tensor.copy_(tensors[name])
        return buffer


class Pins:
    """Counts of the reasons to keep each version: it is the newest, the policy's `floor`, or a worker started on it."""

    def __init__(self) -> None:
        self.newest = 0
        self.floor: int | None = None
        self._started: dict[int, int] = {}
        self._holds: dict[int, int] = {0: 1}
        self._unpinned: list[int] = []

    @property
    def held(self) -> list[int]:
        """The versions that are kept."""
        return sorted(self._holds)

    def has_started(self, worker: int) -> bool:
        """Whether a version is kept because the worker started on it."""
        return worker in self._started

    def pin(self, worker: int, version: int) -> None:
        """Keep the version that a worker starts on, in place of the one before."""
        self.unpin(worker)
        self._started[worker] = version
        self._hold(version)

    def unpin(self, worker: int) -> None:
        version = self._started.pop(worker, None)
        if version is not None:
            self._let_go(version)

    def advance(self) -> int:
        """Keep the next version as the newest; its number."""
        self.newest += 1
        self._hold(self.newest)
        self._let_go(self.newest - 1)
        return self.newest

    def move_floor(self, floor: int | None) -> None:
        if floor is not None:
            self._hold(floor)
        if self.floor is not None:
            self._let_go(self.floor)
        self.floor = floor

    def take_unpinned(self) -> list[int]:
        """The versions that shards need keep no longer; each is given once."""
        unpinned, self._unpinned = self._unpinned, []
        return unpinned

    def _hold(self, version: int) -> None:
        self._holds[version] = self._holds.get(version, 0) + 1

    def _let_go(self, version: int) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]
            self._unpinned.append(version)

    # ---- checkpoints

    def known(self) -> list[int]:
        """All versions that shards may have."""
        return sorted({*self._holds, *self._unpinned})

    def restore(self, newest: int, floor: int | None, known: Iterable[int]) -> None:
        """Go on at `newest` and `floor`, where shards may have the versions that were `known`."""
        self.newest, self.floor = newest, floor
        self._holds = {}
        for version in (newest, floor):
            if version is not None:
                self._hold(version)
        # No worker is in a step after a restore, so none has a pin. The shards were restored with what was known.
        self._unpinned = [version for version in known if version not in self._holds]
