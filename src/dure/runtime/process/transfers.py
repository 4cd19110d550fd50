"""The transfer queues of a device replica: its messages pass through pinned memory, on streams beside the computation.

    call    caller's stream: gradient ──event──┐
            side stream:                 waits ┴─ encodes ─ copies to pinned memory ──event──┐
            loop:                                                       asks for the event ──┴─ the wire sends
    reply   the wire receives into pinned memory ─┐
            arrival stream:                       └─ copies to the device ──event──┐
            caller's stream:                                                 waits ┴─ next forward

No step waits for the whole device, and the host waits for no copy. Memory that a side stream uses is recorded there
(`record_stream`), so that the allocator does not hand it out again too early. A buffer of pinned memory returns to the
pool once its event has come and the wire does not need it any more. If all buffers of a peer are in use, the next
message to it waits.

Memory on the host names the CPU here and elsewhere: a user may have set another default device of PyTorch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dure.core.node import Call, Operation, Reply

if TYPE_CHECKING:
    from dure.errors import RemoteError
    from dure.runtime.wire import Request

SLOTS = 2
"""Buffers per key: one travels while the next is copied."""

ALIGNMENT = 64  # bytes

Tensors = Sequence[torch.Tensor]

Done = Callable[["Reply | RemoteError"], None]

Poll = Callable[[Callable[[], bool]], None]

Send = Callable[["Request", Done], None]
"""Starts a call whose tensors, and memory for those of its reply, are on the host."""


@dataclass(slots=True, eq=False)
class DeviceMessage:
    """A message on its way to the wire, in the queue of its `key`.

    `computed`: on the caller's stream, `tensors` hold their values and `into`, the memory for a reply, is free.
    `copied`: on the side stream, `tensors` are in pinned memory. A message without tensors is `ready` once it has
    memory for its reply. `leave` gives the message to the wire.
    """

    key: str
    tensors: Tensors
    into: Tensors
    computed: torch.Event
    leave: Callable[[DeviceMessage], None]
    ready: bool = False
    copied: torch.Event | None = None
    outgoing: torch.Tensor | None = None
    incoming: torch.Tensor | None = None

    @property
    def begun(self) -> bool:
        """Whether the message has its buffers."""
        return self.ready or self.copied is not None

    def may_leave(self) -> bool:
        """Whether its tensors are in pinned memory. Sets `ready`."""
        self.ready = self.ready or (self.copied is not None and self.copied.query())
        return self.ready


class _Queue(deque[DeviceMessage]):
    """Messages of one key that have not left yet. `polled`: the loop asks for the event of the first."""

    polled = False


class DeviceTransfers:
    """The transfers of one replica between its `device` and the wire of its process.

    `poll` gets functions that the process's loop calls again and again, for as long as they return True.
    """

    def __init__(self, device: torch.device, poll: Poll) -> None:
        self.device = device
        self.pool = PinnedPool()
        self._poll = poll
        # Two streams: a copy to the device must not queue behind one that waits for a gradient.
        self._side = torch.Stream(device)
        self._arrival = torch.Stream(device)
        self._queues: dict[str, _Queue] = {}

    # ---- streams

    @contextmanager
    def overlapped(self, *values: torch.Tensor) -> Iterator[None]:
        """While open, put operations on the side stream, after those in the caller's stream so far.

        They may read `values`. Results are for messages alone, which are copied on the same stream.
        """
        computed = self._here().record_event()
        with self._side:
            self._side.wait_event(computed)
            for each in values:
                each.record_stream(self._side)
            yield

    def _here(self) -> torch.Stream:
        """The caller's stream."""
        return torch.accelerator.current_stream(self.device)

    # ---- messages

    def carry(self, operation: Operation[Reply], peer: str, request: Request, send: Send, done: Done) -> None:
        """Make a call of `peer` by `send`; its tensors and `into` are on the device or on the host.

        `done` gets the answer. On the caller's stream, `into` holds the tensors of the reply then. Calls of one peer
        leave in their order.
        """
        key = f"calls of {peer}"
        tensors, into = request.tensors, request.into
        if not (_on_device(tensors) or _on_device(into or ()) or self._queues.get(key)):
            send(request, done)
            return

        bare = replace(request, tensors=())  # `leave` must not keep the caller's tensors

        def leave(message: DeviceMessage) -> None:
            if operation.done:  # it was cancelled
                self._release(message)
                return
            room = None if into is None else cut(message.incoming, message.into)
            on_host = replace(bare, tensors=cut(message.outgoing, message.tensors), into=room)
            send(on_host, lambda answer: done(self._arrived(message, answer)))

        message = DeviceMessage(key, tensors, into or (), self._here().record_event(), leave)
        operation.when_done(lambda: self._release(message))
        self._enqueue(message)

    def answering(self, call: Call, respond: Done) -> Done:
        """As `respond`, for replies whose tensors may be on the device."""

        def answer(reply: Reply | RemoteError) -> None:
            if isinstance(reply, Reply) and _on_device(reply.tensors):
                self._answer(call.caller, reply, respond)
            else:
                respond(reply)

        return answer

    def _answer(self, caller: str, reply: Reply, respond: Done) -> None:
        """Answer a call of `caller`; the tensors of the reply are copied to pinned memory first."""

        def leave(message: DeviceMessage) -> None:
            reply.release()
            sent = cut(message.outgoing, message.tensors)
            respond(Reply(reply.fields, sent, release=lambda: self._release(message)))

        self._enqueue(DeviceMessage(f"answers to {caller}", reply.tensors, (), self._here().record_event(), leave))

    def received(self, tensors: Tensors) -> Tensors:
        """The tensors of a call of another process, on the device. Their memory on the host is free afterwards."""
        here = self._here()
        with self._arrival:
            found = [tensor.to(self.device) for tensor in tensors]  # the host waits for this stream alone
        here.wait_event(self._arrival.record_event())
        for tensor in found:
            tensor.record_stream(here)
        return found

    @property
    def busy(self) -> bool:
        """Whether messages wait for their copies to pinned memory."""
        return any(self._queues.values())

    def _enqueue(self, message: DeviceMessage) -> None:
        self._queues.setdefault(message.key, _Queue()).append(message)
        self._advance(message.key)

    def _advance(self, key: str) -> None:
        """Start to copy the waiting messages of a key to pinned memory, as many as there are buffers for."""
        queue = self._queues[key]
        for message in queue:
            if not message.begun:
                # In order: a later message must not take the buffers for which this one waits.
                if not self._take_buffers(message):
                    break
                self._start_copy(message)
        if not queue.polled and self._send_copied(queue):
            self._poll(lambda: self._send_copied(queue))

    def _take_buffers(self, message: DeviceMessage) -> bool:
        """Take the pinned memory of a message and its reply; False if it is in use."""
        outgoing, incoming = aligned_nbytes(message.tensors), aligned_nbytes(message.into)
        if outgoing:
            message.outgoing = self.pool.take(message.key, outgoing)
            if message.outgoing is None:
                return False
        if incoming:
            message.incoming = self.pool.take(f"replies to {message.key}", incoming)
            if message.incoming is None:
                self._return(message)
                return False
        return True

    def _start_copy(self, message: DeviceMessage) -> None:
        if message.outgoing is None:
            message.ready = True
            return
        with self._side:
            # Orders the streams on the device; the host does not wait.
            self._side.wait_event(message.computed)
            for pinned, tensor in zip(cut(message.outgoing, message.tensors), message.tensors, strict=True):
                pinned.copy_(tensor.reshape(-1), non_blocking=True)
                if not tensor.is_cpu:
                    tensor.record_stream(self._side)
        message.copied = self._side.record_event()

    def _send_copied(self, queue: _Queue) -> bool:
        """Give the messages that have been copied to the wire, in their order; whether a copy is still under way."""
        queue.polled = True  # a message that leaves may let others advance
        while queue and queue[0].may_leave():
            message = queue.popleft()
            message.leave(message)
        queue.polled = bool(queue) and queue[0].begun
        return queue.polled

    def _arrived(self, message: DeviceMessage, answer: Reply | RemoteError) -> Reply | RemoteError:
        """Start to copy the tensors of a reply to the device. The caller's stream waits for them, the host does not."""
        buffer = message.incoming
        if not isinstance(answer, Reply):
            return answer
        if buffer is None:
            return replace(answer, tensors=message.into) if message.into else answer
        message.incoming = None
        with self._arrival:
            # `into` may still be read by what was queued on the caller's stream before the call.
            self._arrival.wait_event(message.computed)
            for tensor, pinned in zip(message.into, cut(buffer, message.into), strict=True):
                tensor.view(-1).copy_(pinned, non_blocking=True)
                if not tensor.is_cpu:
                    tensor.record_stream(self._arrival)
        copied = self._arrival.record_event()
        self._here().wait_event(copied)
        self._poll(lambda: not (copied.query() and self._free(message, buffer)))
        return Reply(answer.fields, message.into)

    def _free(self, message: DeviceMessage, buffer: torch.Tensor) -> bool:
        """Return the memory of a reply that has been copied."""
        self.pool.give_back(f"replies to {message.key}", buffer)
        self._advance(message.key)
        return True

    def _release(self, message: DeviceMessage) -> None:
        """Return the memory of a message that the wire does not need any more."""
        self._return(message)
        self._advance(message.key)

    def _return(self, message: DeviceMessage) -> None:
        if message.outgoing is not None:
            self.pool.give_back(message.key, message.outgoing)
            message.outgoing = None
        if message.incoming is not None:
            self.pool.give_back(f"replies to {message.key}", message.incoming)
            message.incoming = None


def _on_device(tensors: Tensors) -> bool:
    return any(not tensor.is_cpu for tensor in tensors)


def transfers_of(device: torch.device | str, poll: Poll) -> DeviceTransfers | None:
    """The transfers of a replica on `device`; None on the CPU, where the wire reads and writes tensors themselves."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    return DeviceTransfers(device, poll)


class PinnedPool:
    """Pinned buffers, at most `SLOTS` for each key. A buffer grows to the largest message of its key, and no further.

    `nbytes` counts the bytes of all buffers.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._idle: dict[str, list[torch.Tensor]] = {}

    def take(self, key: str, nbytes: int) -> torch.Tensor | None:
        """A buffer of at least `nbytes` bytes; None while all buffers of `key` are in use."""
        idle = self._idle.setdefault(key, [torch.empty(0, dtype=torch.uint8, device="cpu")] * SLOTS)
        if not idle:
            return None
        buffer = idle.pop()
        if buffer.numel() < nbytes:
            self.nbytes -= buffer.numel()
            size = 1 << (nbytes - 1).bit_length()
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.nbytes += buffer.numel()
        return buffer

    def give_back(self, key: str, buffer: torch.Tensor) -> None:
        """Return a buffer that no process reads or writes any more."""
        self._idle[key].append(buffer)


def aligned_nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of a buffer that `cut` divides into memory for `tensors`."""
    return sum(_aligned(tensor.nbytes) for tensor in tensors)


def cut(buffer: torch.Tensor | None, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Divide a buffer into flat tensors of the sizes and dtypes of `tensors`; None if those have no elements."""
    buffer = torch.empty(0, dtype=torch.uint8, device="cpu") if buffer is None else buffer
    parts, start = [], 0
    for tensor in tensors:
        parts.append(buffer[start : start + tensor.nbytes].view(tensor.dtype))
        start += _aligned(tensor.nbytes)
    return parts


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
