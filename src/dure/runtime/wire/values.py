"""What the wire speaks of: who is who, what is asked, what was lost, and how much of everything is allowed."""

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
    """Who one end of a connection is.

    `incarnation` counts the lives of a node: whoever was evicted comes back with a larger one. `about` is what else
    the other side may want to compare before it lets this one in: plain JSON values.
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
    """What a wire allows the others to cost it."""

    staging_nbytes: int = 1 << 30
    """Memory for requests on their way in; callers over it wait."""
    stall_seconds: float = 5.0
    """How long a payload that others wait for may stand still; one slower than `least_speed` stands still."""
    least_speed: float = 4096.0
    """Bytes per second."""
    drain_nbytes: int = 1 << 16
    """A refused payload up to this size is received and forgotten; a larger one costs its sender the connection."""
    turn_nbytes: int = 1 << 22
    """Bytes that one connection may move before the others have theirs."""
    outstanding: int = 1024
    """Requests of one caller that may wait for their replies; more are left unread."""
    handshakes: int = 256
    """Connections that may be half-open; the oldest makes room."""
    handshake_seconds: float = 5.0
    lent_nbytes: int = 1 << 20
    """Payloads from this size on lie in memory that both sides map, where they can."""
    linger_seconds: float = 1.0
    """How long a refused connection may take to read why."""


@dataclass(slots=True)
class Request:
    """A call to make. `tensors` and `into` are lent until it is done; `timeout` is in seconds.

    `into` is what the reply's tensors must fit exactly, in order, dtype and size; or, if `at_most`, be no longer than.
    Without it they are read where they lie (`Wire.borrows`), until the reply's `release`.
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
    """A connection that ended. `finished`: the peer said goodbye. `incoming`: the peer was the caller."""

    peer: str
    reason: str
    finished: bool
    incoming: bool
    incarnation: int


@dataclass(slots=True)
class PeerTraffic:
    """What went between this process and one peer, the handshake included. Overhead is header, meta and trailer."""

    messages_sent: int = 0
    messages_received: int = 0
    payload_nbytes_sent: int = 0
    payload_nbytes_received: int = 0
    overhead_nbytes_sent: int = 0
    overhead_nbytes_received: int = 0


class Respond(Protocol):
    """How a host answers one request, now or later, once."""

    def __call__(self, answer: Reply | RemoteError) -> None:
        """Send `answer`. Raises `TypeError`/`ValueError`, and counts as not answered, when it can't be sent."""
        ...

    def release(self) -> None:
        """Give the request's tensors back before answering. Answering does it too."""
        ...


class HostCallbacks(Protocol):
    """What a wire tells its owner. All but `expects` run on the owner's thread, inside `poll`."""

    def admit(self, caller: Identity) -> str | None:
        """Why `caller` may not come in, naming both sides' values; None when it may."""
        ...

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        """The tensors that a call carries. Raises `Refused` for what is not served.

        A pure look-up: the helper thread calls it too.
        """
        ...

    def request(self, service: str, call: Call, respond: Respond) -> None:
        """A verified request. `call.tensors` may be read until it is answered or released."""
        ...

    def lost(self, loss: Loss) -> None:
        """A connection ended, after the handshake."""
        ...


OnDone = Callable[[Reply | RemoteError], None]


class ServesNobody:
    """The host of a wire that only calls."""

    def admit(self, caller: Identity) -> str | None:
        return "this process hosts nothing."

    def expects(self, service: str, method: str) -> Sequence[TensorSpec]:
        return ()

    def request(self, service: str, call: Call, respond: Respond) -> None:
        respond(RemoteError("this process hosts nothing."))

    def lost(self, loss: Loss) -> None:
        return None
