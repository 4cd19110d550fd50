"""A session outlives its connection: after a reset, the calls go on over a new connection, and each is executed once.

    caller                                                      host
      HELLO, session ------------------------------------------>
      REQUEST 7 ----------------------------------------------->  executes it, and keeps the reply
                                     <--- REPLY 7 --- X reset
      connects again: HELLO, session, resumes ----------------->  finds the session; its requests go on meanwhile
      RETURNED, outstanding [7, 8] ---------------------------->  frees the replies to all other requests
      REQUEST 7 ----------------------------------------------->  knows it, and sends the reply again
      REQUEST 8 ----------------------------------------------->  executes it

A host keeps each reply until the caller has confirmed it: in its next request (`done`) or, if the reply has tensors,
at once by RETURNED. So a handler that must not run twice needs nothing of its own.

The end of a connection alone does not show whether the other process has failed. Its machine tells: it refuses
connections to the address where a process has listened that has ended. A caller sees that when it connects again, and
a host asks (`ListenerProbe`). So a failure is noticed as soon as without sessions, and a process that runs has
`silent_seconds` to come back. Without such an address (the caller does not listen) there is no session, nor over a
Unix socket, which nothing but the end of a process can close.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core.node import nothing
from dure.errors import DamagedFrame, NobodyListens, PeerLost, RemoteError
from dure.runtime.wire.connection import Broken, Connection, Shared
from dure.runtime.wire.frame import Kind
from dure.runtime.wire.reactor import begin_connection

if TYPE_CHECKING:
    from dure.runtime.wire.frame import Frame
    from dure.runtime.wire.values import WireLimits

LAST_SECONDS = 2.0
"""Time for one more attempt after a machine has been silent for as long as it may be: its link may just be back."""

TRY_SECONDS = 2.0
"""Time limit of one attempt to reach a peer."""

AGAIN_SECONDS = 0.2
"""Pause between two attempts."""


class ConnectionLost(PeerLost):
    """No other connection has replaced one to a process that may still run."""

    def __init__(self, name: str, seconds: float, why: RemoteError) -> None:
        super().__init__(f"the connection to {name} was lost for {seconds:g} s ({why})")


def seconds_left(limits: WireLimits, broken: Broken) -> float:
    """Seconds in which another connection may replace one that has ended."""
    return max(LAST_SECONDS, limits.silent_seconds - broken.silence)


class WireSession(NamedTuple):
    """The part of a caller's HELLO by which a host recognizes it: a random name, and where the caller listens."""

    name: str
    listens: tuple[str, int]
    resumes: bool = False

    @staticmethod
    def of(meta: Mapping[str, Any]) -> WireSession | None:
        """The session of a HELLO, if it has one. Raises `DamagedFrame`."""
        if "session" not in meta:
            return None
        try:
            name, (host, port), resumes = meta["session"]
        except (TypeError, ValueError):
            raise DamagedFrame(f"no session: {meta['session']!r}.") from None
        if not (isinstance(name, str) and isinstance(host, str) and isinstance(port, int) and 0 < port < 1 << 16):
            raise DamagedFrame(f"no session: {meta['session']!r}.")
        return WireSession(name, (host, port), resumes is True)


@dataclass(slots=True)
class _Kept:
    """An answer whose arrival the caller has not confirmed; `sent_by` is the connection that it was sent over."""

    kind: Kind
    meta: Mapping[str, Any]
    payload: Sequence[memoryview]
    release: Callable[[], None]
    sent_by: Connection | None = None


class KeptAnswers:
    """The answers of a host that a caller has not confirmed, by the number of their request."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._kept: dict[int, _Kept] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._kept

    def keep(
        self,
        number: int,
        kind: Kind,
        meta: Mapping[str, Any],
        payload: Sequence[memoryview],
        release: Callable[[], None],
    ) -> None:
        """Keep an answer; `release` is called once its tensors are not needed."""
        if not meta.get("tensors"):
            self._shared.reactor.events.append(release)
            release = nothing
        self._kept[number] = _Kept(kind, meta, payload, release)

    def send(self, number: int, connection: Connection) -> None:
        """Send a kept answer, unless that has been done over this connection."""
        kept = self._kept[number]
        if not connection.closed and kept.sent_by is not connection:
            kept.sent_by = connection
            connection.send(kept.kind, kept.meta, kept.payload, request=number)

    def free(self, numbers: Iterable[int]) -> None:
        """Free answers that have arrived."""
        for number in numbers:
            kept = self._kept.pop(number, None)
            if kept is not None:
                self._shared.reactor.events.append(kept.release)

    def free_all_but(self, outstanding: Collection[int]) -> None:
        """Free all answers but those to the `outstanding` requests."""
        self.free([number for number in self._kept if number not in outstanding])


class ListenerProbe:
    """Asks whether a process still runs, at the `address` where it listens.

    `on_end` gets True if it has answered, False if the machine has refused the connection, else None.
    """

    def __init__(self, shared: Shared, address: tuple[str, int], on_end: Callable[[bool | None], None]) -> None:
        self._on_end = on_end
        self._answer: bool | None = None
        try:
            connection = Connection(shared, begin_connection(address), self, connecting=True)
        except PeerLost as error:
            answer = False if isinstance(error, NobodyListens) else None
            shared.reactor.soon(lambda: on_end(answer))
            return
        self._connection = connection
        # Cancelled by nothing: the end of a connection that has ended has no effect.
        shared.reactor.timers.after(TRY_SECONDS, lambda: connection.end(PeerLost("it did not answer in time")))

    def frame(self, frame: Frame) -> None:
        self._answer = True  # a wire runs there
        self._connection.end(PeerLost("it has answered"))

    def ended(self, error: RemoteError, finished: bool) -> None:
        self._on_end(False if isinstance(error, NobodyListens) else self._answer)


class SupersededSide:
    """The side of a connection in whose place another goes on."""

    def frame(self, frame: Frame) -> None:
        return None

    def ended(self, error: RemoteError, finished: bool) -> None:
        return None
