"""Updates that arrive at a shard: known or new, refused or accepted, and staged until their group closes.

An update is known by (worker, incarnation, seq). A repeated one is acknowledged again and not applied again. One that
holds NaN or infinity, or is damaged, is refused; after three such in a row the incarnation of its worker ends, and the
worker must join again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.core.finite import all_finite
from dure.core.node import Call, Ghost, Reply
from dure.core.sequence import SequenceTracker
from dure.core.state import State
from dure.errors import DamagedMessage, Evicted, Refused

if TYPE_CHECKING:
    from dure.codec.coder import Coder
    from dure.topology.parameter_server.buffers import Buffer
    from dure.topology.parameter_server.corrections import Corrections
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

    `coder` decodes pushed messages, if updates are encoded. `corrections` are told which updates come and go.
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
            _check(worker, seq, fields["weight"], tensors, fields.get("exponent", 0.0))
            new = self.sequences.first_time(worker, fields["incarnation"], seq)
        except Evicted:
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
        """Those of `members`, pairs of worker and seq, that are not staged."""
        return [member for member in members if tuple(member) not in self._staged]

    def take(self, worker: int, seq: int) -> StagedUpdate:
        """Hand a staged update over to the caller."""
        return self._staged.pop((worker, seq))

    def withdraw(self, call: Call) -> Reply:
        """Forget a staged update that another shard has refused."""
        fields = call.fields
        self.sequences.check(fields["worker"], fields["incarnation"])
        self._forget((fields["worker"], fields["seq"]))
        return Reply()

    def leave(self, call: Call) -> Reply:
        """End an incarnation of a worker: forget its staged updates but for `keep`, and refuse further ones."""
        worker, keep = call.fields["worker"], set(call.fields["keep"])
        for key in [key for key in self._staged if key[0] == worker and key[1] not in keep]:
            self._forget(key)
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
