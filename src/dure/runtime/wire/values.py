"""Values of the wire: identities, requests, losses, traffic and limits, and the callbacks of its owner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dure.core.node import Call, Fields, Reply, TensorSpec
from dure.errors import DamagedFrame, RemoteError

if TYPE_CHECKING:
    import torch

_MAX_RANK = (1 << 31) - 1
_MAX_INCARNATION = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one end of a connection.

    `incarnation` counts the starts of a node: an evicted node connects again under a larger one. `about` holds plain
    JSON values that the other side compares before it admits this one.
    """

    job: str
    name: str
    rank: int = 0
    incarnation: int = 0
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not isinstance(self.name, str) or not isinstance(self.job, str):
            raise ValueError(f"a node has a name and a job, both text; got name={self.name!r}, job={self.job!r}.")
        if not isinstance(self.rank, int) or not 0 <= self.rank <= _MAX_RANK:
            raise ValueError(f"rank is a whole number from 0 to {_MAX_RANK}, got {self.rank!r}.")
        if not isinstance(self.incarnation, int) or not 0 <= self.incarnation <= _MAX_INCARNATION:
            raise ValueError(f"incarnation is a whole number from 0 to {_MAX_INCARNATION}, got {self.incarnation!r}.")

    def to_meta(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_meta(meta: Mapping[str, Any]) -> Identity:
        """The reverse of `to_meta`. Raises `DamagedFrame`."""
        try:
            about = meta["about"]
            if not isinstance(about, dict):
                raise ValueError(f"about is an object, got {about!r}.")
            return Identity(meta["job"], meta["name"], meta["rank"], meta["incarnation"], about)
        except (KeyError, ValueError) as error:
            raise DamagedFrame(f"no introduction: {error}") from None


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits on the memory, time and connections that peers can take of a wire."""

    staging_nbytes: int = 1 << 30
    """Memory for requests that arrive; callers beyond it wait."""
    stall_seconds: float = 5.0
    """Longest stall of a payload while other callers wait for memory. A payload below `least_speed` is stalled."""
    least_speed: float = 4096.0
    """Bytes per second."""
    drain_nbytes: int = 1 << 16
    """A refused payload up to this size is received and dropped; for a larger one the connection is closed."""
    turn_nbytes: int = 1 << 22
    """Bytes that one connection moves in a turn, before the other connections."""
    outstanding: int = 1024
    """Requests of one caller that can wait for their replies; further ones are not read."""
    handshakes: int = 256
    """Connections that can be half-open; beyond it the oldest is closed."""
    handshake_seconds: float = 5.0
    lent_nbytes: int = 1 << 20
    """Smallest payload that is left in memory that both sides map, where they can."""
    silent_seconds: float = 30.0
    """Silence of a peer's machine after which its connection is lost. A link that is down for less ends nothing."""
    linger_seconds: float = 1.0
    """Time for which a refused connection stays open, so that the peer can read the reason."""


@dataclass(slots=True)
class Request:
    """A call to make. The wire uses `tensors` and `into` until the call is done; `timeout` is in seconds.

    The tensors of the reply are written to `into`, and must fit it in number, order, dtype and size; with `at_most`
    they may be shorter. If `into` is None, the caller reads them in the host's memory (`Wire.borrows`) until the
    reply's `release`.
    """

    service: str
    method: str
    tensors: Sequence[torch.Tensor] = ()
    into: Sequence[torch.Tensor] | None = ()
    fields: Fields = field(default_factory=dict)
    timeout: float | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Loss:
    """A connection that ended. `finished`: the peer closed it in good order. `incoming`: the peer was the caller."""

    peer: str
    reason: str
    finished: bool
    incoming: bool
    incarnation: int


@dataclass(slots=True)
class PeerTraffic:
    """Counts of messages and bytes between this process and one peer. Overhead: header, meta, tag and trailer."""

    messages_sent: int = 0
    messages_received: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    overhead_nbytes_sent: int = 0
    overhead_nbytes_received: int = 0


class Respond(Protocol):
    """Answers one request of a host, once, at once or later."""

    def __call__(self, answer: Reply | RemoteError) -> None:
        """Send `answer`. If it cannot be sent, raises `TypeError` or `ValueError`; the request is still unanswered."""
        ...

    def release(self) -> None:
        """Free the tensors of the request before the answer. An answer frees them too."""
        ...


class HostCallbacks(Protocol):
    """Callbacks of a wire's owner. All but `expects` run on the owner's thread, inside `poll`."""

    def admit(self, caller: Identity) -> str | None:
        """Return None to admit `caller`, else the reason, with the values of both sides."""
        ...

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        """Return the tensors that a call carries. Raises `Refused` for an unknown service or method.

        It must have no effects: the helper thread calls it too.
        """
        ...

    def request(self, service: str, call: Call, respond: Respond) -> None:
        """Handle a verified request. `call.tensors` are valid until it is answered or released."""
        ...

    def lost(self, loss: Loss) -> None:
        """Handle the end of a connection after its handshake."""
        ...


OnDone = Callable[[Reply | RemoteError], None]


class ServesNobody:
    """The callbacks of a wire that only calls others."""

    def admit(self, caller: Identity) -> str | None:
        return "this process hosts nothing."

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        return ()

    def request(self, service: str, call: Call, respond: Respond) -> None:
        respond(RemoteError("this process hosts nothing."))

    def lost(self, loss: Loss) -> None:
        return None
