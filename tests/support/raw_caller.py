"""A caller that is a plain socket: its frames are made by the test."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any

from dure.runtime.wire import Credentials
from dure.runtime.wire.frame import Frame, Header, Kind, Outgoing, Parser, encode_meta, job_code
from dure.runtime.wire.seals import Prover, Seals

CREDENTIALS = Credentials(bytes(range(32)))
"""Those of all nodes and wires of the tests."""

HELLO = {"job": "job", "name": "worker 1", "rank": 1, "incarnation": 0, "about": {}}


def frame(
    kind: Kind,
    meta: Mapping[str, Any] | bytes,
    payload: bytes = b"",
    *,
    rank: int = 1,
    request: int = 0,
    seals: Seals | None = None,
) -> bytearray:
    """The bytes of a frame; without `seals` they are those of one who has no key."""
    header = Header(kind, job_code("job"), rank, 0, request)
    raw = meta if isinstance(meta, bytes) else encode_meta(meta)
    outgoing, out = Outgoing(header, raw, [memoryview(payload)], seals), bytearray()
    while view := outgoing.peek():
        out += view
        outgoing.advance(len(view))
    return out


class RawCaller:
    """Connected to the host at `port`; `until(condition)` turns that host. `seals` are of what this one sends."""

    seals: Seals

    def __init__(self, port: int, until: Callable[[Callable[[], object]], None]) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setblocking(False)
        self._until = until
        self._parser = Parser(None)
        self._parser.reads = False

    def send(self, kind: Kind, meta: Mapping[str, Any] | bytes, payload: bytes = b"", **header: int) -> None:
        self.sock.sendall(frame(kind, meta, payload, seals=self.seals, **header))

    def frame(self) -> Frame:
        """The next frame of the host; its payload, if it has one, is dropped."""
        found: list[Frame] = []

        def look() -> bool:
            got = self._parser.take()
            while got is not None and not got.complete:
                self._parser.drop()
                got = self._parser.take()
            if got is not None:
                found.append(got)
                return True
            with contextlib.suppress(BlockingIOError):
                nbytes = self.sock.recv_into(self._parser.space())
                assert nbytes, "the connection has ended"
                self._parser.received(nbytes)
            return False

        self._until(look)
        return found[0]

    def prove(self) -> None:
        """Show the host that this one has the key, and have it show the same."""
        prover = Prover(CREDENTIALS.key, calling=True)
        assert prover.meet(self.frame().raw)
        self.sock.sendall(frame(Kind.PROOF, prover.mine + prover.proof))
        assert prover.accepts(self.frame().raw)
        self.seals, self._parser.seals = prover.seals()
        self._parser.reads = True

    def enter(self, name: str = "worker 1") -> None:
        """Come in under that name, with rank 1."""
        self.prove()
        self.send(Kind.HELLO, {**HELLO, "name": name})
        assert self.frame().header.kind is Kind.WELCOME

    def __enter__(self) -> RawCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
