"""Memory of payloads: tensors as bytes, buffers within a budget, and memory that processes of one machine share.

The size of a request comes from what the *service* expects, never from a frame. Buffers are reused, because a first
write to a page costs five to ten times as much as a later one. All buffers, in use and idle, stay within a budget. If
the budget is used up, a connection is not read, and TCP makes its caller wait.

Between processes of one machine a frame names memory that both map, and the payload is not sent:

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
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from dure.core.node import TensorSpec
from dure.errors import DamagedFrame
from dure.runtime.memory import MappedMemory
from dure.runtime.wire.reactor import CREDENTIALS, IS_LINUX
from dure.runtime.wire.values import WireLimits

_LONGEST_LOOK_SECONDS = 1.0  # longest time that a look adds to a stall
ALIGNMENT = 64  # bytes

_ROUND = 1 << 12  # buffers are of these many bytes or a multiple: so payloads of similar sizes share them

SHARE = 8
"""A caller holds at most the `SHARE`th part of a budget."""

_NAMES = {torch.float32: "float32", torch.uint8: "uint8"}
"""Names of the most frequent dtypes: a name costs more time than the rest of a `TensorSpec`."""


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Dtype and number of elements of `tensor`."""
    dtype = tensor.dtype
    return TensorSpec(_NAMES.get(dtype) or str(dtype).removeprefix("torch."), tensor.numel())


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The dtype that `spec` names. Raises `TypeError`."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{spec.dtype!r} is no dtype of torch; write it as torch does, without the prefix: 'float32'.")
    return dtype


def nbytes_of(spec: TensorSpec) -> int:
    """Bytes of a tensor of `spec`."""
    return spec.numel * dtype_of(spec).itemsize


def described(specs: Sequence[TensorSpec]) -> str:
    """Specs as text: `float32[10], int64[1]`."""
    return ", ".join(f"{spec.dtype}[{'<= ' * spec.at_most}{spec.numel}]" for spec in specs) or "no tensor"


def fitting(expected: Sequence[TensorSpec], listed: object) -> list[TensorSpec] | None:
    """The specs `listed` by a peer if they fit `expected`, of equal length or at most as long; else None.

    >>> fitting([TensorSpec("uint8", 9, at_most=True)], [["uint8", 4]])
    [TensorSpec(dtype='uint8', numel=4, at_most=False)]
    """
    if not isinstance(listed, list) or len(listed) != len(expected):
        return None
    for spec, each in zip(expected, listed, strict=True):
        if not (isinstance(each, list) and len(each) == 2 and each[0] == spec.dtype and type(each[1]) is int):
            return None
        if not (0 <= each[1] <= spec.numel if spec.at_most else each[1] == spec.numel):
            return None
    return [TensorSpec(*each) for each in listed]


def parsed_specs(listed: object) -> list[TensorSpec] | None:
    """The specs `listed` by a peer; None if they are not specs.

    >>> parsed_specs([["float32", 3]]), parsed_specs([["float33", 3]])
    ([TensorSpec(dtype='float32', numel=3, at_most=False)], None)
    """
    if not isinstance(listed, list):
        return None
    for each in listed:
        if not (isinstance(each, list) and len(each) == 2 and isinstance(each[0], str) and type(each[1]) is int):
            return None
        if each[1] < 0 or not isinstance(getattr(torch, each[0], None), torch.dtype):
            return None
    return [TensorSpec(*each) for each in listed]


def announced(listed: object) -> str:
    """The specs `listed` by a peer as a short text, also where they are invalid."""
    if not isinstance(listed, list):
        return "nothing readable"
    try:
        return described([TensorSpec(str(dtype)[:20], int(numel)) for dtype, numel in listed[:8]])
    except (TypeError, ValueError, OverflowError):
        return "nothing readable"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of `tensor`, readable and writable. Raises `ValueError` if the tensor cannot be sent from there."""
    if not tensor.is_cpu:
        raise ValueError(
            f"a tensor on {tensor.device} cannot be sent: send tensor.cpu(), or receive into one on the CPU."
        )
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"a tensor of strides {tuple(tensor.stride())} cannot be sent: send tensor.contiguous().")
    if not tensor.numel():
        return memoryview(b"")
    whole = tensor.detach()
    try:
        array = whole.numpy()
    except TypeError:  # NumPy does not have this dtype
        array = whole.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array).cast("B")  # type: ignore[arg-type,unused-ignore]


def _empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


class StagingBuffer:
    """A buffer that is cut into tensors; the layout is kept for the next equal request."""

    __slots__ = ("nbytes", "specs", "tensors", "views", "whole")

    def __init__(self, whole: torch.Tensor) -> None:
        self.nbytes = whole.numel()
        self.whole = whole
        self.specs: Sequence[TensorSpec] = ()
        self.tensors: list[torch.Tensor] = []
        self.views: list[memoryview] = []

    def cut(self, specs: Sequence[TensorSpec]) -> None:
        """Cut the buffer into tensors of `specs`, one after another."""
        if specs == self.specs:
            return
        view = bytes_of(self.whole)
        self.specs, self.tensors, self.views = list(specs), [], []
        offset = 0
        for spec in specs:
            stop = offset + nbytes_of(spec)
            self.tensors.append(self.whole[offset:stop].view(dtype_of(spec)))
            self.views.append(view[offset:stop])
            offset += _aligned(stop - offset)


class Share:
    """The bytes that one caller holds of a budget."""

    __slots__ = ("held_nbytes",)

    def __init__(self) -> None:
        self.held_nbytes = 0


class Lease:
    """Memory of one request until `release`; counts in the `share` of its caller."""

    __slots__ = ("_share", "_staging", "memory")

    def __init__(self, staging: Staging | None, memory: StagingBuffer, share: Share | None = None) -> None:
        self._staging = staging
        self._share = share
        self.memory = memory
        if share is not None:
            share.held_nbytes += memory.nbytes

    @staticmethod
    def of_nothing(specs: Sequence[TensorSpec]) -> Lease:
        """Make a lease of tensors without elements."""
        memory = StagingBuffer(_empty(0))
        memory.cut(specs)
        return Lease(None, memory)

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Lease:
        """Make a lease of tensors that have memory already."""
        memory = StagingBuffer(_empty(0))
        memory.tensors = list(tensors)
        return Lease(None, memory)

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return self.memory.tensors

    def release(self) -> None:
        """Return the memory. A second call has no effect."""
        if self._staging is not None:
            self._staging.give_back(self.memory)
            self._leave()

    def forget(self) -> None:
        """Drop the memory without reuse: another process may still read it."""
        if self._staging is not None:
            self._staging.held_nbytes -= self.memory.nbytes
            self._leave()

    def _leave(self) -> None:
        self._staging = None
        if self._share is not None:
            self._share.held_nbytes -= self.memory.nbytes


class Staging:
    """Recycled memory within a budget of bytes.

    A payload larger than the whole budget gets memory when no other payload has any, so that no caller waits for ever.
    One caller holds at most the `SHARE`th part, or one payload. `empty` allocates a number of bytes.
    """

    def __init__(self, budget_nbytes: int, empty: Callable[[int], torch.Tensor] = _empty) -> None:
        self.budget_nbytes = budget_nbytes
        self._empty = empty
        self.held_nbytes = 0
        self.peak_nbytes = 0
        self._idle: OrderedDict[int, list[StagingBuffer]] = OrderedDict()  # by size, least recently used first
        self._idle_nbytes = 0

    def take(self, specs: Sequence[TensorSpec], *, elsewhere: bool = False, share: Share | None = None) -> Lease | None:
        """Memory for `specs`; None if the budget is used up. A payload `elsewhere` counts but gets no memory."""
        size = _size(specs)
        # With nothing held, a payload above the whole budget is taken: otherwise its caller would wait for ever.
        if self.held_nbytes and self.held_nbytes + size > self.budget_nbytes:
            return None
        if share is not None and self.exceeds(share, specs):
            return None
        memory = None if elsewhere else self._recycled(size)
        if memory is None:
            self._shrink(size)
            memory = StagingBuffer(_empty(0) if elsewhere else self._empty(size))
            memory.nbytes = size
        self.held_nbytes += size
        self.peak_nbytes = max(self.peak_nbytes, self.held_nbytes + self._idle_nbytes)
        if not elsewhere:
            memory.cut(specs)
        return Lease(self, memory, share)

    def exceeds(self, share: Share, specs: Sequence[TensorSpec]) -> bool:
        """Whether a caller would hold more than its share with `specs`."""
        # A caller without memory may take one payload of any size; the share limits only what comes on top of it.
        return bool(share.held_nbytes) and share.held_nbytes + _size(specs) > self.budget_nbytes // SHARE

    def give_back(self, memory: StagingBuffer) -> None:
        size = memory.nbytes
        self.held_nbytes -= size
        # Idle buffers count in the budget as well: what is kept for reuse must not exceed what was allowed.
        if memory.whole.numel() and self.held_nbytes + self._idle_nbytes + size <= self.budget_nbytes:
            self._idle.setdefault(size, []).append(memory)
            self._idle.move_to_end(size)
            self._idle_nbytes += size

    def _recycled(self, size: int) -> StagingBuffer | None:
        buffers = self._idle.get(size)
        if not buffers:
            return None
        memory = buffers.pop()
        if not buffers:
            del self._idle[size]
        self._idle_nbytes -= size
        return memory

    def _shrink(self, size: int) -> None:
        """Drop idle buffers until `size` more bytes fit."""
        while self._idle and self.held_nbytes + self._idle_nbytes + size > self.budget_nbytes:
            oldest, buffers = next(iter(self._idle.items()))
            buffers.pop()
            self._idle_nbytes -= oldest
            if not buffers:
                del self._idle[oldest]


def _size(specs: Sequence[TensorSpec]) -> int:
    size = sum(_aligned(nbytes_of(spec)) for spec in specs)
    return -(-size // _ROUND) * _ROUND


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Lender:
    """Memory of this process that other processes may map."""

    def __init__(self) -> None:
        self._rooms: dict[int, tuple[int, int]] = {}  # by address: file, number

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate `nbytes` bytes; they are freed when no tensor uses them."""
        memory = MappedMemory(nbytes)
        # The random number is the key of the peer's map: descriptors and process ids are used again, it is not.
        address, file = memory.bytes.data_ptr(), memory.file
        self._rooms[address] = file, secrets.randbits(62)  # a number that no other memory gets
        # The file stays open as long as a tensor of this process uses the memory: peers open it under /proc.
        memory.when_unmapped(lambda: self._forget(address, file))
        return memory.bytes

    def where(self, tensors: Sequence[torch.Tensor]) -> list[list[int]] | None:
        """File, number and offset in bytes of each tensor; None if one is not in memory made here."""
        listed = []
        for tensor in tensors:
            base = tensor.untyped_storage().data_ptr()
            if base not in self._rooms:
                return None
            listed.append([*self._rooms[base], int(tensor.storage_offset()) * tensor.itemsize])
        return listed

    def _forget(self, address: int, file: int) -> None:
        del self._rooms[address]
        os.close(file)


class Borrower:
    """Memory of other processes that this one maps. Maps are kept up to `budget_nbytes`, since a map costs time."""

    def __init__(self, budget_nbytes: int) -> None:
        self._budget_nbytes = budget_nbytes
        self._kept: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()  # by process and number
        self._nbytes = 0

    def tensors(self, process: int | None, listed: object, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """The tensors at the places that `process` lists. Raises `DamagedFrame`; `DureError` if they are gone."""
        if process is None or not isinstance(listed, list) or len(listed) != len(specs):
            raise DamagedFrame("a frame names memory that this process cannot map.")
        return [self._tensor(process, each, spec) for each, spec in zip(listed, specs, strict=True)]

    def _tensor(self, process: int, listed: object, spec: TensorSpec) -> torch.Tensor:
        if not (
            isinstance(listed, list) and len(listed) == 3 and all(type(each) is int and each >= 0 for each in listed)
        ):
            raise DamagedFrame("a frame names memory without file, number and offset.")
        file, number, offset = listed
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
        # The map stays valid when the file is closed here, and even after the end of the other process.
        memory = MappedMemory.of(f"/proc/{process}/fd/{file}")
        memory.close()
        self._kept[process, number] = memory.bytes
        self._nbytes += memory.bytes.numel()
        while self._nbytes > self._budget_nbytes and len(self._kept) > 1:
            self._nbytes -= self._kept.popitem(last=False)[1].numel()
        return memory.bytes


def process_behind(sock: socket.socket) -> int | None:
    """Id of the process at the other end of a Unix socket; None if this process may not map its memory."""
    if not IS_LINUX or sock.family != socket.AF_UNIX:
        return None
    process: int = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[0]
    return process if process and os.access(f"/proc/{process}/fd", os.R_OK | os.X_OK) else None


def has_memory(process: int | None) -> bool:
    """Whether a process of this machine still has memory. A killed process loses it before its sockets."""
    try:
        with open(f"/proc/{process}/statm") as file:
            return int(file.read().split()[0]) > 0
    except (FileNotFoundError, ProcessLookupError):
        return False


class Stall:
    """Seconds for which a payload has stalled; a caller looks several times a second.

    A pause of this process counts as `_LONGEST_LOOK_SECONDS` at most, since it left received bytes unread.
    """

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._seconds = 0.0
        self._looked = self._received = 0.0

    def begin(self, received_nbytes: int) -> None:
        """Start the count for a new payload."""
        self._seconds, self._looked, self._received = 0.0, time.monotonic(), received_nbytes

    def is_over(self, received_nbytes: int) -> bool:
        """Whether the stall is too long, given the number of bytes received so far."""
        # A process that was itself stopped finds all its callers silent: one look counts a second at most.
        now = time.monotonic()
        gap, self._looked = min(now - self._looked, _LONGEST_LOOK_SECONDS), now
        came, self._received = received_nbytes - self._received, received_nbytes
        self._seconds = 0.0 if came > self._limits.least_speed * gap else self._seconds + gap
        return self._seconds >= self._limits.stall_seconds
