"""What dure raises.

DureError
├── UsageError           the request is wrong: exit status 2       (also a ValueError)
│   ├── StrategyError    a method, its parameters, or a combination that makes no sense
│   └── ClusterError     a cluster file that describes no cluster
├── DataError            a data set is missing or damaged
├── DeadlockError        nobody can go on; names every rank and what it waits for
├── DivergedError        the loss is no longer a number
│   └── Quarantined      the gradients of one worker hold NaN or infinity, step after step
├── CheckpointError      no complete checkpoint where one was expected, or it cannot be written
├── RecordError          a run's record is damaged
├── DamagedMessage       an encoded update that no encoder would have sent
├── ReplicaError         a module's parameters left the flat buffer
└── RemoteError          a call failed
    ├── Refused          the host refused it, and said why
    │   ├── Busy         not now: ask again, or another
    │   ├── Evicted      this incarnation is over: join again
    │   ├── Superseded   the update comes too late to count
    │   └── WorkOver     no step is left to start
    ├── PeerLost         the other side is gone
    ├── CallTimeout      no answer in time
    └── DamagedFrame     bytes arrived that nobody sent like that
"""


class DureError(Exception):
    """Root of everything that dure raises on purpose."""


class UsageError(DureError, ValueError):
    """The request is wrong; the message says what would be right."""


class StrategyError(UsageError):
    """A method, one of its parameters, or a combination that makes no sense."""


class ClusterError(UsageError):
    """A cluster description that describes no cluster."""


class DataError(DureError):
    """A data set is missing or damaged."""


class DeadlockError(DureError):
    """Nobody can go on. The message names every rank and what it waits for."""


class DivergedError(DureError):
    """The loss is no longer a number."""


class Quarantined(DivergedError):
    """The gradients of several steps in a row hold NaN or infinity: their worker takes no further part."""


class CheckpointError(DureError):
    """No complete checkpoint where one was expected, or one cannot be written."""


class RecordError(DureError):
    """A run's record is damaged."""


class DamagedMessage(DureError):
    """An encoded update that no encoder would have sent. Nothing of it was decoded."""


class ReplicaError(DureError):
    """A module's parameters or gradients left the replica's flat buffer."""


class RemoteError(DureError):
    """A call to another node failed."""


class Refused(RemoteError):
    """The host refused the call, and said why."""


class Busy(Refused):
    """The host is in the middle of something else. It may be asked again, and another may be asked now."""


class Evicted(Refused):
    """The others went on without this worker. It comes back by joining again, under a new incarnation."""


class Superseded(Refused):
    """The policy of admission has no use for this update: what it was computed on is over."""


class WorkOver(Refused):
    """No step is left that this worker might start."""


class PeerLost(RemoteError):
    """The other side of a connection is gone."""


class GreetingLost(PeerLost):
    """The other side ended a connection before both knew each other: it may let a new one in."""


class CallTimeout(RemoteError):
    """No answer came in time."""


class DamagedFrame(RemoteError):
    """Bytes arrived that are not the frame that was sent. The connection is closed; nothing was delivered."""
