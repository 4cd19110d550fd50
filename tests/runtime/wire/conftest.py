import threading
import time
from dataclasses import replace

import pytest
import torch
from support.raw_caller import CREDENTIALS

from dure.core.node import TensorSpec
from dure.errors import Refused
from dure.runtime.wire import Credentials, Identity, Request, Wire, WireLimits

NEVER = 1 << 60
"""As `WireLimits.lent_nbytes`: everything travels, nothing is lent."""

KEY = CREDENTIALS.key


class Recorder:
    """A host that keeps what it is told, and answers when the test says so."""

    def __init__(self):
        self.specs = {"ping": ()}
        self.requests = []
        self.losses = []
        self.reason = None
        self.answer = None

    def admit(self, caller):
        return self.reason(caller) if callable(self.reason) else self.reason

    def expects(self, service, method):
        if service != "service" or method not in self.specs:
            raise Refused(f"no {service}.{method} here.")
        return self.specs[method]

    def request(self, service, call, respond):
        if self.answer is not None:
            self.answer(call, respond)
        else:
            self.requests.append((call, respond))

    def lost(self, loss):
        self.losses.append(loss)


class World:
    """Wires of one test, all turned by the test's thread."""

    def __init__(self):
        self.wires = []
        self.unix = True
        self.lent_nbytes = NEVER

    def wire(
        self, name, host=None, *, rank=0, incarnation=0, job="job", about=None, limits=None, key=KEY, integrity="mac"
    ):
        identity = Identity(job, name, rank, incarnation, about or {})
        limits = replace(limits or WireLimits(handshake_seconds=1.0), lent_nbytes=self.lent_nbytes)
        wire = Wire(identity, host, limits, credentials=Credentials(key, integrity))
        self.wires.append(wire)
        return wire

    def server(self, name="server 0", **options):
        host = Recorder()
        wire = self.wire(name, host, **options)
        return wire, host, wire.listen(unix=self.unix)

    def join(self, caller, server, port, name="server 0", timeout=5.0):
        """`caller` connects while `server` is turned."""
        outcome = []

        def connect():
            try:
                outcome.append(caller.connect(name, "127.0.0.1", port, timeout))
            except Exception as error:  # noqa: BLE001  (raised below, by the test's thread)
                outcome.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        while thread.is_alive():
            server.poll(0.002)
        thread.join()
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def pair(self, *, caller_host=None, limits=None, integrity="mac"):
        server, host, port = self.server(limits=limits, integrity=integrity)
        caller = self.wire("worker 0", caller_host, limits=limits, integrity=integrity)
        self.join(caller, server, port)
        return server, host, caller

    def until(self, condition, *wires, seconds=5.0):
        """Turn `wires` (or all) until `condition` holds."""
        limit = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < limit, "it did not happen in time"
            for wire in wires or self.wires:
                wire.poll(0.0)

    def call(self, caller, method="ping", tensors=(), into=(), fields=None, timeout=None, peer="server 0", **rest):
        """Start a call; the list that its result will be put into, and the call."""
        out = []
        request = Request("service", method, tensors, into, fields or {}, timeout, **rest)
        return out, caller.call(peer, request, out.append)

    def ask(self, caller, method="ping", **options):
        """The result of a call."""
        out, _ = self.call(caller, method, **options)
        self.until(lambda: out)
        return out[0]


@pytest.fixture
def world():
    torch.set_num_threads(1)
    built = World()
    yield built
    for wire in built.wires:
        wire.close(timeout=0.0)


@pytest.fixture
def spec():
    return lambda tensor: TensorSpec(str(tensor.dtype).removeprefix("torch."), tensor.numel())
