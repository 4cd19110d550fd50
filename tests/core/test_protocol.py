"""What a node refuses before a service sees it, and that nothing that is sent ends the process of a service."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_caller import CREDENTIALS

from dure.core import protocol
from dure.core.node import Address, Call, Reply, TensorSpec
from dure.core.protocol import COUNT, DRIVER, OWN, WORKERS, Method, RemoteService, carrying, check, remote
from dure.errors import Refused, RemoteError
from dure.job.optimizer import OptimizerSpec
from dure.rl.services import ModelService, ReplayService
from dure.run.driver import Driver
from dure.run.process import Control
from dure.runtime.process.node import Outbox, ProcessNode
from dure.runtime.wire import Identity
from dure.topology.collective.compressed import ChunkServer
from dure.topology.collective.ranks import GroupFailure
from dure.topology.fields import CLOSED, COMMAND, PUSHED, REPORT
from dure.topology.gossip.topology import Peer
from dure.topology.hybrid.topology import RowShard
from dure.topology.parameter_server.clock import ClockService
from dure.topology.parameter_server.coordinator import Coordinator
from dure.topology.parameter_server.policies import Bounded
from dure.topology.parameter_server.shard import ClockedShard, Shard
from dure.topology.shared_memory.segment import SharedShard
from dure.user_loop.servers import ShardHost

SERVICES = [
    Driver,
    Outbox,
    ClockService,
    ClockedShard,
    ChunkServer,
    Coordinator,
    Peer,
    GroupFailure,
    Shard,
    RowShard,
    SharedShard,
]
SERVICES += [ShardHost, ReplayService, ModelService]


def refusal(method, fields, caller="worker 1"):
    with pytest.raises(Refused) as caught:
        check("shard", method, Call(caller, "push", fields, ()))
    return str(caught.value)


PUSH = Method(WORKERS, {"worker": OWN, "seq": COUNT, "base": protocol.maybe(COUNT)})


def test_a_call_as_it_should_be_passes():
    check("shard", PUSH, Call("worker 1", "push", {"worker": 1, "seq": 3}, ()))
    check("shard", PUSH, Call("worker 12", "push", {"worker": 12, "seq": 0, "base": 2}, ()))


@pytest.mark.parametrize("caller", ["driver", "server 0", "worker", "worker x", "worker -1", "workers 1", ""])
def test_a_caller_of_another_role_is_refused(caller):
    assert "may not call push of shard: it is for worker" in refusal(PUSH, {"worker": 1, "seq": 3}, caller)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"worker": 1}, "lacks the field seq, a whole number from 0 to 2^53"),
        ({"worker": 2, "seq": 1}, "has worker=2, which must be the caller's own rank"),
        ({"worker": True, "seq": 1}, "has worker=True"),
        ({"worker": 1, "seq": -1}, "has seq=-1"),
        ({"worker": 1, "seq": 1.0}, "has seq=1.0"),
        ({"worker": 1, "seq": "1" * 5000}, "has seq='111"),
        ({"worker": 1, "seq": 1, "base": None}, "has base=None"),
        ({"worker": 1, "seq": 1, "more": 1}, "has no field more"),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(fields, says):
    said = refusal(PUSH, fields)
    assert says in said
    assert len(said) < 200


def test_the_front_of_a_rank_is_not_the_rank():
    assert "has worker=1, which must be the caller's own rank" in refusal(PUSH, {"worker": 1, "seq": 3}, "worker 12")


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        (protocol.COUNT, [0, 2**53], [-1, 2**53 + 1, 10**30]),
        (protocol.WHOLE, [-1, 0, 5], [10**30, 1.0, True, "1", None]),
        (protocol.NUMBER, [1, 1.5, float("inf")], [10**400, True, "1", None, []]),
        (protocol.FINITE, [1, 1.5], [10**400, float("inf"), float("nan")]),
        (protocol.TRUTH, [True, False], [0, 1, None]),
        (protocol.TEXT, ["", "x" * 10_000], ["x" * 10_001, 3, None]),
        (protocol.NODE, ["worker 1", "server 0"], ["driver", "worker", "worker 1 2", "worker \u0663", 3]),
        (protocol.PORT, [1, 65535], [0, 65536, "80", 80.0]),
        (protocol.PLACE, [["127.0.0.1", 80]], [["127.0.0.1"], ["127.0.0.1", 0], "127.0.0.1", [1, 80]]),
        (protocol.RATE, [None, 0.1, [0.1, 1]], ["0.1", [None], True, float("inf"), [float("nan")]]),
        (protocol.mapping(protocol.NUMBER), [{}, {"a": 1}], [{"a": "1"}, [], None]),
        (protocol.one_of("mean", "sum"), ["mean"], ["max", None, ["mean"]]),
        (COMMAND, [["zero", "g"], ["axpy", "x", 0.5, "y"]], [[], "zero", ["zero", None], ["zero", [1]]]),
        (
            REPORT,
            [{"evaluation": 1, "run": [0, 3], "seq": None, "losses": [0.5]}],
            [{"evaluation": 1, "run": [0, 3], "seq": None}, {"evaluation": 1, "run": [0], "seq": 1, "losses": []}, {}],
        ),
        (CLOSED["members"], [[], [[0, 1], [1, 2]]], [[[0]], [[0, "1"]], {}]),
    ],
)
def test_what_fields_hold(field, good, bad):
    for value in good:
        assert field.holds(value, "worker 1"), value
    for value in bad:
        assert not field.holds(value, "worker 1"), value


@pytest.mark.parametrize("service", SERVICES, ids=lambda kind: kind.__name__)
def test_every_service_says_who_may_call_each_of_its_methods(service):
    assert service.protocol
    assert all(method.callers for name, method in service.protocol.items() if name != "fetch" or service is not Outbox)


def test_the_driver_alone_commands_processes():
    assert all(method.callers == DRIVER for method in Control.protocol.values())


# ---- declarations


class Counter(RemoteService):
    """A service whose methods are declared: one plain, one later, one that brings tensors."""

    called = "the counter"

    def __init__(self, room=3):
        self.room = room
        self.count = 0

    @remote(WORKERS, DRIVER, by=COUNT, note=protocol.maybe(protocol.TEXT))
    def _add(self, call):
        """The count."""
        self.count += call.fields["by"]
        return Reply({"count": self.count})

    @remote(WORKERS)
    @carrying(lambda counter: (TensorSpec("float32", counter.room),))
    async def fill(self, call):
        return Reply({"filled": call.tensors[0].numel()})

    @remote(DRIVER)
    def _reset(self, call):
        self.count = 0
        return Reply()

    def state(self):
        return {"count": self.count}

    def _forget(self, call):
        self.count = 0


class Twice(Counter):
    """Counts double; has one method more, and one that everybody may call."""

    def _add(self, call):
        self.count += call.fields["by"]
        return super()._add(call)

    @remote()
    def look(self, call):
        return Reply(self.state())


class Open(Twice, checked=False):
    called = "an open counter"


def test_a_declaration_says_who_may_call_and_with_what():
    assert list(Counter.protocol) == ["add", "fill", "reset"]
    assert Counter.protocol["add"].callers == ("worker", "driver")
    assert dict(Counter.protocol["add"].fields) == {"by": COUNT, "note": protocol.maybe(protocol.TEXT)}
    assert Counter.protocol["fill"].callers == ("worker",)
    assert Counter.protocol["fill"].fields == {}


def test_a_method_is_answered_by_its_handler():
    counter = Counter()
    assert counter.handle(Call("worker 0", "add", {"by": 2}, ())) == Reply({"count": 2})
    assert counter.handle(Call("worker 0", "add", {"by": 3}, ())) == Reply({"count": 5})
    later = counter.handle(Call("worker 0", "fill", {}, (torch.zeros(3),)))
    with pytest.raises(StopIteration) as ended:
        later.send(None)
    assert ended.value.value == Reply({"filled": 3})


@pytest.mark.parametrize("method", ["state", "_add", "_forget", "forget", "handle", "__init__", "room", "protocol", ""])
def test_what_is_not_declared_cannot_be_called(method):
    counter = Counter()
    with pytest.raises(Refused) as refused:
        counter.handle(Call("worker 0", method, {}, ()))
    assert str(refused.value) == f'the counter has no method "{method}"; it has add, fill, reset.'
    assert counter.expects(method) == ()
    with pytest.raises(Refused, match=r"^an open counter has no method .* it has add, fill, reset, look\.$"):
        Open().handle(Call("worker 0", method, {}, ()))


def test_a_call_brings_the_tensors_that_this_service_expects():
    assert Counter(3).expects("fill") == (TensorSpec("float32", 3),)
    assert Counter(5).expects("fill") == (TensorSpec("float32", 5),)
    assert Counter().expects("add") == ()


def test_a_subclass_has_the_methods_of_its_base_and_may_override_them():
    assert list(Twice.protocol) == ["add", "fill", "reset", "look"]
    assert Twice.protocol["add"] == Counter.protocol["add"]
    assert list(Counter.protocol) == ["add", "fill", "reset"]
    assert Twice(7).expects("fill") == (TensorSpec("float32", 7),)
    assert Twice().handle(Call("worker 0", "add", {"by": 2}, ())) == Reply({"count": 4})
    assert Twice().handle(Call("worker 0", "look", {}, ())) == Reply({"count": 0})


def test_a_subclass_may_declare_a_method_anew():
    class Stricter(Counter):
        @remote(DRIVER)
        @carrying(lambda counter: (TensorSpec("int64", 1),))
        def _add(self, call): ...

    assert Stricter.protocol["add"] == Method(DRIVER)
    assert Stricter().expects("add") == (TensorSpec("int64", 1),)
    assert list(Stricter.protocol) == list(Counter.protocol)


def test_a_service_admits_the_callers_that_have_a_part_in_it():
    class Closed(Counter):
        def admit(self, call):
            if call.caller != "worker 7":
                raise Refused(f"{call.caller} has no part in it.")

    counter = Closed()
    with pytest.raises(Refused, match=r"^worker 1 has no part in it\.$"):
        counter.handle(Call("worker 1", "add", {"by": 1}, ()))
    assert counter.count == 0
    assert counter.handle(Call("worker 7", "add", {"by": 1}, ())) == Reply({"count": 1})


def test_a_declaration_that_is_none_is_refused_where_it_is_written():
    with pytest.raises(TypeError, match=r"^the field by needs a type such as COUNT or maybe"):
        remote(WORKERS, by=int)
    with pytest.raises(TypeError, match=r"^callers are groups such as WORKERS or DRIVER, got 'worker'"):
        remote("worker")
    with pytest.raises(TypeError, match=r"^Both declares add twice: by _add and by add"):

        class Both(Counter):
            @remote(WORKERS)
            def add(self, call): ...


# ---- a live node


class Fragile(RemoteService):
    """A service whose handlers fail."""

    def __init__(self) -> None:
        self.counted = 0

    @remote(WORKERS, by=COUNT)
    def count(self, call):
        self.counted += call.fields["by"]
        return Reply({"counted": self.counted})

    @remote(WORKERS)
    def fail_at_once(self, call):
        raise KeyError("by")

    @remote(WORKERS)
    async def fail_later(self, call):
        raise TypeError("later")


@pytest.fixture
def live():
    """A node that hosts services, turned by a thread; a node to call it from; and what runs a call."""
    torch.set_num_threads(1)
    host = ProcessNode(Identity("job", "server 0", 0), CREDENTIALS)
    caller = ProcessNode(Identity("job", "worker 1", 1), CREDENTIALS)
    caller.directory["server 0"] = ("127.0.0.1", host.wire.listen())
    ended = threading.Event()
    failures = []

    def serve():
        while not ended.is_set():
            try:
                host.loop.turn(0.01)
            except BaseException as error:  # noqa: BLE001  (the test looks at it)
                failures.append(error)
                return

    thread = threading.Thread(target=serve)
    thread.start()

    def ask(service, method, *tensors, **fields):
        return caller.loop.run_until(caller.call(Address("server 0", service), method, *tensors, timeout=20, **fields))

    yield host, ask, failures
    ended.set()
    thread.join()
    caller.wire.close(timeout=0.0)
    host.wire.close(timeout=0.0)
    caller.loop.end()
    host.loop.end()


@pytest.mark.parametrize("method", ["fail_at_once", "fail_later"])
def test_a_handler_that_raises_ends_the_call_and_not_the_process(live, method, caplog):
    host, ask, failures = live
    host.serve("fragile", Fragile())
    errors = []
    host.on_error = errors.append
    said = f"{method} of fragile at server 0 has failed"
    with caplog.at_level(logging.ERROR, "dure"), pytest.raises(Refused, match=said):
        ask("fragile", method)
    assert ask("fragile", "count", by=2).fields == {"counted": 2}
    assert not failures
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "called by worker 1" in record.getMessage()
    assert f'File "{__file__}"' in record.getMessage(), "the frames of the service are lost"
    assert len(errors) == 1, "the whole traceback is lost"


def test_a_refused_call_does_not_reach_the_service(live):
    host, ask, failures = live
    service = Fragile()
    host.serve("fragile", service)
    for fields in ({}, {"by": -1}, {"by": "2"}, {"by": 1, "more": 1}):
        with pytest.raises(Refused):
            ask("fragile", "count", **fields)
    assert service.counted == 0
    assert not failures


def test_a_node_refuses_by_the_declaration_of_the_service_that_it_hosts(live):
    host, ask, failures = live
    counter, opened = Counter(), Open()
    host.serve("counter", counter)
    host.serve("open", opened)
    assert ask("counter", "add", by=1, note="x").fields == {"count": 1}
    for refused, fields, says in [
        ("add", {"by": -1}, "add of counter has by=-1, which must be a whole number from 0 to 2^53."),
        ("add", {}, "add of counter lacks the field by, a whole number from 0 to 2^53."),
        ("add", {"by": 1, "worker": 1}, "add of counter has no field worker."),
        ("reset", {}, "worker 1 may not call reset of counter: it is for driver."),
        ("look", {}, 'the counter has no method "look"; it has add, fill, reset.'),
    ]:
        with pytest.raises(Refused) as caught:
            ask("counter", refused, **fields)
        assert str(caught.value) == f"server 0, counter.{refused}: {says}"
    assert ask("counter", "fill", torch.zeros(3)).fields == {"filled": 3}
    with pytest.raises(Refused, match=r"fill carries"):
        ask("counter", "fill", torch.zeros(4))
    with pytest.raises(Refused, match=r"fill carries"):
        ask("counter", "fill")
    assert counter.count == 1
    assert ask("open", "add", by=-1, more="of it").fields == {"count": -2}
    assert not failures


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(-2, 2), st.text(max_size=2), st.lists(st.integers(0, 1), max_size=2)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
NAMES = st.sampled_from([*PUSHED, *CLOSED, "keep", "commands", "has", "x"])


def test_nothing_that_is_sent_ends_a_server(live):
    """Random calls of every method, some nearly right; then the servers still do what they should."""
    host, ask, failures = live
    shard = Shard(host, torch.zeros(4), OptimizerSpec(lr=1.0))
    clock = ClockService(host, Bounded(3), [Address("server 0", "shard")], workers=range(2))
    host.serve("shard", shard)
    host.serve("clock", clock)
    methods = [("shard", name) for name in Shard.protocol] + [("clock", name) for name in ClockService.protocol]
    waits = {"join", "ask", "next", "offer", "watch"}  # those may be answered late, and rightly

    @settings(max_examples=50, deadline=None)
    @given(st.sampled_from(methods), st.dictionaries(NAMES, VALUES, max_size=5), st.integers(0, 2))
    def send(method, fields, right):
        service, name = method
        expected = (Shard if service == "shard" else ClockService).protocol[name].fields
        if right:
            nearly = {"worker": 1, "incarnation": 0, "seq": 1, "weight": 1.0, "ordered": False, "base": 0, "version": 0}
            fields = {key: fields.get(key, nearly.get(key)) for key in expected}
        if name in waits and fields.get("worker") == 1:
            return
        tensors = [torch.ones(4)] if name in ("push", "stage") else []
        before = shard.applied
        try:
            ask(service, name, *tensors, **fields)
        except RemoteError:
            assert shard.applied == before

    send()
    assert not failures
    assert ask("shard", "status").fields["version"] == shard.applied
