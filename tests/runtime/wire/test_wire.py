"""Calls between wires over real sockets."""

import threading
import time

import pytest
import torch
from support.wording import raising

from dure.core.node import Reply, TensorSpec
from dure.errors import CallTimeout, PeerLost, Refused, RemoteError, UsageError
from dure.runtime.wire import Identity, Wire, WireLimits

DTYPES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "int8",
    "uint8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "float8_e4m3fn",
]


@pytest.fixture(autouse=True, params=["memory", "unix", "tcp"])
def transport(request, world):
    """The same over TCP, over a Unix socket, and with all payloads of requests in memory that both sides map."""
    world.unix = request.param != "tcp"
    if request.param == "memory":
        world.lent_nbytes = 1
    return request.param


streams = pytest.mark.parametrize("transport", ["unix", "tcp"], indirect=True)
"""For what is about bytes on their way, and the memory that they arrive in."""


def echo(call, respond):
    respond(Reply(call.fields, [tensor.clone() for tensor in call.tensors]))


def values(numel, dtype):
    generator = torch.Generator().manual_seed(numel)
    return torch.randint(0, 2, (numel,), generator=generator).to(getattr(torch, dtype))


@pytest.mark.parametrize("integrity", ["mac", "checksum"])
@pytest.mark.parametrize("numel", [0, 1, 1000, (1 << 20) - 1, (1 << 20) + 1])
def test_tensors_there_and_back(world, numel, integrity, spec):
    _, host, caller = world.pair(integrity=integrity)
    host.answer = echo
    for dtype in DTYPES if numel <= 1000 else ["float32", "bool"]:
        sent = values(numel, dtype)
        into = torch.full_like(sent, 1)
        host.specs["echo"] = [spec(sent)]
        reply = world.ask(caller, "echo", tensors=[sent], into=[into], fields={"n": [1, None, "é"], "x": 0.1})
        assert isinstance(reply, Reply), reply
        assert reply.fields == {"n": [1, None, "é"], "x": 0.1}
        assert torch.equal(into, sent)


def test_many_tensors_of_many_kinds_in_one_call(world, spec):
    _, host, caller = world.pair()
    host.answer = echo
    sent = [values(numel, dtype) for numel, dtype in [(3, "bool"), (0, "int8"), (70_000, "float64"), (5, "bfloat16")]]
    host.specs["echo"] = [spec(tensor) for tensor in sent]
    into = [torch.zeros_like(tensor) for tensor in sent]
    assert isinstance(world.ask(caller, "echo", tensors=sent, into=into), Reply)
    assert all(torch.equal(a, b) for a, b in zip(sent, into, strict=True))


def test_requests_arrive_in_order_and_replies_may_come_in_any(world):
    _, host, caller = world.pair()
    outs = [world.call(caller, fields={"n": n})[0] for n in range(50)]
    world.until(lambda: len(host.requests) == 50)
    assert [call.fields["n"] for call, _ in host.requests] == list(range(50))
    for call, respond in reversed(host.requests):
        assert not outs[call.fields["n"]]
        respond(Reply({"n": call.fields["n"]}))
        world.until(lambda n=call.fields["n"]: outs[n])
    assert [out[0].fields["n"] for out in outs] == list(range(50))


def test_an_answer_is_given_once_and_released_once_it_has_left(world):
    _, host, caller = world.pair()
    released = []
    into = torch.zeros(3_000_000)
    out, _ = world.call(caller, into=[into])
    world.until(lambda: host.requests)
    respond = host.requests[0][1]
    respond(Reply({}, [torch.ones(3_000_000)], lambda: released.append(1)))
    assert not released
    world.until(lambda: out and released)
    assert released == [1]
    assert into.min().item() == 1.0
    with raising(RuntimeError, "answer"):
        respond(Reply())


def test_an_answer_that_cannot_be_sent_may_be_replaced(world):
    _, host, caller = world.pair()
    out, _ = world.call(caller)
    world.until(lambda: host.requests)
    with raising(TypeError, "plain"):
        host.requests[0][1](Reply({"a": object()}))
    host.requests[0][1](Refused("cannot say it"))
    world.until(lambda: out)
    assert isinstance(out[0], Refused)
    assert "server 0, service.ping: cannot say it" in str(out[0])


@pytest.mark.parametrize("kind", [Refused, *Refused.__subclasses__()])
def test_a_refusal_reaches_the_caller_as_what_the_host_raised(world, kind):
    _, host, caller = world.pair()
    host.answer = lambda call, respond: respond(kind("not this one"))
    refusal = world.ask(caller)
    assert type(refusal) is kind
    assert "server 0, service.ping: not this one" in str(refusal)


def test_what_is_not_served_is_refused_and_the_connection_stays(world):
    server, host, caller = world.pair()
    host.answer = echo
    host.specs["push"] = [TensorSpec("float32", 4)]
    unknown = world.ask(caller, "pull", tensors=[torch.zeros(16_000)])
    assert isinstance(unknown, Refused)
    wrong = world.ask(caller, "push", tensors=[torch.zeros(5, dtype=torch.float64)])
    assert isinstance(wrong, Refused)
    assert "carries float32[4], worker 0 announced float64[5]" in str(wrong)
    missing = world.ask(caller, "push")
    assert "announced no tensor" in str(missing)
    assert isinstance(world.ask(caller, "push", tensors=[torch.zeros(4)], into=[torch.zeros(4)]), Reply)
    assert server.refused == 3
    assert not host.losses


@streams
@pytest.mark.parametrize("upwards", [True, False], ids=["requests", "replies"])
def test_bulk_with_several_hosts_moves_in_turn_a_piece_at_a_time(world, upwards, spec):
    """Whoever calls several shards has all of them move at once: none waits until another is through."""
    names = ["server 0", "server 1", "server 2"]
    bulk, landed, servers = torch.ones(4 << 20), [torch.zeros(4 << 20) for _ in names], []
    caller = world.wire("worker 0")
    for name in names:
        server, host, port = world.server(name)
        world.join(caller, server, port, name)
        host.specs["bulk"] = [spec(bulk)] if upwards else []
        host.answer = lambda call, respond: respond(Reply({}, [] if call.tensors else [bulk]))
        servers.append(server)
    bulks = [([bulk], []) if upwards else ([], [into]) for into in landed]
    outs = [world.call(caller, "bulk", *each, peer=name)[0] for name, each in zip(names, bulks, strict=True)]
    all_under_way = False
    while not all(outs):
        for wire in world.wires:
            wire.poll(0.0)
        begun = [server.staging_peak_nbytes for server in servers] if upwards else [bool(into[0]) for into in landed]
        all_under_way |= all(begun) and not any(outs)
    assert all_under_way
    assert all(isinstance(out[0], Reply) for out in outs)
    assert upwards or all(bool((into == 1).all()) for into in landed)


@streams
def test_a_large_payload_that_nobody_expects_costs_the_connection_and_the_call_says_why(world):
    _, host, caller = world.pair()
    other, _ = world.call(caller)
    world.until(lambda: host.requests)
    wrong, _ = world.call(caller, "pull", tensors=[torch.zeros(3_000_000)])
    world.until(lambda: wrong and other and host.losses)
    assert isinstance(wrong[0], Refused)
    assert "no service.pull here" in str(wrong[0])
    assert isinstance(other[0], RemoteError)
    assert "12000000 bytes" in host.losses[0].reason
    assert "not connected" not in str(world.ask(caller))


@pytest.mark.parametrize("answered", [[], [torch.zeros(3)], [torch.zeros(4, dtype=torch.int32)], [torch.zeros(2)] * 2])
def test_a_reply_must_fit_what_it_is_received_into(world, answered):
    _, host, caller = world.pair()
    host.answer = lambda call, respond: respond(Reply({}, answered))
    into = torch.full((4,), 7.0)
    error = world.ask(caller, into=[into])
    assert isinstance(error, RemoteError)
    assert "`into` takes float32[4]" in str(error)
    assert into.tolist() == [7.0] * 4
    host.answer = echo
    assert isinstance(world.ask(caller), Reply)


@pytest.mark.alone
def test_no_answer_in_time(world):
    _, host, caller = world.pair()
    began = time.monotonic()
    out, _ = world.call(caller, timeout=0.2)
    world.until(lambda: out)
    assert 0.2 <= time.monotonic() - began < 0.6
    assert isinstance(out[0], CallTimeout)
    assert "server 0 did not answer service.ping within 0.2 s" in str(out[0])
    host.requests[0][1](Reply())
    host.answer = echo
    assert isinstance(world.ask(caller), Reply), "a late reply must not disturb the next"
    assert len(out) == 1


@streams
def test_cancelling_a_push_in_the_middle_delivers_nothing_and_frees_its_tensor(world):
    _, host, caller = world.pair()
    host.specs["push"] = [TensorSpec("float32", 8_000_000)]
    gradient = torch.ones(8_000_000)
    out, call = world.call(caller, "push", tensors=[gradient])
    caller.poll()
    assert call.outgoing.started
    assert call.outgoing.lent
    call.cancel()
    gradient.fill_(2.0)
    again, _ = world.call(caller, "push", tensors=[gradient], fields={"again": 1})
    world.until(lambda: host.requests, seconds=10)
    (arrived, respond) = host.requests[0]
    assert arrived.fields == {"again": 1}
    assert arrived.tensors[0].min().item() == 2.0
    respond(Reply())
    world.until(lambda: again)
    assert not out


@streams
def test_cancelling_what_has_not_begun_sends_nothing(world):
    _, host, caller = world.pair()
    host.specs["push"] = [TensorSpec("float32", 8_000_000)]
    gradient = torch.ones(8_000_000)
    _, first = world.call(caller, "push", tensors=[gradient])
    _, second = world.call(caller, fields={"n": 2})
    _, third = world.call(caller, fields={"n": 3})
    second.cancel()
    second.cancel()
    world.until(lambda: len(host.requests) == 2, seconds=10)
    assert [call.fields for call, _ in host.requests] == [{}, {"n": 3}]
    assert not first.done
    assert not third.done


def test_cancelling_a_pull_in_the_middle_leaves_its_tensor_alone(world):
    _, host, caller = world.pair()
    released = []
    into = torch.zeros(8_000_000)
    out, call = world.call(caller, into=[into])
    world.until(lambda: host.requests)
    host.requests[0][1](Reply({}, [torch.ones(8_000_000)], lambda: released.append(1)))
    world.until(lambda: into[0].item() == 1.0)
    call.cancel()
    into.zero_()
    host.answer = echo
    assert isinstance(world.ask(caller), Reply)
    assert into.sum().item() == 0.0
    assert released == [1]
    assert not out


def test_a_cancelled_deferred_reply_is_not_sent(world):
    server, host, caller = world.pair()
    out, call = world.call(caller, into=[torch.zeros(1000)])
    world.until(lambda: host.requests)
    call.cancel()
    host.answer = echo
    world.ask(caller)
    released = []
    before = server.traffic["worker 0"].payload_nbytes_sent
    host.requests[0][1](Reply({}, [torch.ones(1000)], lambda: released.append(1)))
    assert isinstance(world.ask(caller), Reply)
    assert server.traffic["worker 0"].payload_nbytes_sent == before
    assert released == [1]
    assert not out


def test_what_is_wrong_with_a_request_is_said_at_once(world):
    _, _, caller = world.pair()
    with raising(ValueError, "contiguous"):
        world.call(caller, tensors=[torch.zeros(3, 3).t()])
    with raising(ValueError, "contiguous"):
        world.call(caller, into=[torch.zeros(3, 3).t()])
    with raising(TypeError, "plain"):
        world.call(caller, fields={"a": torch.zeros(1)})
    assert not caller.busy


def test_calling_somebody_unknown_fails_later_and_names_them(world):
    caller = world.wire("worker 0")
    out, _ = world.call(caller, peer="server 7")
    assert not out
    world.until(lambda: out)
    assert isinstance(out[0], PeerLost)
    assert "worker 0 is not connected to server 7" in str(out[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"job": "other"}, ["job 'other'", "job 'job'"]),
        ({"about": {"world_size": 3}}, ["3 workers", "2 workers"]),
    ],
)
@pytest.mark.alone
def test_whoever_does_not_fit_is_refused_naming_both_sides(world, options, words):
    server, host, port = world.server()
    host.reason = lambda caller: (
        f"you count {caller.about['world_size']} workers, I 2 workers." if "world_size" in caller.about else None
    )
    began = time.monotonic()
    with pytest.raises(Refused) as caught:
        world.join(world.wire("worker 0", **options), server, port)
    assert time.monotonic() - began < 1.0
    assert all(word in str(caught.value) for word in words), caught.value
    assert not server.callers
    assert not host.losses


def test_the_wrong_host_at_the_right_address(world):
    server, _, port = world.server()
    with raising(Refused, "server 1"):
        world.join(world.wire("worker 0"), server, port, name="server 1")


def test_nobody_there(world):
    server, _, port = world.server()
    server.close()
    with raising(PeerLost, "server 0"):
        world.wire("worker 0").connect("server 0", "127.0.0.1", port, 1.0)


def test_a_host_that_says_nothing(world):
    silent = world.wire("server 0").listen()
    with raising(CallTimeout, "0.2"):
        world.wire("worker 0").connect("server 0", "127.0.0.1", silent, 0.2)


def test_listening_everywhere_must_be_meant(world):
    wire = world.wire("server 0")
    for address in ("0.0.0.0", "", "::"):
        with raising(UsageError, "interface"):
            wire.listen(address)
    assert wire.listen("0.0.0.0", everywhere=True) > 0


def test_an_evicted_incarnation_delivers_nothing_more_and_comes_back_only_as_the_next(world):
    server, host, port = world.server()
    old = world.wire("worker 0", incarnation=1)
    world.join(old, server, port)
    out, _ = world.call(old)
    time.sleep(0.05)
    server._reactor.turn(0.1)  # the request is here, verified, and not yet handed over
    server.evict("worker 0", 1, "no progress for 5 s.")
    world.until(lambda: out)
    assert isinstance(out[0], RemoteError)
    assert "evicted: no progress for 5 s." in str(out[0])
    assert not host.requests
    with raising(Refused, "incarnation 1,"):
        world.join(world.wire("worker 0", incarnation=1), server, port)
    world.join(world.wire("worker 0", incarnation=2), server, port)
    assert [identity.incarnation for identity in server.callers] == [2]


def test_a_later_connection_takes_the_place_of_an_earlier_one(world):
    server, host, port = world.server()
    host.answer = echo
    first, second = world.wire("worker 0", incarnation=3), world.wire("worker 0", incarnation=3)
    world.join(first, server, port)
    world.join(second, server, port)
    world.until(lambda: host.losses)
    assert not host.losses[0].finished
    assert isinstance(world.ask(second), Reply)
    assert isinstance(world.ask(first), RemoteError)
    with raising(Refused, "server 0"):
        world.join(world.wire("worker 0", incarnation=2), server, port)


def test_finished_is_not_lost(world):
    _, host, caller = world.pair()
    out, _ = world.call(caller, fields={"last": 1})
    thread = threading.Thread(target=caller.close)
    thread.start()
    world.until(lambda: host.losses, world.wires[0])
    thread.join()
    assert host.losses[0].finished
    assert host.losses[0].peer == "worker 0"
    assert host.requests[0][0].fields == {"last": 1}, "what was sent before the goodbye counts"
    assert isinstance(out[0], PeerLost)


def test_a_host_that_finishes_fails_the_calls_that_wait(world):
    server, _, caller = world.pair()
    out, _ = world.call(caller)
    thread = threading.Thread(target=server.close)
    thread.start()
    world.until(lambda: out, caller)
    thread.join()
    assert isinstance(out[0], PeerLost)
    assert "server 0 is gone before service.ping was answered: it has finished" in str(out[0])


def test_all_is_closed_though_the_owner_raises_at_a_loss(world):
    server, host, caller = world.pair()

    def raises(loss):
        raise ConnectionError(f"{loss.peer} was needed")

    host.lost = raises
    sockets = [connection.sock for connection in server._shared.connections]
    caller.close(0.0)
    with raising(ConnectionError, "worker 0"):
        server.close()
    assert sockets
    assert all(sock.fileno() < 0 for sock in sockets)
    assert server._reactor._woken.fileno() < 0


def test_traffic_counts_every_byte(world):
    server, host, caller = world.pair()
    host.answer = echo
    host.specs["echo"] = [TensorSpec("float32", 100_000)]
    before = caller.traffic["server 0"].payload_nbytes_sent, caller.traffic["server 0"].messages_sent
    assert before == (0, 2), "PROOF and HELLO"
    for _ in range(3):
        world.ask(caller, "echo", tensors=[torch.zeros(100_000)], into=[torch.zeros(100_000)])
    up, down = caller.traffic["server 0"], server.traffic["worker 0"]
    assert (up.messages_sent, up.payload_nbytes_sent) == (5, 1_200_000)
    assert (down.messages_received, down.payload_nbytes_received) == (5, 1_200_000)
    assert (down.messages_sent, up.payload_nbytes_received) == (6, 1_200_000)
    assert up.overhead_nbytes_sent == down.overhead_nbytes_received
    assert down.overhead_nbytes_sent == up.overhead_nbytes_received


def test_a_payload_may_be_shorter_where_the_service_says_so(world):
    _, host, caller = world.pair()
    host.answer = echo
    host.specs["echo"] = [TensorSpec("uint8", 300_000, at_most=True)]
    for numel in (0, 1, 5_000, 300_000):
        sent, into = torch.arange(numel).to(torch.uint8), torch.zeros(300_000, dtype=torch.uint8)
        out, _ = world.call(caller, "echo", tensors=[sent], into=[into], at_most=True)
        world.until(lambda out=out: out)
        assert isinstance(out[0], Reply)
        assert torch.equal(into[:numel], sent)
        assert not into[numel:].any()
    out, _ = world.call(caller, "echo", tensors=[torch.zeros(300_001, dtype=torch.uint8)])
    world.until(lambda: out)
    assert "carries uint8[<= 300000], worker 0 announced uint8[300001]" in str(out[0])


def test_a_reply_longer_than_its_place_is_refused(world):
    _, host, caller = world.pair()
    host.answer = echo
    host.specs["echo"] = [TensorSpec("uint8", 90, at_most=True)]
    sent, into = torch.ones(50, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    for at_most in (True, False):
        out, _ = world.call(caller, "echo", tensors=[sent], into=[into], at_most=at_most)
        world.until(lambda out=out: out)
        assert "`into` takes uint8[" in str(out[0])
        assert not into.any()


@streams
def test_sixteen_callers_share_a_small_budget(world):
    size = 500_000
    limits = WireLimits(staging_nbytes=4 * 4 * size, turn_nbytes=1 << 20)
    server, host, port = world.server(limits=limits)
    host.specs["push"] = [TensorSpec("float32", size)]
    served, outs, rounds = [], {}, 4

    def keep(call, respond):
        assert call.tensors[0].min() == call.tensors[0].max() == call.fields["n"]
        served.append(call.fields["n"])
        respond(Reply())

    host.answer = keep
    callers = [world.wire(f"worker {n}", rank=n) for n in range(16)]
    for caller in callers:
        world.join(caller, server, port)
    for n, caller in enumerate(callers):
        gradient = torch.full((size,), float(n))
        outs[n] = [world.call(caller, "push", tensors=[gradient], fields={"n": n})[0] for _ in range(rounds)]
    world.until(lambda: all(out for each in outs.values() for out in each), seconds=20)
    assert server.staging_peak_nbytes <= limits.staging_nbytes
    for so_far in range(1, len(served) + 1):
        counts = [served[:so_far].count(n) for n in range(16)]
        assert max(counts) - min(counts) <= 2, "somebody was served twice while somebody waited"


@streams
def test_memory_is_held_until_the_answer_and_whoever_dies_in_line_is_noticed(world):
    size = 500_000
    server, host, port = world.server(limits=WireLimits(staging_nbytes=4 * size))
    host.specs["push"] = [TensorSpec("float32", size)]
    callers = [world.wire(f"worker {n}", rank=n) for n in range(3)]
    for caller in callers:
        world.join(caller, server, port)
        world.call(caller, "push", tensors=[torch.ones(size)])
        world.until(lambda: host.requests)
    world.until(lambda: not any(caller._hosts["server 0"].connection.queue for caller in callers))
    callers[1].close(timeout=0.0)
    world.until(lambda: host.losses, server, callers[2], seconds=2)
    assert host.losses[0].peer == "worker 1"
    assert len(host.requests) == 1
    host.requests[0][1].release()
    world.until(lambda: len(host.requests) == 2, server, callers[2])
    assert host.requests[1][0].caller == "worker 2"


@streams
def test_a_small_payload_does_not_overtake_a_large_one_that_waits(world):
    size = 100_000
    _, host, caller = world.pair(limits=WireLimits(staging_nbytes=4 * size * 2))
    host.specs["push"] = [TensorSpec("float32", size)]
    host.specs["large"] = [TensorSpec("float32", int(1.5 * size))]
    host.specs["small"] = [TensorSpec("float32", 20_000)]
    server, others = world.wires[0], [world.wire(f"worker {n}", rank=n) for n in (1, 2)]
    for other in others:
        world.join(other, server, server._listeners[0]._sock.getsockname()[1])
    for wire, method in zip([caller, *others], ["push", "large", "small"], strict=True):
        world.call(wire, method, tensors=[torch.zeros(host.specs[method][0].numel)])
        for _ in range(20):
            for each in world.wires:
                each.poll(0.001)
    assert [call.method for call, _ in host.requests] == ["push"]
    host.requests[0][1](Reply())
    world.until(lambda: len(host.requests) == 3)
    assert {call.method for call, _ in host.requests} == {"push", "large", "small"}


def test_an_answer_to_somebody_who_died_is_released(world):
    server, host, caller = world.pair()
    world.call(caller, into=[torch.zeros(3)])
    world.until(lambda: host.requests)
    caller.close(timeout=0.0)
    world.until(lambda: host.losses, server)
    released = []
    host.requests[0][1](Reply({}, [torch.zeros(3)], lambda: released.append(1)))
    world.until(lambda: released, server)
    assert released == [1]


def test_bytes_move_in_the_background_and_callbacks_stay_with_the_owner(world):
    server, host, port = world.server()
    host.answer = echo
    host.specs["echo"] = [TensorSpec("float32", 4_000_000)]
    caller = world.wire("worker 0")
    world.join(caller, server, port)
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [server.poll(0.01) for _ in iter(stop.is_set, True)])
    thread.start()
    try:
        into = torch.zeros(4_000_000)
        threads = []
        request, _ = world.call(caller, "echo", tensors=[torch.ones(4_000_000)], into=[into])
        with caller.in_background():
            limit = time.monotonic() + 5
            while into[-1].item() != 1.0 and time.monotonic() < limit:
                time.sleep(0.005)
            assert into.min().item() == 1.0
            assert not request
            inner, _ = world.call(caller, fields={"inside": 1})
            time.sleep(0.05)
        threads.append(threading.get_ident())
        world.until(lambda: request and inner, caller)
        assert isinstance(request[0], Reply)
        assert inner[0].fields == {"inside": 1}
        with caller.in_background():
            assert not caller._reactor.lent, "nothing is in flight"
    finally:
        stop.set()
        thread.join()


@pytest.mark.alone
def test_a_wait_ends_when_woken(world):
    wire = world.wire("worker 0")
    timer = threading.Timer(0.1, wire.wake)
    timer.start()
    began = time.monotonic()
    wire.poll(5.0)
    assert 0.05 < time.monotonic() - began < 1.0
    for _ in range(100_000):
        wire.wake()
    wire.poll(5.0)


@pytest.mark.parametrize("wrong", [{"name": ""}, {"rank": -1}, {"rank": 1 << 31}, {"incarnation": -1}, {"job": 3}])
def test_identities_are_checked(wrong):
    with raising(ValueError, "got"):
        Wire(Identity(**({"job": "job", "name": "worker 0"} | wrong)))


def test_too_many_outstanding_requests_are_left_unread(world):
    _, host, caller = world.pair(limits=WireLimits(outstanding=3))
    for n in range(10):
        world.call(caller, fields={"n": n})
    world.until(lambda: len(host.requests) == 3)
    for _ in range(20):
        for wire in world.wires:
            wire.poll(0.0)
    assert len(host.requests) == 3
    host.requests[1][1](Reply())
    world.until(lambda: len(host.requests) == 4)
    assert host.requests[3][0].fields == {"n": 3}
