"""Bulk between processes of one machine: a frame names memory that both map, and the payload is not sent.

    caller                                                host
      copies the request's tensors into a room of its own, if they are not in one
      REQUEST, memory [[file, number, offset], ...] ------>  reads them there
      <--------------------------------------- REPLY, ERROR  and reads them no more
      reuses the room

      <------------ REPLY, memory [[file, number, offset]]   lends its tensors in their memory
      copies them, or reads them until they are released
      RETURNED -------------------------------------------->  may write to them again

Over a socket the kernel would copy the same bytes twice, and both ends would hash them. Memory cannot be damaged in
transit, so its content is not hashed. The memory has no name in a file system and is sealed against shrinking: a killed
process leaves none behind, and other processes keep what they have mapped.

- A room is never reused if its connection ended before the host had answered.
- A process that has copied lent memory checks afterwards that its connection was still open; otherwise the memory may
  have been written to.
- Memory that a running process may still read after the end of its connection is never written to again.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.core.node import TensorSpec
from dure.errors import DamagedFrame
from dure.runtime.memory import MappedMemory
from dure.runtime.wire.staging import dtype_of, nbytes_of

if TYPE_CHECKING:
    import torch


class Lender:
    """Memory of this process that other processes may map."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[int, int]] = {}  # by address: file, number

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` bytes; they are freed when no tensor uses them."""
        memory = MappedMemory(nbytes)
        address, file = memory.bytes.data_ptr(), memory.file
        self._rooms[address] = file, secrets.randbits(62)  # a number that no other memory gets
        memory.when_unmapped(lambda: self._forget(address, file))
        return memory.bytes

    def where(self, tensors: Sequence[torch.Tensor]) -> list[list[int]] | None:
        """File, number and offset in bytes of each tensor; None if one is not in memory made here."""
        told = []
        for tensor in tensors:
            base = tensor.untyped_storage().data_ptr()
            if base not in self._rooms:
                return None
            told.append([*self._rooms[base], int(tensor.storage_offset()) * tensor.itemsize])
        return told

    def _forget(self, address: int, file: int) -> None:
        del self._rooms[address]
        os.close(file)


class Borrower:
    """Memory of other processes that this one maps. Maps are kept up to `budget_nbytes`, since a map costs time."""

    def __init__(self, budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._kept: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()  # by process and number
        self._nbytes = 0

    def tensors(self, process: int | None, told: object, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Tensors of `specs` at the places `told` by `process`. Raises `DamagedFrame`; `DureError` if they are gone."""
        if process is None or not isinstance(told, list) or len(told) != len(specs):
            raise DamagedFrame("a frame names memory that this process cannot map.")
        return [self._tensor(process, each, spec) for each, spec in zip(told, specs, strict=True)]

    def _tensor(self, process: int, told: object, spec: TensorSpec) -> torch.Tensor:
        if not (isinstance(told, list) and len(told) == 3 and all(type(each) is int and each >= 0 for each in told)):
            raise DamagedFrame("a frame names memory without file, number and offset.")
        file, number, offset = told
        whole, dtype = self._mapped(process, file, number), dtype_of(spec)
        stop = offset + nbytes_of(spec)
        if stop > whole.numel() or offset % dtype.itemsize:
            raise DamagedFrame(f"a frame names bytes {offset} to {stop} of memory that has {whole.numel()}.")
        return whole[offset:stop].view(dtype)

    def _mapped(self, process: int, file: int, number: int) -> torch.Tensor:
        known = self._kept.get((process, number))
        if known is not None:
            self._kept.move_to_end((process, number))
            return known
        memory = MappedMemory.of(f"/proc/{process}/fd/{file}")
        memory.close()
        self._kept[process, number] = memory.bytes
        self._nbytes += memory.bytes.numel()
        while self._nbytes > self._budget_nbytes and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].numel()
        return memory.bytes
