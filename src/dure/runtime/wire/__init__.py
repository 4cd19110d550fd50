"""Transport of calls and tensors between processes.

| file | content |
|---|---|
| `wire` | `Wire`: all connections of a process |
| `caller`, `host` | the two ends of a connection: handshake, calls and requests, answers |
| `connection` | one connection: frames over a socket |
| `frame` | frames as bytes, and back; no input or output |
| `seals` | the key of a run, the proof that both ends have it, checksums and authentication of frames |
| `memory` | tensors as bytes; memory for requests, within a budget; bulk in memory which two processes map |
| `reactor` | TCP and Unix sockets, selector, timers, wake-ups, the helper thread |
| `values` | identities, requests, losses, traffic, limits |
"""

from dure.runtime.wire.caller import Pending
from dure.runtime.wire.seals import Credentials
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
