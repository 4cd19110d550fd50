"""Sessions that outlive their connection: each call is executed once, and the end of a process is noticed at once."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

from dure.core.node import Reply, TensorSpec
from dure.errors import PeerLost, Refused
from dure.runtime.wire import WireLimits
from dure.runtime.wire.connection import Broken

NUMEL = 300_000


@pytest.fixture
def tcp(world):
    """A caller and a host over TCP, both listening, as the processes of a run on several machines do."""
    world.unix = False
    world.limits = WireLimits(handshake_seconds=1.0, silent_seconds=1.5)
    server, host, port = world.server(limits=world.limits)
    caller_host = type(host)()
    caller = world.wire("worker 0", caller_host, limits=world.limits)
    caller.listen(unix=False)
    world.join(caller, server, port)
    return server, host, caller, caller_host


@pytest.mark.parametrize("end", ["caller", "host"])
def test_a_call_that_waits_for_its_answer_is_answered_over_the_next_connection(tcp, world, end):
    server, host, caller, caller_host = tcp
    host.specs["push"] = [TensorSpec("float32", NUMEL)]
    out, _ = world.call(caller, "push", [torch.ones(NUMEL)], into=[torch.zeros(1)])
    world.until(lambda: host.requests)
    sock = (
        caller._hosts["server 0"].connection.sock
        if end == "caller"
        else server._callers.open["worker 0"].connection.sock
    )
    sock.shutdown(socket.SHUT_RDWR)
    later, _ = world.call(caller)
    world.until(lambda: len(host.requests) == 2)
    (_, respond), (_, respond_later) = host.requests
    respond_later(Reply({"number": 2}))
    respond(Reply({"number": 1}, [torch.ones(1)]))
    world.until(lambda: out and later)
    assert [out[0].fields, later[0].fields] == [{"number": 1}, {"number": 2}]
    assert out[0].tensors[0].item() == 1.0
    assert len(host.requests) == 2
    assert host.losses == caller_host.losses == []


def test_an_answer_that_was_lost_is_sent_again_and_its_request_is_not_executed_again(tcp, world):
    server, host, caller, _ = tcp
    host.specs["pull"] = ()
    released = []
    out, _ = world.call(caller, "pull", into=[torch.zeros(NUMEL)])
    small, _ = world.call(caller)
    world.until(lambda: len(host.requests) == 2, server, caller)
    inbound = server._callers.open["worker 0"]
    inbound.connection.sock.shutdown(socket.SHUT_WR)  # what is sent from now on does not arrive
    host.requests[0][1](Reply({}, [torch.arange(NUMEL, dtype=torch.float32)], lambda: released.append("tensors")))
    host.requests[1][1](Reply({"small": True}))
    assert not out
    assert not small
    assert not released
    world.until(lambda: out and small)
    assert torch.equal(out[0].tensors[0], torch.arange(NUMEL, dtype=torch.float32))
    assert small[0].fields == {"small": True}
    assert len(host.requests) == 2
    world.until(lambda: released)
    world.call(caller)
    world.until(lambda: len(host.requests) == 3)
    assert len(inbound._kept._kept) == 0


def test_a_payload_that_was_interrupted_comes_again_whole(tcp, world):
    server, host, caller, _ = tcp
    numel = 8_000_000
    host.specs["push"] = [TensorSpec("float32", numel)]
    out, _ = world.call(caller, "push", [torch.ones(numel)])
    inbound = server._callers.open["worker 0"]
    world.until(lambda: inbound._lease is not None and inbound.connection.received_nbytes > 1 << 20)
    assert not host.requests
    caller._hosts["server 0"].connection.sock.shutdown(socket.SHUT_RDWR)
    world.until(lambda: host.requests)
    call, respond = host.requests[0]
    assert bool((call.tensors[0] == 1).all())
    respond(Reply())
    world.until(lambda: out)
    assert isinstance(out[0], Reply)
    assert server._shared.staging.held_nbytes == 0


def test_many_resets_lose_no_call_and_execute_none_twice(tcp, world):
    server, host, caller, _ = tcp
    executed = []
    host.specs["count"] = [TensorSpec("float32", 1000)]
    host.answer = lambda call, respond: (executed.append(call.fields["number"]), respond(Reply({}, call.tensors)))
    outs = []
    for number in range(400):
        outs.append(
            world.call(
                caller,
                "count",
                [torch.full((1000,), float(number))],
                into=[torch.zeros(1000)],
                fields={"number": number},
            )[0]
        )
        if number % 7 == 3:
            world.until(lambda: len(outs) - sum(map(len, outs)) < 5)
        if number % 20 == 10:
            sides = (caller._hosts["server 0"], server._callers.open["worker 0"])
            connection = sides[number // 20 % 2].connection
            if not connection.closed:
                connection.sock.shutdown((socket.SHUT_RDWR, socket.SHUT_WR, socket.SHUT_RD)[number // 20 % 3])
    world.until(lambda: all(outs), seconds=20.0)
    assert executed == list(range(400))
    assert all(bool((out[0].tensors[0] == number).all()) for number, out in enumerate(outs))
    assert host.losses == []
    assert len(server._callers.open["worker 0"]._kept._kept) < 30


def test_a_call_that_was_cancelled_while_there_was_no_connection_is_not_repeated(tcp, world):
    _, host, caller, _ = tcp
    out, pending = world.call(caller)
    world.until(lambda: host.requests)
    caller._hosts["server 0"].connection.end(Broken("reset by the test"))
    pending.cancel()
    later, unsent = world.call(caller)
    unsent.cancel()
    last, _ = world.call(caller)
    world.until(lambda: len(host.requests) == 2)
    host.requests[0][1](Reply({"cancelled": True}))
    host.requests[1][1](Reply({"last": True}))
    world.until(lambda: last)
    assert last[0].fields == {"last": True}
    assert out == later == []
    assert host.losses == []


def test_both_sides_give_a_connection_up_that_is_not_replaced_in_time(tcp, world):
    _, host, caller, caller_host = tcp
    out, _ = world.call(caller)
    world.until(lambda: host.requests)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        caller._hosts["server 0"]._address = silent.getsockname()
        began = time.monotonic()
        caller._hosts["server 0"].connection.sock.shutdown(socket.SHUT_RDWR)
        world.until(lambda: out and host.losses and caller_host.losses, seconds=10.0)
    assert time.monotonic() - began > 1.4
    assert isinstance(out[0], PeerLost)
    text = "the connection to {} was lost for 1.5 s (its connection closed)"
    assert str(out[0]) == f"service.ping: {text.format('server 0')}"
    assert [loss.reason for loss in host.losses] == [text.format("worker 0")]
    assert [loss.reason for loss in caller_host.losses] == [text.format("server 0")]
    host.requests[0][1](Reply())  # has no effect, and fails nothing


def test_a_caller_that_was_evicted_meanwhile_is_refused(tcp, world):
    server, host, caller, _ = tcp
    out, _ = world.call(caller)
    world.until(lambda: host.requests)
    caller._hosts["server 0"].connection.sock.shutdown(socket.SHUT_RDWR)
    world.until(lambda: server._callers.open["worker 0"].connection.closed, server)
    server.evict("worker 0", 0, "no progress")
    world.until(lambda: out)
    assert isinstance(out[0], Refused)
    assert "evicted" in str(out[0])
    assert len(host.losses) == 1


PROCESS = """
import sys; sys.path[:0] = sys.argv[1].split(":")
from dure.core.node import Reply
from dure.runtime.wire import Credentials, Identity, Request, Wire
class Host:
    admit = lambda self, caller: None
    expects = lambda self, service, method: ()
    request = lambda self, *rest: None
    lost = lambda self, loss: None
wire = Wire(Identity("job", sys.argv[2]), Host(), credentials=Credentials(bytes(range(32))))
print(wire.listen(unix=False), flush=True)
if sys.argv[3] != "0":
    wire.connect("server 0", "127.0.0.1", int(sys.argv[3]))
while True: wire.poll(1.0)
"""


def started(name, port=0):
    command = [sys.executable, "-c", PROCESS, ":".join(sys.path), name, str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


@pytest.mark.alone
def test_the_end_of_a_process_is_noticed_at_once_although_its_session_could_go_on(world):
    world.unix = False
    server, host, port = world.server()
    with started("worker 0", port) as caller, started("server 1") as called:
        here = world.wire("worker 1", type(host)())
        here.listen(unix=False)
        here.connect("server 1", "127.0.0.1", int(called.stdout.readline()))
        world.until(lambda: server.callers, seconds=20.0)
        out, _ = world.call(here, peer="server 1")
        for process in (caller, called):
            os.kill(process.pid, signal.SIGKILL)
        began = time.monotonic()
        world.until(lambda: out and host.losses)
        assert time.monotonic() - began < 1.0
        assert str(out[0]).startswith("server 1 is gone before service.ping was answered: ")
        assert [loss.peer for loss in host.losses] == ["worker 0"]


def test_a_caller_that_does_not_listen_is_lost_at_once(world):
    world.unix = False
    server, host, port = world.server()
    caller = world.wire("worker 0")
    world.join(caller, server, port)
    out, _ = world.call(caller)
    world.until(lambda: host.requests)
    caller._hosts["server 0"].connection.sock.shutdown(socket.SHUT_RDWR)
    world.until(lambda: out and host.losses)
    assert str(out[0]) == "server 0 is gone before service.ping was answered: its connection closed"
