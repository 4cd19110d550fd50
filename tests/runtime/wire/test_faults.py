"""What goes wrong on a network, done to a host that must not care."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import xxhash
from support.raw_caller import HELLO, RawCaller, frame

from dure.core.node import Reply, TensorSpec
from dure.runtime.wire import WireLimits
from dure.runtime.wire.frame import Header, Kind, encode_meta, job_code, pack_header

NEVER = 1 << 60  # bytes: nothing is lent, everything travels
NUMEL = 10_000_000  # more than both sockets' buffers hold


@contextlib.contextmanager
def callers(port, numel=NUMEL, lent_nbytes=NEVER):
    """A process that forks callers; it and they are gone in the end."""
    command = [sys.executable, str(Path(__file__).parent / "callers.py"), *map(str, (port, numel, lent_nbytes))]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    os.set_blocking(process.stdout.fileno(), False)
    with process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def start(world, process, line):
    """A caller, connected; its process id."""
    process.stdin.write(f"{line}\n".encode())
    process.stdin.flush()
    answer = bytearray()

    def said():
        with contextlib.suppress(BlockingIOError):
            answer.extend(os.read(process.stdout.fileno(), 100))
        return answer.endswith(b"\n")

    world.until(said, seconds=30)
    return int(answer)


def push(values, seals):
    payload = bytes(torch.full((values,), 1.0).numpy().data)
    meta = {"service": "service", "method": "push", "fields": {}, "tensors": [["float32", values]]}
    return frame(Kind.REQUEST, meta, payload, request=1, seals=seals)


def resident():
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("unix", "lives"), [(True, 20), (False, 10)])
@pytest.mark.alone
def test_callers_killed_in_the_middle_of_a_push_leave_nothing_behind(world, unix, lives):
    world.unix = unix
    server, host, port = world.server()
    bystander = world.wire("worker 0")
    world.join(bystander, server, port)
    host.specs["push"] = [TensorSpec("float32", NUMEL)]
    delivered, chance, interrupted = [], random.Random(3), 0

    def check(call, respond):
        if call.method == "push":
            life = call.fields["life"]
            delivered.append(life)
            assert call.tensors[0].min().item() == call.tensors[0].max().item() == life
        respond(Reply())

    host.answer = check
    with callers(port) as process:
        for life in range(1, lives + 1):
            pid = start(world, process, f"worker 1 {life}")
            world.until(lambda life=life: life in delivered, server)
            parser = server._callers.open["worker 1"].connection.parser
            left = int(4 * NUMEL * chance.uniform(0.65, 1.0))
            world.until(lambda left=left, parser=parser: 1 < parser.awaited_nbytes <= left, server)
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            world.until(lambda life=life: len(host.losses) == life, server)
            assert time.monotonic() - killed < 1.0
            loss = host.losses[-1]
            assert (loss.peer, loss.incarnation, loss.finished) == ("worker 1", life, False)
            interrupted += "middle" in loss.reason
            assert server._shared.staging.held_nbytes == 0
            assert isinstance(world.ask(bystander), Reply)
    assert interrupted == lives, "every kill must fall into a push"
    assert [identity.name for identity in server.callers] == ["worker 0"]


@pytest.mark.alone
def test_a_host_that_dies_is_missed_within_a_second(world):
    script = (
        "import sys; sys.path[:0] = sys.argv[1].split(':')\n"
        "from dure.runtime.wire import Credentials, Identity, Wire\n"
        "class Host:\n"
        "    admit = lambda self, caller: None\n"
        "    expects = lambda self, service, method: ()\n"
        "    request = lambda self, *rest: None\n"
        "    lost = lambda self, loss: None\n"
        "wire = Wire(Identity('job', 'server 0'), Host(), credentials=Credentials(bytes(range(32))))\n"
        "print(wire.listen(), flush=True)\n"
        "while True: wire.poll(1.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, ":".join(sys.path)], stdout=subprocess.PIPE) as process:
        caller = world.wire("worker 0")
        caller.connect("server 0", "127.0.0.1", int(process.stdout.readline()))
        dead, _ = world.call(caller)
        os.kill(process.pid, signal.SIGSTOP)
        frozen, _ = world.call(caller, timeout=0.3)
        world.until(lambda: frozen)
        assert "within 0.3 s" in str(frozen[0])
        began = time.monotonic()
        process.kill()
        world.until(lambda: dead)
        assert time.monotonic() - began < 1.0
        assert "server 0 is gone before service.ping was answered" in str(dead[0])


def raw_caller(world, server, port):
    """A plain socket, welcomed as worker 1."""
    raw = RawCaller(port, lambda condition: world.until(condition, server))
    raw.enter()
    return raw


def test_flipped_bits_on_the_wire_are_refused_and_change_nothing(world):
    server, host, port = world.server()
    host.specs["push"] = [TensorSpec("float32", 50)]
    chance = random.Random(5)
    for trial in range(200):
        with raw_caller(world, server, port) as raw:
            bad = push(50, raw.seals)
            bit = chance.randrange(len(bad) * 8)
            bad[bit // 8] ^= 1 << bit % 8
            raw.sock.sendall(bad)
            world.until(lambda trial=trial: len(host.losses) == trial + 1, server)
    assert not host.requests
    assert server.damaged + server.refused == 200
    with raw_caller(world, server, port) as raw:
        raw.sock.sendall(push(50, raw.seals))
        world.until(lambda: host.requests, server)


@pytest.mark.parametrize("payload_nbytes", [1 << 40, (1 << 64) - 1, 199, 201])
def test_a_lying_length_is_refused_without_memory(world, payload_nbytes):
    server, host, port = world.server()
    host.specs["push"] = [TensorSpec("float32", 50)]
    meta = encode_meta({"service": "service", "method": "push", "fields": {}, "tensors": [["float32", 50]]})
    header = Header(Kind.REQUEST, job_code("job"), 1, 0, 1, len(meta), payload_nbytes, xxhash.xxh3_64_intdigest(meta))
    before = resident()
    with raw_caller(world, server, port) as raw:
        tag = raw.seals.tag(pack_header(header), meta)
        raw.sock.sendall(pack_header(header) + meta + tag + bytes(1000))
        world.until(lambda: host.losses, server)
    assert "weigh 200 bytes" in host.losses[0].reason
    assert resident() - before < 10 << 20
    assert not host.requests


@pytest.mark.parametrize(
    ("kind", "meta", "rank"),
    [
        (Kind.REPLY, {"fields": {}, "tensors": []}, 1),
        (Kind.HELLO, {}, 1),
        (Kind.REQUEST, {"service": 3, "method": "push", "fields": {}, "tensors": []}, 1),
        (Kind.REQUEST, {"service": "service", "method": "ping", "fields": [], "tensors": []}, 1),
        (Kind.CANCEL, {}, 2),
        (Kind.PROOF, {}, 1),
    ],
)
def test_frames_that_make_no_sense_end_the_connection(world, kind, meta, rank):
    server, host, port = world.server()
    with raw_caller(world, server, port) as raw:
        raw.send(kind, meta, rank=rank)
        world.until(lambda: host.losses, server)
    assert server.damaged == 1
    assert not host.requests


@pytest.mark.parametrize(
    ("kind", "meta"),
    [
        (Kind.REQUEST, {"service": "service", "method": "ping", "fields": {}, "tensors": []}),
        (Kind.HELLO, {}),
        (Kind.HELLO, HELLO | {"name": 3}),
        (Kind.HELLO, HELLO | {"rank": -1}),
        (Kind.HELLO, HELLO | {"about": {"a": "x" * 20_000}}),
    ],
)
def test_nobody_comes_in_without_an_introduction(world, kind, meta):
    server, host, port = world.server()
    with RawCaller(port, lambda condition: world.until(condition, server)) as raw:
        raw.prove()
        raw.send(kind, meta)
        world.until(lambda: server.damaged == 1, server)
    assert not server.callers
    assert not host.losses


def test_garbage_and_half_open_connections_cost_nothing(world):
    server, host, port = world.server(limits=WireLimits(handshake_seconds=0.5, handshakes=100))
    host.answer = lambda call, respond: respond(Reply())
    caller, chance = world.wire("worker 0"), random.Random(7)
    world.join(caller, server, port)
    descriptors = len(os.listdir("/proc/self/fd"))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
    for number in range(300):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(chance.randbytes(chance.choice([10, 100, 10_000])))
            if number % 3 == 0:
                assert isinstance(world.ask(caller), Reply)
    assert len(server._callers.greeting) <= 100
    world.until(lambda: not server._callers.greeting, seconds=3)
    for sock in silent:
        sock.close()
    world.until(lambda: len(server._shared.connections) == 1, seconds=3)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert [identity.name for identity in server.callers] == ["worker 0"]
    assert isinstance(world.ask(caller), Reply)
    assert not host.losses


# ---- callers that announce a payload and stand still


QUARTER = 1 << 16
"""Values of a payload of which four fill the budget."""


def stalled_callers(world, server, port, count, *, sent):
    """Callers that each announce a payload of QUARTER values and send so many bytes of it; and the bytes left."""
    found = []
    for number in range(count):
        caller = RawCaller(port, lambda condition: world.until(condition, server))
        caller.enter(f"stalled {number}")
        whole = push(QUARTER, caller.seals)
        caller.sock.sendall(whole[: len(whole) - 4 * QUARTER + sent])
        found.append((caller, whole[len(whole) - 4 * QUARTER + sent :]))
    return found


def test_callers_that_stand_still_keep_no_memory_from_others(world):
    limits = WireLimits(handshake_seconds=1.0, staging_nbytes=1 << 20, stall_seconds=0.5)
    server, host, port = world.server(limits=limits)
    host.specs["push"] = [TensorSpec("float32", QUARTER)]
    host.answer = lambda call, respond: respond(Reply())
    caller = world.wire("worker 0")
    world.join(caller, server, port)
    with contextlib.ExitStack() as stack:
        for each, _ in stalled_callers(world, server, port, 8, sent=1000):
            stack.enter_context(each)
        for _ in range(3):
            out, _ = world.call(caller, "push", [torch.ones(QUARTER)])
            world.until(lambda: out, caller, server, seconds=20.0)  # noqa: B023  (it is over before the next)
            assert isinstance(out[0], Reply)
        world.until(lambda: len(host.losses) == 8, server, seconds=20.0)
    assert {loss.peer for loss in host.losses} == {f"stalled {number}" for number in range(8)}
    assert "stalled while others waited for memory" in host.losses[0].reason


def test_a_caller_that_stands_still_where_nobody_waits_may_go_on(world):
    limits = WireLimits(handshake_seconds=1.0, staging_nbytes=1 << 20, stall_seconds=0.2)
    server, host, port = world.server(limits=limits)
    host.specs["push"] = [TensorSpec("float32", QUARTER)]
    ((caller, rest),) = stalled_callers(world, server, port, 1, sent=1000)
    with caller:
        ended = time.monotonic() + 1.0
        while time.monotonic() < ended:
            server.poll(0.01)
        caller.sock.setblocking(True)
        sender = threading.Thread(target=caller.sock.sendall, args=(rest,))
        sender.start()
        world.until(lambda: host.requests or host.losses, server)
        sender.join()
    assert host.requests[0][0].tensors[0].tolist() == [1.0] * QUARTER
