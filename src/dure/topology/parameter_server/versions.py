"""Versions of one shard's slice: the newest, older ones that may still be pulled, and pulls of versions to come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dure.core.node import Ghost, Reply
from dure.core.state import State
from dure.errors import Evicted
from dure.topology.parameter_server.buffers import Buffer, Pool

if TYPE_CHECKING:
    from dure.core.node import Call, Node, Operation

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
        self.pool = Pool(node, values, sizes)
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
        elif old is not fresh:
            old.release()
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
