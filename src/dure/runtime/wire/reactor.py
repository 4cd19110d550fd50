"""The reactor of a wire, and its sockets: readiness, timers and wake-ups, handled by the thread that calls `turn`.

All bytes move inside a turn, under one lock. Callbacks of the owner (replies, requests, losses) are queued as *events*,
which only the owner's thread runs. So a helper thread can run turns while the owner computes, and the owner's code
still runs on a single thread.

Processes of one machine use a Unix socket in addition to a TCP port. It costs the kernel less than TCP over loopback
(measured: 31 against 43 ms for 100 MB in both directions). A host that listens on a loopback port also listens on
`unix_name(port)`; callers try that first. Any process of the machine can take the name, so each side checks that the
other belongs to the same user, and otherwise uses TCP.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import math
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Set
from typing import Protocol

from dure.errors import GreetingLost, NobodyListens, PeerLost

CREDENTIALS = struct.Struct("3i")  # process, user, group
IS_LINUX = sys.platform == "linux"  # only Linux has abstract names, and tells the user of a peer
_SOCKET_NBYTES = 4 << 20
_IDLE_SECONDS = 2  # of an idle connection, before its first keep-alive
_MOST_PROBES = 127  # keep-alives that Linux counts
_TCP_RTO_MAX_MS = 44  # a socket option that Python has no name for
_LINK_DOWN = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)
_MOST_RETRY_SECONDS = 120  # Linux's own limit
_LAST_ANSWER_MS = struct.Struct("=56xI")  # `tcpi_last_ack_recv` of Linux's `struct tcp_info`
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
        # Most timers are time limits of calls that end well, and are cancelled long before they come to the top.
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
        # Re-entrant: a callback inside a turn may call the wire, which takes the lock too.
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

    def descriptors(self) -> Set[int]:
        """The sockets that are watched, by descriptor."""
        with self.lock:
            return set(self._masks)

    def soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the next turn."""
        self.callbacks.append(callback)
        if self.lent:
            self.wake()

    def turn(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for an event of a socket or timer, and handle all that are due."""
        # The wait is outside the lock, so that the other thread can queue a call meanwhile; `wake` ends the wait.
        found = self._selector.select(self._bounded(timeout))
        with self.lock:
            self._handle(found)

    def run_events(self) -> int:
        """Run the queued callbacks of the owner. Return their number."""
        count = 0
        # Not a snapshot: a callback that queues another (an answer that is ready at once) is not left until the next
        # turn.
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
        # The helper thread sees the flag after its present turn. The owner waits for that: from here on it alone moves
        # bytes, and the lock is free of contention again.
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
        # An earlier callback of this turn may have closed a later socket; its number may even belong to a new one.
        for key, mask in found:
            if self._masks.get(key.fd, 0) or key.data is self:
                key.data.ready(mask)
        self.timers.run()
        # Only those of before this turn: one that queues itself again must not keep the turn from ending.
        for _ in range(len(self.callbacks)):
            self.callbacks.popleft()()

    def _help(self) -> None:
        while True:
            self._lend.acquire()
            if self._closed:
                return
            try:
                # True until the turns have ended in good order: `take_back` must not wait for a thread that is dead.
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


def tune(sock: socket.socket, silent_seconds: float) -> None:
    """Set large buffers; over TCP also no delay, and the silence after which the machine of the peer has failed.

    TCP itself brings a link back: it sends lost segments again until `silent_seconds` have passed without an answer.
    Where Linux (6.15) can limit the time between two attempts, a link that is up again carries data after a tenth of
    `silent_seconds` at most; elsewhere that may take as long again as it was down.
    """
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_NBYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_NBYTES)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    # Keep-alives find a silent peer of an idle connection; the user time-out, where the system has it, is exact, and
    # holds for a connection with unanswered data too, which has no keep-alives.
    probes = max(1, math.ceil(silent_seconds) - _IDLE_SECONDS)
    interval = math.ceil(probes / _MOST_PROBES)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_SECONDS),
        ("TCP_KEEPINTVL", interval),
        ("TCP_KEEPCNT", math.ceil(probes / interval)),
        ("TCP_USER_TIMEOUT", math.ceil(silent_seconds * 1000)),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    _retry_soon(sock, silent_seconds)


def retry_soon(silent_seconds: float) -> None:
    """Limit the time between two attempts of all TCP connections of this process: the engine has no setting for it.

    See `tune`. It takes about a millisecond, so it can be repeated as connections are made.
    """
    if not IS_LINUX:
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            sock = socket.socket(fileno=int(name))
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                _retry_soon(sock, silent_seconds)
            sock.detach()  # its owner closes it


def _retry_soon(sock: socket.socket, silent_seconds: float) -> None:
    if IS_LINUX:
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, 1000 * retry_seconds(silent_seconds))


def retry_seconds(silent_seconds: float) -> int:
    """The shortest limit of the time between two attempts by which Linux makes its 15 attempts in `silent_seconds`.

    After them it gives the connection up, whatever its user time-out is. The time begins at 0.2 s, and doubles.

    >>> [retry_seconds(seconds) for seconds in (5, 30, 300)]
    [1, 3, 36]
    """
    enough = (
        longest
        for longest in range(1, _MOST_RETRY_SECONDS)
        if sum(min(0.2 * 2**attempt, longest) for attempt in range(15)) > silent_seconds
    )
    return next(enough, _MOST_RETRY_SECONDS)


def silence(sock: socket.socket) -> float:
    """Seconds since the machine of the peer of a TCP connection has answered; 0 where the system cannot tell."""
    if not IS_LINUX or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ANSWER_MS.size)
    return float(_LAST_ANSWER_MS.unpack(info)[0]) / 1000


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's loopback address."""
    return host.startswith("127.")


def unix_name(port: int) -> str:
    """Abstract name of the Unix socket beside TCP port `port`. The name ends with its socket."""
    return f"\0dure port {port}"


def listen_unix(port: int) -> socket.socket | None:
    """Make a listening socket; None where the system has no abstract names, or the name is taken."""
    if not IS_LINUX:
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(unix_name(port))
        sock.listen(1024)
    except OSError:
        sock.close()
        return None
    return sock


def connect_unix(port: int) -> socket.socket | None:
    """Make a connected, non-blocking socket; None if that is not possible."""
    if not IS_LINUX:
        return None
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    if sock.connect_ex(unix_name(port)) == 0 and is_mine(sock):
        return sock
    sock.close()
    return None


def is_mine(sock: socket.socket) -> bool:
    """Whether the other end of a connected Unix socket is a process of this user."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(raw)[1] == os.getuid())


def begin_connection(address: tuple[str, int]) -> socket.socket:
    """Start to connect a socket to `address`. Raises `PeerLost` if that fails at once."""
    near = connect_unix(address[1]) if is_loopback(address[0]) else None
    if near is not None:
        return near
    try:
        family, kind, protocol, _, resolved = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise PeerLost(f"{endpoint(*address)} can't be reached: {error.strerror}") from None
    sock.setblocking(False)
    code = sock.connect_ex(resolved)
    if code not in (0, errno.EINPROGRESS, errno.EWOULDBLOCK):
        sock.close()
        raise loss_by(code)(f"{endpoint(*address)} can't be reached: {errno.errorcode.get(code, code)}")
    return sock


def loss_by(code: int) -> type[PeerLost]:
    """The kind of loss by the error number of an attempt to connect.

    >>> [loss_by(code).__name__ for code in (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EACCES)]
    ['NobodyListens', 'GreetingLost', 'PeerLost']
    """
    return NobodyListens if code == errno.ECONNREFUSED else GreetingLost if code in _LINK_DOWN else PeerLost


def endpoint(host: str, port: int) -> str:
    """A host and a port as text; an IPv6 address has brackets.

    >>> endpoint("10.0.0.1", 80), endpoint("fd00::1", 80)
    ('10.0.0.1:80', '[fd00::1]:80')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
