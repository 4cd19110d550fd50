"""What a shard does to stale gradients before they count: remedies, and the versions that they look back at.

    pull by worker m, of version v      m reads v: the buffer is held, not copied; all who read v share it
    push by worker m, computed on v     the update holds v too, until it has been applied
    applied                             every correction, in its order, on the gradient and v and the newest version

Of each worker the version that it works on is held, and one that it may have fetched ahead. All is let go when the
worker leaves, but for updates of it that still count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch

from dure.core.node import Ghost
from dure.core.state import State
from dure.job.optimizer import BLOCK
from dure.topology.correction import Correction, Update
from dure.topology.parameter_server.buffers import Buffer


class _Reader:
    """What one worker has pulled under one incarnation, oldest first, and the newest version that it pushed on."""

    __slots__ = ("buffers", "incarnation", "used")

    def __init__(self, incarnation: int, used: int = -1) -> None:
        self.incarnation = incarnation
        self.used = used
        self.buffers: list[Buffer] = []


class StaleUpdate(NamedTuple):
    """An update about to be applied, `staleness` versions after the one that it was computed on."""

    worker: int
    seq: int
    staleness: int
    gradient: torch.Tensor


class Corrections:
    """The corrections of one shard, in their order, with what they keep."""

    def __init__(self, corrections: Sequence[Correction]) -> None:
        self.corrections = corrections
        self.compares = any(correction.compares for correction in corrections)
        self._readers: dict[int, _Reader] = {}
        self._bases: dict[tuple[int, int], Buffer] = {}
        self._vectors: dict[tuple[str, int | None], torch.Tensor] = {}

    @classmethod
    def of(cls, corrections: Sequence[Correction]) -> Corrections | None:
        """Those corrections for one shard; None where there are none."""
        return cls(corrections) if corrections else None

    # ---- what workers have read

    def pulled(self, worker: int, incarnation: int, buffer: Buffer) -> None:
        """`worker` goes on from `buffer`."""
        reader = self._readers.get(worker)
        if reader is None or reader.incarnation != incarnation:
            self._let_go(worker)
            reader = self._readers[worker] = _Reader(incarnation)
        if buffer in reader.buffers:
            return
        buffer.holders += 1
        unused = [each for each in reader.buffers if each.version > reader.used]
        self._keep(reader, [*unused[-1:], buffer])

    def pushed(self, worker: int, seq: int, base: int | None) -> None:
        """An update of `worker` has come, computed on version `base`."""
        reader = self._readers.get(worker)
        if reader is None or base is None:
            return
        reader.used = max(reader.used, base)
        found = next((each for each in reversed(reader.buffers) if each.version == base), None)
        if found is not None:
            found.holders += 1
            self._bases[worker, seq] = found
        self._keep(reader, [each for each in reader.buffers if each.version >= base])

    def done(self, worker: int, seq: int) -> None:
        """That update has been applied, or never will be."""
        base = self._bases.pop((worker, seq), None)
        if base is not None:
            base.release()
        if self.compares and worker not in self._readers:
            self._forget(worker)

    def leave(self, worker: int, incarnation: int) -> None:
        """`worker` is gone, under that incarnation."""
        reader = self._readers.get(worker)
        if reader is not None and reader.incarnation <= incarnation:
            self._let_go(worker)
            self._forget(worker)

    def forget_readers(self) -> None:
        """What workers have read is not known any more."""
        for worker in list(self._readers):
            self._let_go(worker)

    def _keep(self, reader: _Reader, buffers: list[Buffer]) -> None:
        for buffer in reader.buffers:
            if buffer not in buffers:
                buffer.release()
        reader.buffers = buffers

    def _let_go(self, worker: int) -> None:
        reader = self._readers.pop(worker, None)
        if reader is not None:
            self._keep(reader, [])

    def _forget(self, worker: int) -> None:
        for name in [name for name in self._vectors if name[1] == worker]:
            del self._vectors[name]

    # ---- corrections

    def correct(self, members: Iterable[StaleUpdate], values: torch.Tensor) -> None:
        """Correct the members' gradients in place, which are about to be applied to `values` (if there are any)."""
        if isinstance(values, Ghost):
            return
        for worker, seq, staleness, gradient in members:
            base = self._bases.get((worker, seq))
            for low in range(0, gradient.numel(), BLOCK):
                cut = slice(low, low + BLOCK)
                read = None if base is None else base.tensor[cut]
                update = Update(worker, staleness, gradient[cut], values[cut], read, self._keeper(values, cut))
                for correction in self.corrections:
                    correction.correct(update)

    def _keeper(self, values: torch.Tensor, cut: slice) -> Callable[[str, int | None], torch.Tensor]:
        def keep(name: str, worker: int | None) -> torch.Tensor:
            vector = self._vectors.get((name, worker))
            if vector is None:
                vector = self._vectors[name, worker] = torch.zeros_like(values)
            return vector[cut]

        return keep

    # ---- checkpoints

    def state(self, saved: Collection[int]) -> State:
        """The state that a checkpoint keeps besides the versions in `saved`. The tensors are no copies.

        A timing-only run has no tensors.
        """
        held = [buffer for reader in self._readers.values() for buffer in reader.buffers] + list(self._bases.values())
        read = {buffer.version: buffer.tensor for buffer in held if not isinstance(buffer.tensor, Ghost)}
        tensors = {f"read.{version}": tensor for version, tensor in read.items() if version not in saved}
        names = sorted(self._vectors, key=str)
        tensors |= {f"remedy.{place}": self._vectors[name] for place, name in enumerate(names)}
        readers = [
            [worker, reader.incarnation, reader.used, [buffer.version for buffer in reader.buffers]]
            for worker, reader in sorted(self._readers.items())
        ]
        bases = [[worker, seq, buffer.version] for (worker, seq), buffer in sorted(self._bases.items())]
        plain = {"readers": readers, "bases": bases, "vectors": [list(name) for name in names]}
        return State(tensors, {"remedies": plain})

    def restore(self, state: State, held: Callable[[int], Buffer]) -> None:
        """Continue from `state`. `held` returns the buffer of a version, with one holder more."""
        plain = state.plain["remedies"]
        for worker, incarnation, used, versions in plain["readers"]:
            reader = self._readers[int(worker)] = _Reader(int(incarnation), int(used))
            reader.buffers = [held(version) for version in versions]
        self._bases = {(int(worker), int(seq)): held(version) for worker, seq, version in plain["bases"]}
        for place, (name, worker) in enumerate(plain["vectors"]):
            self._vectors[name, worker] = state.tensors[f"remedy.{place}"].clone()
