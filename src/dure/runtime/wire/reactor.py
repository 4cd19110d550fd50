"""The reactor of a wire: sockets, timers and wake-ups, handled by the thread that calls `turn`.

All bytes move inside a turn, under one lock. Callbacks of the owner (replies, requests, losses) are queued as *events*,
which only the owner's thread runs. So a helper thread can run turns while the owner computes, and the owner's code
still runs on a single thread.
"""

from __future__ import annotations

import heapq
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

_LONGEST_WAIT = 0.5  # longest sleep of the helper thread, in seconds

_STUCK_SECONDS = 30.0  # a normal turn of the helper thread takes milliseconds


class Ready(Protocol):
    """The callback of a watched socket."""

    def ready(self, mask: int) -> None: ...


class Timer:
    """A callback that runs at `deadline` (monotonic seconds) unless it is cancelled."""

    __slots__ = ("callback", "deadline", "order")

    def __init__(self, deadline: float, order: int, callback: Callable[[], None]) -> None:
        self.deadline = deadline
        self.order = order
        self.callback: Callable[[], None] | None = callback

    def __lt__(self, other: Timer) -> bool:
        return (self.deadline, self.order) < (other.deadline, other.order)


class Timers:
    """A heap of timers. Cancelled timers are removed at the top of the heap, or when they outnumber the rest."""

    def __init__(self) -> None:
        self._heap: list[Timer] = []
        self._order = 0
        self._dead = 0

    def __len__(self) -> int:
        return len(self._heap) - self._dead

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self._order += 1
        timer = Timer(time.monotonic() + seconds, self._order, callback)
        heapq.heappush(self._heap, timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        if timer is None or timer.callback is None:
            return
        timer.callback = None
        self._dead += 1
        if self._dead > 64 and self._dead > len(self._heap) // 2:
            self._heap = [kept for kept in self._heap if kept.callback is not None]
            heapq.heapify(self._heap)
            self._dead = 0

    def wait(self) -> float | None:
        """Seconds until the first timer is due; None without timers."""
        while self._heap and self._heap[0].callback is None:
            heapq.heappop(self._heap)
            self._dead -= 1
        return max(0.0, self._heap[0].deadline - time.monotonic()) if self._heap else None

    def run(self) -> None:
        """Run the timers that are due."""
        while self._heap and (self._heap[0].callback is None or self._heap[0].deadline <= time.monotonic()):
            timer = heapq.heappop(self._heap)
            callback, timer.callback = timer.callback, None
            if callback is None:
                self._dead -= 1
            else:
                callback()


class Reactor:
    """The event loop of a wire: a selector, timers, and queues of callbacks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.timers = Timers()
        self.events: deque[Callable[[], None]] = deque()  # for the owner's thread
        self.callbacks: deque[Callable[[], None]] = deque()  # for the next turn
        self._selector = selectors.DefaultSelector()
        self._masks: dict[int, int] = {}
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self)
        self._thread: threading.Thread | None = None
        self._lend = threading.Semaphore(0)
        self._returned = threading.Semaphore(0)
        self._failed = False
        self.lent = False
        self._closed = False

    def watch(self, sock: socket.socket, mask: int, ready: Ready) -> None:
        """Call `ready` when `sock` is readable or writable (masks of `selectors`); 0 stops watching."""
        fd = sock.fileno()
        old = self._masks.get(fd, 0)
        if mask == old:
            return
        if not mask:
            self._selector.unregister(sock)
            del self._masks[fd]
            return
        if old:
            self._selector.modify(sock, mask, ready)
        else:
            self._selector.register(sock, mask, ready)
        self._masks[fd] = mask

    def soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the next turn."""
        self.callbacks.append(callback)
        if self.lent:
            self.wake()

    def turn(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for an event of a socket or timer, and handle all that are due."""
        found = self._selector.select(self._bounded(timeout))
        with self.lock:
            self._handle(found)

    def run_events(self) -> int:
        """Run the queued callbacks of the owner. Return their number."""
        count = 0
        while self.events:
            self.events.popleft()()
            count += 1
        return count

    def wake(self) -> None:
        """End a wait of `turn`. Any thread may call this."""
        try:
            self._waker.send(b"!")
        except BlockingIOError:
            pass  # the socket is full of wake-ups already
        except OSError:
            if not self._closed:
                raise

    def ready(self, mask: int) -> None:
        try:
            while len(self._woken.recv(4096)) == 4096:
                pass
        except BlockingIOError:
            pass

    def lend(self) -> None:
        """Let the helper thread run turns until `take_back`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._help, name="dure wire", daemon=True)
            self._thread.start()
        self.lent = True
        self._lend.release()

    def take_back(self) -> None:
        self.lent = False
        self.wake()
        if not self._returned.acquire(timeout=_STUCK_SECONDS) or self._failed:
            raise RuntimeError("the wire's helper thread failed; its error is on standard error.")

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._lend.release()
            self._thread.join(_STUCK_SECONDS)
            self._thread = None
        self._selector.close()
        self._woken.close()
        self._waker.close()

    def _bounded(self, timeout: float) -> float:
        if self.events or self.callbacks:
            return 0.0
        due = self.timers.wait()
        return timeout if due is None else min(timeout, due)

    def _handle(self, found: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, mask in found:
            if self._masks.get(key.fd, 0) or key.data is self:
                key.data.ready(mask)
        self.timers.run()
        for _ in range(len(self.callbacks)):
            self.callbacks.popleft()()

    def _help(self) -> None:
        while True:
            self._lend.acquire()
            if self._closed:
                return
            try:
                self._failed = True
                while self.lent:
                    self._help_once()
                self._failed = False
            finally:  # an error ends this thread, and `take_back` raises
                self._returned.release()

    def _help_once(self) -> None:
        with self.lock:
            due = self.timers.wait()
            wait = 0.0 if self.callbacks else _LONGEST_WAIT if due is None else min(_LONGEST_WAIT, due)
        found = self._selector.select(wait)
        with self.lock:
            self._handle(found)
