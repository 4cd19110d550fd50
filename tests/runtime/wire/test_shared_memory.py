"""Bulk that does not travel: read where it lies, by processes of one machine."""

import contextlib
import gc
import os
import random
import signal
import sys
import time

import pytest
import torch
from runtime.wire.test_faults import callers, start
from support.raw_caller import CREDENTIALS
from support.wording import raising

from dure.core.node import Reply, TensorSpec
from dure.errors import CallTimeout, DamagedFrame, PeerLost, RemoteError
from dure.job.optimizer import OptimizerSpec
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity, WireLimits
from dure.runtime.wire.memory import Borrower, Lender
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared under Linux only")

NUMEL = 500_000
SPEC = TensorSpec("float32", NUMEL)


@pytest.fixture(autouse=True)
def lends(world):
    world.lent_nbytes = 1 << 20


def link_of(caller):
    return caller._hosts["server 0"].connection


def test_neither_a_request_nor_a_reply_travels_and_both_count_as_traffic(world):
    server, host, caller = world.pair()
    host.specs["push"] = [SPEC]
    room, into = server.room_like(torch.empty(NUMEL)), torch.zeros(NUMEL)
    released = []

    def answer(call, respond):
        room.copy_(call.tensors[0]).mul_(2)
        respond(Reply({}, [room], lambda: released.append(1)))

    host.answer = answer
    reply = world.ask(caller, "push", tensors=[torch.full((NUMEL,), 3.0)], into=[into])
    assert isinstance(reply, Reply)
    assert into.min() == into.max() == 6.0
    world.until(lambda: released)
    assert not server._shared.staging._idle, "memory was made for what was received"
    for traffic in (server.traffic["worker 0"], caller.traffic["server 0"]):
        assert (traffic.payload_nbytes_sent, traffic.payload_nbytes_received) == (4 * NUMEL, 4 * NUMEL)
        assert traffic.overhead_nbytes_sent < 2000


def test_what_lies_in_a_room_of_the_callers_is_read_there(world):
    _, host, caller = world.pair()
    host.specs["push"] = [SPEC]
    room = caller.room_like(torch.empty(2 * NUMEL)).fill_(1.0)
    out, _ = world.call(caller, "push", tensors=[room[NUMEL:]])
    world.until(lambda: host.requests)
    (call, respond), room[NUMEL:] = host.requests[0], 2.0
    assert call.tensors[0].min() == 2.0, "it is the same memory"
    assert not caller._shared.rooms.peak_nbytes
    respond(Reply())
    world.until(lambda: out)
    assert caller.traffic["server 0"].payload_nbytes_sent == 4 * NUMEL


def test_a_reply_can_be_read_where_it_lies_until_it_is_released(world):
    server, host, caller = world.pair()
    room, released = server.room_like(torch.empty(NUMEL)).fill_(1.0), []
    host.answer = lambda call, respond: respond(Reply(call.fields, [room], lambda: released.append(call.fields["how"])))
    assert caller.borrows("server 0", 4 * NUMEL)
    reply = world.ask(caller, into=None, fields={"how": "borrowed"})
    room.fill_(2.0)
    assert reply.fields == {"how": "borrowed"}
    assert reply.tensors[0].min() == reply.tensors[0].max() == 2.0, "it is the same memory"
    world.ask(caller, into=[torch.zeros(NUMEL)], fields={"how": "copied"})
    world.until(lambda: released)
    assert released == ["copied"]
    reply.release()
    world.until(lambda: released == ["copied", "borrowed"])


@pytest.mark.parametrize(("numel", "unix"), [(1000, True), (NUMEL, False)])
def test_who_cannot_borrow_is_told_before_and_has_to_give_tensors(world, numel, unix):
    world.unix = unix
    server, host, caller = world.pair()
    room, released = server.room_like(torch.empty(numel)), []
    host.answer = lambda call, respond: respond(Reply({}, [room], lambda: released.append(1)))
    assert not caller.borrows("server 0", 4 * numel)
    assert not caller.borrows("nobody", 4 * NUMEL)
    error = world.ask(caller, into=None)
    assert isinstance(error, RemoteError)
    assert "`into` takes no tensor: give `into` tensors that fit." in str(error)
    world.until(lambda: released)


def test_a_borrowed_reply_that_nobody_waits_for_any_more_is_given_back(world):
    server, host, caller = world.pair()
    room, released = server.room_like(torch.empty(NUMEL)), []
    out, call = world.call(caller, into=None)
    world.until(lambda: host.requests)
    host.requests[0][1](Reply({}, [room], lambda: released.append(1)))
    while not caller._reactor.events:  # it comes while its owner is busy
        server.poll(0.0)
        caller._reactor.turn(0.0)
    call.cancel()
    world.until(lambda: released)
    assert not out


@pytest.mark.parametrize("evicted", [False, True], ids=["cut", "evicted"])
def test_what_a_living_process_may_still_read_is_never_released(world, evicted):
    server, host, caller = world.pair()
    rooms, released = [server.room_like(torch.empty(NUMEL)) for _ in range(2)], []
    for into in (None, [torch.zeros(NUMEL)]):
        world.call(caller, into=into)
    world.until(lambda: len(host.requests) == 2)
    for (_, respond), room, name in zip(host.requests, rooms, ("borrowed", "copied"), strict=True):
        respond(Reply({}, [room], lambda name=name: released.append(name)))
    if evicted:
        server.evict("worker 0", 0, "it slept")
    else:
        link_of(caller).end(PeerLost("cut by the test"))
    world.until(lambda: host.losses and released)
    assert released == ["copied"]


def test_over_tcp_everything_travels(world):
    world.unix = False
    server, host, caller = world.pair()
    host.specs["push"] = [SPEC]
    room = server.room_like(torch.empty(NUMEL)).fill_(2.0)
    host.answer = lambda call, respond: respond(Reply({}, [room]))
    into = torch.zeros(NUMEL)
    assert isinstance(world.ask(caller, "push", tensors=[torch.ones(NUMEL)], into=[into]), Reply)
    assert into.min() == 2.0
    assert server._shared.staging._idle


def test_a_request_that_nobody_waits_for_any_more_is_not_written_over(world):
    _, host, caller = world.pair()
    host.specs["push"] = [SPEC]
    late = world.ask(caller, "push", tensors=[torch.full((NUMEL,), 1.0)], timeout=0.01)
    assert isinstance(late, CallTimeout)
    world.until(lambda: host.requests)
    second, _ = world.call(caller, "push", tensors=[torch.full((NUMEL,), 2.0)])
    world.until(lambda: len(host.requests) == 2)
    assert [call.tensors[0].unique().tolist() for call, _ in host.requests] == [[1.0], [2.0]]
    for _, respond in host.requests:
        respond(Reply())
    world.until(lambda: second and not caller._shared.rooms.held_nbytes)
    world.call(caller, "push", tensors=[torch.full((NUMEL,), 3.0)])
    world.until(lambda: len(host.requests) == 3)
    assert caller._shared.rooms.peak_nbytes < 3 * 4 * NUMEL, "once answered, the memory is used again"
    assert host.requests[2][0].tensors[0].unique().tolist() == [3.0]


def test_what_an_ended_connection_has_left_behind_is_never_written_to_again(world):
    server, host, port = world.server()
    host.specs["push"] = [SPEC]
    caller = world.wire("worker 0", limits=None)
    world.join(caller, server, port)
    world.call(caller, "push", tensors=[torch.full((NUMEL,), 1.0)])
    world.until(lambda: host.requests)
    link_of(caller).end(PeerLost("cut by the test"))
    world.join(caller, server, port)
    world.call(caller, "push", tensors=[torch.full((NUMEL,), 2.0)])
    world.until(lambda: len(host.requests) == 2)
    assert host.requests[0][0].tensors[0].unique().tolist() == [1.0]


def test_a_lent_reply_is_given_back_once_read_even_when_nobody_wants_it(world):
    server, host, caller = world.pair()
    room = server.room_like(torch.empty(NUMEL)).fill_(2.0)
    released, into = [], torch.zeros(NUMEL)
    out, call = world.call(caller, into=[into])
    world.until(lambda: host.requests)
    call.cancel()
    host.requests[0][1](Reply({}, [room], lambda: released.append("abandoned")))  # CANCEL is still on its way
    assert not released
    world.until(lambda: released)
    assert not out
    assert not into.any()
    host.answer = lambda call, respond: respond(Reply({}, [room], lambda: released.append("read")))
    assert isinstance(world.ask(caller, into=[into]), Reply)
    world.until(lambda: len(released) == 2)
    assert into.min() == 2.0


def test_a_lent_reply_is_free_when_its_reader_is_gone(world):
    server, host, caller = world.pair()
    released = []
    world.call(caller, into=[torch.zeros(NUMEL)])
    world.until(lambda: host.requests)
    host.requests[0][1](Reply({}, [server.room_like(torch.empty(NUMEL))], lambda: released.append(1)))
    server.poll()
    assert not released
    caller.close(timeout=0.0)
    world.until(lambda: released, server)


@pytest.mark.parametrize("stuck", [False, True], ids=["told", "with bulk before the word"])
def test_who_was_evicted_while_it_read_does_not_take_what_it_read(world, stuck):
    server, host, caller = world.pair()
    released, room = [], server.room_like(torch.empty(NUMEL))
    out, _ = world.call(caller, into=[torch.zeros(NUMEL)])
    world.call(caller, into=[torch.zeros(20 * NUMEL)])
    world.until(lambda: len(host.requests) == 2)
    host.requests[0][1](Reply({}, [room], lambda: released.append(1)))
    if stuck:
        host.requests[1][1](Reply({}, [torch.zeros(20 * NUMEL)]))
    server.evict("worker 0", 0, "it slept")
    world.until(lambda: released, server)  # from now on the host writes there
    world.until(lambda: out, caller)
    assert isinstance(out[0], PeerLost)


@pytest.mark.parametrize(
    "told",
    [None, [], [[1, 2]], [[0, 1, "0"]], [[0, 1, -4]], [[True, 1, 0]], [["file", "file", 4]], [["file", 1, 2]]],
)
def test_memory_that_makes_no_sense_is_refused(told):
    lender = Lender()
    room = lender.empty(4 * NUMEL)
    [[file, _, offset]] = lender.where([room])
    assert offset == 0
    if told:
        told = [[file if each == "file" else each for each in told[0]]]
    with raising(DamagedFrame, "memory"):
        Borrower(1 << 30).tensors(os.getpid(), told, [SPEC])


def test_memory_that_may_shrink_is_refused_and_what_is_gone_ends_the_connection(world):
    file = os.memfd_create("loose", os.MFD_CLOEXEC)
    os.ftruncate(file, 4 * NUMEL)
    try:
        with pytest.raises(Exception, match="shrink"):
            Borrower(1 << 30).tensors(os.getpid(), [[file, 1, 0]], [SPEC])
    finally:
        os.close(file)
    _, host, caller = world.pair()
    host.specs["push"] = [SPEC]
    caller._shared.lender.where = lambda tensors: [[file, 1, 0]]
    out = world.ask(caller, "push", tensors=[torch.ones(NUMEL)])
    assert isinstance(out, PeerLost)


def test_mappings_are_kept_within_a_budget_and_given_up_when_unused():
    gc.collect()
    before, lender, borrower = mappings(), Lender(), Borrower(3 << 20)
    rooms = [lender.empty(1 << 20).fill_(n) for n in range(5)]
    for n, room in enumerate(rooms):
        [seen] = borrower.tensors(os.getpid(), lender.where([room[8:]]), [TensorSpec("uint8", (1 << 20) - 8)])
        assert seen.unique().tolist() == [n]
        del seen
    assert mappings() == before + 5 + 3
    del rooms, room
    assert mappings() == before + 3
    assert not lender._rooms


def mappings():
    with open("/proc/self/maps") as lines:
        return sum("memfd:dure" in line for line in lines)


def test_a_shard_is_pushed_to_and_pulled_from_where_its_versions_lie():
    server, worker = (ProcessNode(Identity("job", name), CREDENTIALS) for name in ("server 0", "worker 0"))
    shard = Shard(server, torch.zeros(NUMEL), OptimizerSpec("sgd", lr=0.5))
    there = server.serve("shard", shard)
    worker.directory["server 0"] = ("127.0.0.1", server.wire.listen())
    into = torch.zeros(NUMEL)
    client = ServerClient(worker, 0, ServerLayout([there], [[(0, NUMEL)]], ordered=False), incarnation=1)
    assert not client.lends, "it is not connected"

    async def work():
        for seq in range(1, 6):
            fields = {"worker": 0, "incarnation": 0, "seq": seq, "base": None, "weight": 1.0, "ordered": False}
            await worker.call(there, "push", torch.ones(NUMEL), **fields)
            await worker.call(there, "pull", into=[into])
            assert into.min() == into.max() == -0.5 * seq
            borrowed = await client.borrow()
            assert (borrowed.versions, borrowed.values.tolist()) == ([seq], into.tolist())
            assert borrowed.values.data_ptr() != shard.values.data_ptr(), "mapped, not the server's own"
            shard.values[-1] = 7.0
            assert borrowed.values[-1] == 7.0, "not copied"
            shard.values[-1] = into[-1]
            borrowed.release()
        exchanged = await client.push_pull(torch.ones(NUMEL), None, base=[5])
        assert (exchanged.versions, exchanged.values.unique().tolist()) == ([6], [-3.0])
        exchanged.release()

    task = worker.spawn(work())
    task.when_done(lambda: None)
    while not task.done:
        worker.loop.turn(0.0)
        server.loop.turn(0.0)
    task.result()
    assert client.lends
    assert not server.wire._shared.staging._idle, "memory was made for what was received"
    assert worker.wire._shared.borrower._kept, "a version was copied from where it lies"
    assert shard.versions.pool.made <= 3
    for node in (worker, server):
        node.wire.close(timeout=0.0)


def test_who_would_have_too_much_mapped_waits_and_is_delivered_in_turn(world):
    server, host, port = world.server(limits=WireLimits(staging_nbytes=2 * 4 * NUMEL + 10_000))
    host.specs["push"] = [SPEC]
    callers = [world.wire(f"worker {n}", rank=n) for n in range(5)]
    outs = []
    for n, caller in enumerate(callers):
        world.join(caller, server, port)
        outs.append(world.call(caller, "push", tensors=[torch.full((NUMEL,), float(n))])[0])
    seen = []
    while len(seen) < 4:
        world.until(lambda: len(host.requests) == min(2, 4 - len(seen)))
        assert server._shared.staging.held_nbytes <= 2 * 4 * NUMEL + 10_000
        call, respond = host.requests.pop(0)
        seen.append(call.tensors[0].unique().tolist())
        if len(seen) == 1:
            link_of(callers[3]).end(PeerLost("it died in line"))
            world.until(lambda: host.losses)
        respond(Reply())
    world.until(lambda: all(outs))
    assert seen == [[0.0], [1.0], [2.0], [4.0]]
    assert not server._shared.staging.held_nbytes


@pytest.mark.alone
def test_callers_killed_at_any_time_leave_whole_updates_and_whole_versions(world):
    """Random kills of a caller that pushes and pulls, while the host writes to each version again once it is free."""
    server, host, port = world.server()
    host.specs |= {"push": [SPEC], "pull": []}
    free = [server.room_like(torch.empty(NUMEL)) for _ in range(3)]
    delivered, chance = [], random.Random(5)

    def answer(call, respond):
        if call.method == "push":
            life = call.fields["life"]
            delivered.append(life)
            assert call.tensors[0].min().item() == call.tensors[0].max().item() == life
            respond(Reply())
        else:
            version = free.pop().fill_(len(delivered))
            respond(Reply({}, [version], lambda: free.append(version)))

    host.answer = answer
    with callers(port, NUMEL, lent_nbytes=1) as process:
        for life in range(1, 16):
            pid = start(world, process, f"worker 1 {life}")
            count = len(delivered) + 3
            world.until(lambda count=count: len(delivered) >= count, server)
            until = time.monotonic() + chance.uniform(0.0, 0.01)
            world.until(lambda until=until: time.monotonic() > until, server)
            os.kill(pid, signal.SIGKILL)
            world.until(lambda life=life: len(host.losses) == life and len(free) == 3, server)
        with contextlib.suppress(BlockingIOError):
            assert not os.read(process.stdout.fileno(), 100), "a caller has seen half a version"
    assert server.damaged == 0
    assert set(delivered) == set(range(1, 16))
