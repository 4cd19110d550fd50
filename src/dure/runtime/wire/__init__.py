"""Transport of calls and tensors between processes.

| file | content |
|---|---|
| `frame` | frames as bytes, and back; no input or output |
| `integrity` | checksums and authentication of frames |
| `credentials`, `proof` | the key of a run, and the proof that both ends of a connection have it |
| `staging` | tensors as bytes; memory for requests, within a budget |
| `reactor` | selector, timers, wake-ups, the helper thread |
| `connection` | one connection |
| `shared_memory` | bulk that stays in memory which both processes map |
| `unix_socket` | Unix sockets between processes of one machine |
| `handshake` | both ends of a new connection: proofs, identities, admission |
| `inbound`, `outbound` | the host's end of an open connection, the caller's end |
| `wire` | `Wire`: all connections of a process |
| `values` | identities, requests, losses, traffic, limits |
"""

from dure.runtime.wire.credentials import Credentials
from dure.runtime.wire.outbound import Pending
from dure.runtime.wire.values import HostCallbacks, Identity, Loss, OnDone, PeerTraffic, Request, Respond, WireLimits
from dure.runtime.wire.wire import Wire

__all__ = [
    "Credentials",
    "HostCallbacks",
    "Identity",
    "Loss",
    "OnDone",
    "PeerTraffic",
    "Pending",
    "Request",
    "Respond",
    "Wire",
    "WireLimits",
]
