"""Updates that arrive at a shard: known or new, refused or accepted, and staged until their group closes.

An update is known by (worker, incarnation, seq). A repeated one is acknowledged again and not applied again. One that
holds NaN or infinity, or is damaged, is refused; after three such in a row the incarnation of its worker ends, and the
worker must join again.

Stale updates may be corrected before they count (`Corrections`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.node import Call, Ghost, Reply
from dure.core.sequence import SequenceTracker
from dure.core.state import State
from dure.core.vectors import all_finite
from dure.errors import DamagedMessage, Evicted, Refused
from dure.job.optimizer import BLOCK
from dure.topology.correction import Correction, Update
from dure.topology.parameter_server.versions import Buffer

if TYPE_CHECKING:
    from dure.codec.coder import Coder
    from dure.topology.parameter_server.versions import Versions


MOST_REFUSED = 3
"""Updates of one incarnation of a worker that are refused in a row before the worker must join again."""


class StagedUpdate(NamedTuple):
    """A checked copy of an update, with the fields that came with it (`shard`)."""

    buffer: Buffer
    weight: float
    base: int | None
    lr: float | Sequence[float] | None
    incarnation: int
    exponent: float
    gradients: int
    void: bool = False


class StagingArea:
    """The incoming updates of one shard, in buffers like those of its `versions`.

    `coder` decodes pushed messages, if updates are encoded. `corrections` hold the version that an update was computed
    on, from its arrival until it is applied or dropped.
    """

    def __init__(self, versions: Versions, corrections: Corrections | None, coder: Coder | None) -> None:
        self.sequences = SequenceTracker()
        self.refused = 0
        self._versions = versions
        self._pool = versions.pool
        self._corrections = corrections
        self._coder = coder
        self._staged: dict[tuple[int, int], StagedUpdate] = {}
        self._refused_in_a_row: dict[int, tuple[int, int]] = {}  # of each worker: its incarnation, how many

    def __len__(self) -> int:
        return len(self._staged)

    # ---- checks

    def is_new(self, fields: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether an update has not arrived before. Raises `Refused` for one that must not count."""
        worker, seq = fields["worker"], fields["seq"]
        try:
            # Checked before its number is taken: a bad update that is sent again is refused again, not acknowledged.
            _check(worker, seq, fields["weight"], tensors, fields.get("exponent", 0.0))
            new = self.sequences.first_time(worker, fields["incarnation"], seq)
        except Evicted:  # of a past life: it says nothing about the worker's present one
            self.refused += 1
            raise
        except Refused:
            self._count_refused(fields)
            raise
        if self._refused_in_a_row:
            self._refused_in_a_row.pop(worker, None)
        return new

    def _count_refused(self, fields: Mapping[str, Any]) -> None:
        """Count a refused update; end its incarnation after `MOST_REFUSED` in a row."""
        self.refused += 1
        worker, incarnation = fields["worker"], fields["incarnation"]
        known, before = self._refused_in_a_row.get(worker, (incarnation, 0))
        in_a_row = before + 1 if known == incarnation else 1
        self._refused_in_a_row[worker] = incarnation, in_a_row
        if in_a_row == MOST_REFUSED:
            # The next push of this life is `Evicted`: the worker joins, and goes on from the servers' model.
            del self._refused_in_a_row[worker]
            self.sequences.fence(worker, incarnation + 1)

    def decoded(self, call: Call) -> Call:
        """`call` with its update decoded. Raises `Refused` for a damaged message."""
        assert self._coder is not None
        current = self._versions.current
        if isinstance(current.tensor, Ghost):
            return Call(call.caller, call.method, call.fields, tuple(current.pieces))
        values = torch.empty_like(current.tensor)
        try:
            self._coder.decode(call.tensors[0], values)
        except DamagedMessage as error:
            self._count_refused(call.fields)
            raise Refused(
                f"update {call.fields['seq']} of worker {call.fields['worker']} is damaged: {error}"
            ) from error
        pieces = torch.split(values, [piece.numel() for piece in current.pieces])
        return Call(call.caller, call.method, call.fields, pieces)

    # ---- copies

    def copy(self, tensors: Sequence[torch.Tensor]) -> Buffer:
        """A copy of the slice in `tensors`."""
        buffer = self._pool.take()
        if not isinstance(buffer.tensor, Ghost):
            for piece, tensor in zip(buffer.pieces, tensors, strict=True):
                piece.copy_(tensor)
        return buffer

    def received(self, call: Call) -> Buffer:
        """A checked copy of a slice that is no update of its own (`vectors`). Raises `Refused` for NaN or infinity."""
        _check(call.fields["worker"], call.fields["seq"], 1.0, call.tensors)
        return self.copy(call.tensors)

    # ---- staged until their group closes

    def stage(self, call: Call) -> None:
        """Keep an update until its group closes, unless it has been here before."""
        fields = call.fields
        worker, seq, base = fields["worker"], fields["seq"], fields.get("base")
        buffer = self.copy(call.tensors)
        stays = False
        try:
            stays = self.is_new(fields, (buffer.tensor,))  # the copy, not the original: it is in the cache
        finally:
            if not stays:
                buffer.release()
        if not stays:
            return
        self._staged[worker, seq] = StagedUpdate(
            buffer,
            fields["weight"],
            base,
            fields.get("lr"),
            fields["incarnation"],
            fields.get("exponent", 0.0),
            fields.get("gradients", 1),
            bool(fields.get("void")),
        )
        if self._corrections is not None:
            self._corrections.pushed(worker, seq, base)

    def missing(self, members: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """The `members`, pairs of worker and seq, that are not staged."""
        return [member for member in members if tuple(member) not in self._staged]

    def take(self, worker: int, seq: int) -> StagedUpdate:
        """Hand a staged update over to the caller."""
        return self._staged.pop((worker, seq))

    def withdraw(self, call: Call) -> Reply:
        """Forget a staged update that another shard has refused."""
        fields = call.fields
        # Its number stays taken: a delayed repetition of this update is acknowledged and not staged, as its worker has
        # gone on. A past life withdraws nothing: its numbers may be those of the present one.
        self.sequences.check(fields["worker"], fields["incarnation"])
        self._forget((fields["worker"], fields["seq"]))
        return Reply()

    def leave(self, call: Call) -> Reply:
        """End an incarnation of a worker: forget its staged updates but for `keep`, and refuse further ones."""
        worker, keep = call.fields["worker"], set(call.fields["keep"])
        for key in [key for key in self._staged if key[0] == worker and key[1] not in keep]:
            self._forget(key)
        # The clock has decided what of this life counts. What is still on its way is refused from now on.
        self.sequences.fence(worker, call.fields["incarnation"] + 1)
        if self._corrections is not None:
            self._corrections.leave(worker, call.fields["incarnation"])
        return Reply()

    def _forget(self, key: tuple[int, int]) -> None:
        staged = self._staged.pop(key, None)
        if staged is not None:
            staged.buffer.release()
            if self._corrections is not None:
                self._corrections.done(*key)

    # ---- checkpoints

    def state(self) -> State:
        """The state that a checkpoint keeps. The tensors are no copies; a timing-only run has none."""
        tensors = {
            f"staged.{worker}.{seq}": update.buffer.tensor
            for (worker, seq), update in self._staged.items()
            if not isinstance(update.buffer.tensor, Ghost)
        }
        staged = [[*key, *update[1:]] for key, update in sorted(self._staged.items())]
        return State(tensors, {"ledger": self.sequences.state(), "refused": self.refused, "staged": staged})

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        self.sequences.restore(state.plain["ledger"])
        self.refused = int(state.plain["refused"])
        for worker, seq, *fields in state.plain["staged"]:
            buffer = self._versions.refill(state.tensors, f"staged.{worker}.{seq}")
            self._staged[worker, seq] = StagedUpdate(buffer, *fields)


def _check(worker: int, seq: int, weight: float, tensors: Sequence[torch.Tensor], exponent: float = 0.0) -> None:
    """Raise `Refused` for an update that would spoil the model."""
    if not (0 < weight < math.inf and math.isfinite(exponent)):
        times = f" times e to the {exponent}" if exponent else ""
        raise Refused(f"update {seq} of worker {worker} has weight {weight}{times}; a weight is a positive number.")
    if not all(isinstance(tensor, Ghost) or all_finite(tensor) for tensor in tensors):
        raise Refused(f"update {seq} of worker {worker} holds NaN or infinity: its training diverged.")


class _Reader:
    """The versions that one worker has pulled under one incarnation, oldest first; `used`: the newest it pushed on."""

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
    """The corrections of one shard, in their order, with what they keep.

        pull by worker m, of version v      m reads v: the buffer is held, not copied; all who read v share it
        push by worker m, computed on v     the update holds v too, until it has been applied
        applied                             every correction, in its order, on the gradient and v and the newest version

    Of each worker the version that it works on is held, and one that it may have fetched ahead. All is let go when the
    worker leaves, but for updates of it that still count.
    """

    def __init__(self, corrections: Sequence[Correction]) -> None:
        self.corrections = corrections
        self.compares = any(correction.compares for correction in corrections)
        self._readers: dict[int, _Reader] = {}
        self._bases: dict[tuple[int, int], Buffer] = {}
        self._vectors: dict[tuple[str, int | None], torch.Tensor] = {}

    @classmethod
    def of(cls, corrections: Sequence[Correction]) -> Corrections | None:
        """The `corrections` for one shard; None for an empty sequence."""
        return cls(corrections) if corrections else None

    # ---- what workers have read

    def pulled(self, worker: int, incarnation: int, buffer: Buffer) -> None:
        """Hold `buffer`, on which `worker` computes from now on."""
        reader = self._readers.get(worker)
        if reader is None or reader.incarnation != incarnation:
            self._let_go(worker)
            reader = self._readers[worker] = _Reader(incarnation)
        if buffer in reader.buffers:
            return
        buffer.holders += 1
        # Of the versions that no push was computed on, one may be in use and one fetched ahead; the older were skipped.
        unused = [each for each in reader.buffers if each.version > reader.used]
        self._keep(reader, [*unused[-1:], buffer])

    def pushed(self, worker: int, seq: int, base: int | None) -> None:
        """Hold the version `base`, on which an arrived update of `worker` was computed; release older ones."""
        reader = self._readers.get(worker)
        if reader is None or base is None:
            return
        reader.used = max(reader.used, base)
        found = next((each for each in reversed(reader.buffers) if each.version == base), None)
        if found is not None:
            found.holders += 1  # the reader may let it go before the update is applied
            self._bases[worker, seq] = found
        self._keep(reader, [each for each in reader.buffers if each.version >= base])

    def done(self, worker: int, seq: int) -> None:
        """Release what is held for an update that has been applied, or never will be."""
        base = self._bases.pop((worker, seq), None)
        if base is not None:
            base.release()
        # A worker that has left is forgotten with its last update, which may still need what is kept for it.
        if self.compares and worker not in self._readers:
            self._forget(worker)

    def leave(self, worker: int, incarnation: int) -> None:
        """Release what is held for `worker`, whose `incarnation` is over."""
        reader = self._readers.get(worker)
        if reader is not None and reader.incarnation <= incarnation:
            self._let_go(worker)
            self._forget(worker)

    def forget_readers(self) -> None:
        """Release the versions that workers have read."""
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
            for low in range(0, gradient.numel(), BLOCK):  # in the cache from one correction to the next
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
