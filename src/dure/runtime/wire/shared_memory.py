"""Bulk between processes of one machine: left in memory that both have mapped, and told of instead of sent.

    caller                                                host
      copies the request's tensors into a room of its own, if they do not lie in one
      REQUEST, memory [[file, number, offset], ...] ------>  reads them there
      <--------------------------------------- REPLY, ERROR  and never again
      uses the room again

      <------------ REPLY, memory [[file, number, offset]]   lends its tensors where they lie
      copies them, or goes on reading until they are released
      RETURNED -------------------------------------------->  may write to them again

Over a socket the same bytes are copied twice by the kernel, and hashed twice. Here nothing can be damaged on its way,
so nothing is hashed. Memory has no name and is sealed against shrinking: a killed process leaves none behind and takes
none away from who has it mapped. A room whose connection ended before its host had answered is never used again; who
has copied what it was lent looks afterwards whether its connection still stood, for else it may be written to; and what
a living process may go on reading, though its connection has ended, is never written to again.
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
    """Memory of this process that others may map."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[int, int]] = {}  # by address: file, number

    def empty(self, nbytes: int) -> torch.Tensor:
        """So many bytes, gone when no tensor uses them any more."""
        memory = MappedMemory(nbytes)
        address, file = memory.bytes.data_ptr(), memory.file
        self._rooms[address] = file, secrets.randbits(62)  # no other memory ever has that number
        memory.when_unmapped(lambda: self._forget(address, file))
        return memory.bytes

    def where(self, tensors: Sequence[torch.Tensor]) -> list[list[int]] | None:
        """File, number and offset in bytes of each tensor, if all lie in memory made here."""
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
    """Memory of others that this process has mapped: kept, since mapping costs, up to `budget_nbytes`."""

    def __init__(self, budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._kept: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()  # by process and number
        self._nbytes = 0

    def tensors(self, process: int | None, told: object, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Those of `specs` where `process` told that they lie. Raises `DamagedFrame`; `DureError` if it is gone."""
        if process is None or not isinstance(told, list) or len(told) != len(specs):
            raise DamagedFrame("a frame tells of memory that this process cannot have mapped.")
        return [self._tensor(process, each, spec) for each, spec in zip(told, specs, strict=True)]

    def _tensor(self, process: int, told: object, spec: TensorSpec) -> torch.Tensor:
        if not (isinstance(told, list) and len(told) == 3 and all(type(each) is int and each >= 0 for each in told)):
            raise DamagedFrame("a frame tells of memory without file, number and offset.")
        file, number, offset = told
        whole, dtype = self._mapped(process, file, number), dtype_of(spec)
        stop = offset + nbytes_of(spec)
        if stop > whole.numel() or offset % dtype.itemsize:
            raise DamagedFrame(f"a frame tells of bytes {offset} to {stop} of memory that has {whole.numel()}.")
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
