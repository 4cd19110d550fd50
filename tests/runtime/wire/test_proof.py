"""The key of a run: who has it not is refused before anything is read, and hears nothing of the run."""

import contextlib
import json
import socket
import threading
import time

import pytest
from runtime.wire.conftest import KEY
from support.raw_caller import HELLO, RawCaller, frame
from support.wording import raising

from dure.errors import Refused, RemoteError
from dure.runtime.wire.frame import Kind, encode_meta
from dure.runtime.wire.seals import REFUSAL, UNPROVEN_NBYTES, Prover

OTHER = bytes(32)
REQUEST = {"service": "service", "method": "ping", "fields": {}, "tensors": []}
NAMES = ("job", "server", "worker", "service", "ping", "digits")


@pytest.fixture(autouse=True, params=["unix", "tcp"])
def transport(request, world):
    world.unix = request.param == "unix"


def raw_caller(world, server, port):
    return RawCaller(port, lambda condition: world.until(condition, server))


def answers(world, server, sock):
    """All bytes that the host sends until it closes, and after the sender has."""
    sock.settimeout(0.01)
    said = bytearray()

    def over():
        with contextlib.suppress(TimeoutError):
            piece = sock.recv(65536)
            said.extend(piece)
            return not piece
        return False

    world.until(over, server)
    return bytes(said)


def test_another_key_is_refused_by_the_host_and_nothing_is_told(world):
    server, host, port = world.server(job="digits-1234", about={"secret": 1})
    with raising(Refused, "server 0"):
        world.join(world.wire("worker 1", job="digits-1234", key=OTHER), server, port)
    assert not server.callers
    assert not host.losses
    assert (server.refused, server.damaged) == (1, 0)
    assert world.join(world.wire("worker 2", job="digits-1234"), server, port).name == "server 0"


@pytest.mark.parametrize(
    "data",
    [
        frame(Kind.HELLO, HELLO),
        frame(Kind.HELLO, HELLO) + frame(Kind.REQUEST, REQUEST),
        frame(Kind.REQUEST, REQUEST),
        frame(Kind.PROOF, bytes(UNPROVEN_NBYTES)),
        frame(Kind.PROOF, bytes(3)),
        frame(Kind.PROOF, b""),
        b"GET / HTTP/1.1\r\n\r\n".ljust(200),
    ],
    ids=["hello", "hello and call", "call", "wrong proof", "short proof", "no proof", "http"],
)
def test_one_without_a_key_is_refused_unread_and_hears_one_sentence(world, data, monkeypatch):
    server, host, port = world.server()
    monkeypatch.setattr("dure.runtime.wire.frame.decode_meta", lambda raw: pytest.fail(f"it was read: {raw!r}"))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(data)
        said = answers(world, server, sock)
    assert REFUSAL in said
    assert not any(name in REFUSAL.decode() for name in NAMES)
    hidden = said.replace(REFUSAL, b"").lower()
    assert not any(name.encode() in hidden for name in NAMES), said
    assert server.damaged + server.refused == 1
    assert not server.callers
    assert not host.losses
    assert not host.requests


def test_a_host_without_the_key_hears_no_names_and_is_not_believed(world):
    """Somebody else listens at the address: what the caller says there is random bytes."""
    caller, heard, outcome = world.wire("worker 0"), bytearray(), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            sock, _ = listener.accept()
            prover = Prover(OTHER, calling=False)
            with sock:
                sock.settimeout(5.0)
                sock.sendall(frame(Kind.CHALLENGE, prover.mine))
                heard.extend(sock.recv(65536))
                sock.sendall(frame(Kind.PROOF, prover.proof) + frame(Kind.WELCOME, {**HELLO, "name": "server 0"}))
                with contextlib.suppress(ConnectionError):
                    heard.extend(sock.recv(65536))

        thread = threading.Thread(target=pretend)
        thread.start()
        try:
            caller.connect("server 0", "127.0.0.1", listener.getsockname()[1], 5.0)
        except RemoteError as error:
            outcome.append(error)
        for _ in range(100):
            caller.poll(0.001)
        caller.close()
        thread.join()
    assert "does not have the key of this run" in str(outcome[0])
    assert heard
    assert not any(name.encode() in bytes(heard).replace(REFUSAL, b"") for name in NAMES)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", [Kind.WELCOME, Kind.REPLY, Kind.REFUSAL])
def test_a_host_that_proves_nothing_is_not_read(world, kind):
    caller = world.wire("worker 0")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(frame(kind, {"error": "x", "message": "digits"}))
                time.sleep(0.2)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(RemoteError) as caught:
            caller.connect("server 0", "127.0.0.1", listener.getsockname()[1], 5.0)
        thread.join()
    assert "digits" not in str(caught.value)


def test_a_proof_counts_for_its_own_connection_only(world):
    server, _, port = world.server()
    with raw_caller(world, server, port) as one, raw_caller(world, server, port) as other:
        prover = Prover(KEY, calling=True)
        prover.meet(one.frame().raw)
        other.frame()
        other.sock.sendall(frame(Kind.PROOF, prover.mine + prover.proof))
        world.until(lambda: server.refused == 1, server)
        one.sock.sendall(frame(Kind.PROOF, prover.mine + prover.proof))
        assert prover.accepts(one.frame().raw)


def test_a_host_s_proof_is_not_taken_for_a_caller_s(world):
    server, _, port = world.server()
    with raw_caller(world, server, port) as raw:
        challenge = raw.frame().raw
        reflecting = Prover(KEY, calling=True)
        reflecting.meet(challenge)
        host = Prover(KEY, calling=False)
        host.mine = challenge
        host.meet(reflecting.mine)
        raw.sock.sendall(frame(Kind.PROOF, reflecting.mine + host.proof))
        world.until(lambda: server.refused == 1, server)
        assert server.refused == 1


def relayed(world, server, host, port, change=lambda data: data):
    """What a caller says through a man in the middle, who may change it, until its call has arrived or is refused."""
    caller, recorded = world.wire("worker 0"), []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay():
            inner, _ = listener.accept()
            outer = socket.create_connection(("127.0.0.1", port))
            inner.settimeout(0.02)
            outer.settimeout(0.02)
            with inner, outer, contextlib.suppress(ConnectionError):
                until = time.monotonic() + 5
                while time.monotonic() < until and not host.requests and not server.damaged:
                    for a, b in ((inner, outer), (outer, inner)):
                        with contextlib.suppress(TimeoutError):
                            data = a.recv(65536)
                            if a is inner:
                                data = change(data)
                                recorded.append(data)
                            b.sendall(data)

        thread = threading.Thread(target=relay)
        thread.start()
        world.join(caller, server, listener.getsockname()[1])
        world.call(caller, fields={"amount": 1})
        world.until(lambda: host.requests or server.damaged)
        thread.join()
    return recorded


def test_a_recorded_connection_is_worth_nothing(world):
    server, host, port = world.server()
    recorded = relayed(world, server, host, port)
    assert len(recorded) >= 3
    world.until(lambda: host.losses)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"".join(recorded))
        world.until(lambda: server.refused == 1, server)
    assert len(host.requests) == 1
    assert not server.callers


def test_a_call_that_is_changed_on_its_way_is_refused_though_its_checksums_are_right(world):
    server, host, port = world.server()

    def change(data):
        if b'"amount":1' not in data:
            return data
        meta = data[60:-16].replace(b'"amount":1', b'"amount":9')
        return bytes(frame(Kind.REQUEST, json.loads(meta), rank=0, request=1)) + data[-16:]

    assert frame(Kind.REQUEST, {"amount": 1})[60:] == encode_meta({"amount": 1})
    relayed(world, server, host, port, change)
    assert server.damaged == 1
    assert not host.requests


@pytest.mark.parametrize(("ours", "theirs"), [("mac", "checksum"), ("checksum", "mac"), ("checksum", "checksum")])
def test_payloads_have_a_checksum_only_where_both_ends_say_so(world, ours, theirs):
    server, _, port = world.server(integrity=theirs)
    caller = world.wire("worker 0", integrity=ours)
    world.join(caller, server, port)
    both = caller._hosts["server 0"].connection, server._callers.open["worker 0"].connection
    expected = world.unix or ours == theirs
    for connection in both:
        assert [hasattr(seals._digest(), "intdigest") for seals in (connection.seals, connection.parser.seals)] == [
            expected
        ] * 2
