"""How calls and tensors travel between processes.

| file | what |
|---|---|
| `frame` | frames as bytes, and back; no input or output |
| `seal` | checksums and authentication of frames |
| `staging` | tensors as bytes; memory for requests, within a budget |
| `reactor` | selector, timers, wake-ups, the helper thread |
| `connection` | one connection |
| `lending` | bulk that is not sent, but read where it lies |
| `unix` | the short way between processes of one machine |
| `inbound`, `outbound` | its host's end, its caller's end |
| `wire` | `Wire`: all connections of a process |
| `values` | what these speak of |
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
