"""The exceptions of dure.

DureError
├── UsageError           the request is wrong: exit status 2       (also a ValueError)
│   ├── StrategyError    a method, its parameters, or a combination that makes no sense
│   └── ClusterError     an invalid description of a cluster
├── DataError            a data set is missing or damaged
├── DeadlockError        every node waits for another; names each node and its operation
├── DivergedError        the loss is NaN or infinity
│   └── Quarantined      the gradients of one worker hold NaN or infinity, step after step
├── CheckpointError      no complete checkpoint where one was expected, or it cannot be written
├── RecordError          a run's record is damaged
├── DamagedMessage       an encoded update that no encoder can produce
├── ReplicaError         a module's parameters left the flat buffer
└── RemoteError          a call failed
    ├── Refused          the callee refused it; the message has the reason
    │   ├── Busy         the callee is occupied: call again later, or call another node
    │   ├── Evicted      this incarnation of a worker is over: join again
    │   ├── Superseded   the update comes too late to count
    │   └── WorkOver     no step is left to start
    ├── PeerLost         the connection to the other node is lost
    │   ├── GreetingLost it was lost before both nodes had identified themselves
    │   └── NobodyListens no process listens at the address of the other node
    ├── CallTimeout      no reply in time
    ├── AlteredNote      a note in the store where ranks meet is none of theirs
    └── DamagedFrame     bytes differ from the frame that was sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class DureError(Exception):
    """Root of all exceptions that dure raises on purpose."""


class UsageError(DureError, ValueError):
    """The request is wrong. The message states a right one."""


class StrategyError(UsageError):
    """A method, one of its parameters, or a combination that makes no sense."""


class ClusterError(UsageError):
    """An invalid description of a cluster."""


class DataError(DureError):
    """A data set is missing or damaged."""


class DeadlockError(DureError):
    """Every node waits for another. The message names each node and the operation that it waits for."""


class DivergedError(DureError):
    """The loss is NaN or infinity. `history` has the rows that a run has added before, one with this loss too."""

    history: Sequence[Mapping[str, Any]] = ()


class Quarantined(DivergedError):
    """The gradients of one worker hold NaN or infinity in several steps in a row; the run excludes the worker."""


class CheckpointError(DureError):
    """No complete checkpoint where one was expected, or one cannot be written."""


class RecordError(DureError):
    """A run's record is damaged."""


class DamagedMessage(DureError):
    """An encoded update that no encoder can produce. No part of it was decoded."""


class ReplicaError(DureError):
    """A module's parameters or gradients left the replica's flat buffer."""


class RemoteError(DureError):
    """A call to another node failed."""


class Refused(RemoteError):
    """The callee refused the call. The message has the reason."""


class Busy(Refused):
    """The callee is occupied. The caller may call again later, or call another node now."""


class Evicted(Refused):
    """The run continued without this worker. It may join again under a new incarnation."""


class Superseded(Refused):
    """The admission policy rejects this update, since the step that it belongs to is over."""


class WorkOver(Refused):
    """No step is left for this worker to start."""


class PeerLost(RemoteError):
    """The connection to another node is lost."""


class GreetingLost(PeerLost):
    """A connection was lost before both nodes had identified themselves. A new connection may succeed."""


class NobodyListens(PeerLost):
    """No process listens at the address of another node: it has ended."""


class CallTimeout(RemoteError):
    """No reply came in time."""


class AlteredNote(RemoteError):
    """A note in the store where ranks meet was not written by a rank of this meeting."""


class DamagedFrame(RemoteError):
    """The received bytes differ from the frame that was sent. The connection is closed; nothing was delivered."""
