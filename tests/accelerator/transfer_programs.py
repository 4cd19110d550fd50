"""Programs for the transfers of a device replica: two nodes of one process, of which one has a device.

    python -m accelerator.transfer_programs [NAME ...]  one line of JSON per program: name, then an outcome per fault

A program has a correct form, whose fault is "", and forms with one fault each, which is planted there. Those run
on the stand-in alone.
"""

from __future__ import annotations

import gc
import json
import signal
import sys
from collections.abc import Callable

import torch
from accelerator import target
from accelerator.programs import outcome
from support.raw_caller import CREDENTIALS
from torch import Tensor

from dure.core.node import Address, Call, Reply, TensorSpec, nothing
from dure.runtime.process.node import ProcessNode
from dure.runtime.process.transfers import ALIGNMENT, SLOTS, DeviceTransfers
from dure.runtime.wire import Identity, WireLimits

NUMEL = 16
BIG = 2_000_000
PROGRAMS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], list[str]]] = {}


def program(*faults: str):
    """Lists a program with the names of its faulty forms."""

    def listed(function):
        PROGRAMS[function.__name__] = function, ["", *faults]
        return function

    return listed


class Store:
    """Service that keeps what it is given, and answers with the sum so far; `hold` defers its answers."""

    def __init__(self, node: ProcessNode, numel: int) -> None:
        self.node = node
        self.sum = torch.zeros(numel)
        self.hold = False
        self.given: list[Tensor] = []
        self.held: list = []

    def expects(self, method: str) -> list[TensorSpec]:
        return [TensorSpec("float32", self.sum.numel())] if method in ("add", "keep") else []

    def handle(self, call: Call):
        if call.method == "keep":
            self.given.append(call.tensors[0].clone())
            return Reply()
        if call.method == "add":
            self.given.append(call.tensors[0].clone())
            self.sum = self.sum.to(call.tensors[0].device) + call.tensors[0]
        if not self.hold:
            return Reply(tensors=[self.sum])
        later = self.node.promise("the answer")
        self.held.append(lambda total=self.sum: later.resolve(Reply(tensors=[total])))
        return later


class Two:
    """A worker with a device, and a server on the CPU."""

    def __init__(self, numel: int = NUMEL) -> None:
        self.device = target.device_type()
        torch.empty(1, device=self.device)  # the first use of a GPU takes seconds
        signal.alarm(10)  # a faulty form may wait for ever
        limits = WireLimits(lent_nbytes=1 << 40)  # as between machines: no memory is shared
        self.worker = ProcessNode(Identity("job", "worker 0", 0), CREDENTIALS, limits=limits, device=self.device)
        self.server = ProcessNode(Identity("job", "server 0", 0), CREDENTIALS, limits=limits)
        for one, other in ((self.worker, self.server), (self.server, self.worker)):
            other.directory[one.name] = ("127.0.0.1", one.wire.listen())
        self.store, self.own = Store(self.server, numel), Store(self.worker, numel)
        self.server.serve("store", self.store)
        self.worker.serve("store", self.own)
        self.add(torch.zeros(numel, device=self.device))()  # both have greeted each other

    @property
    def transfers(self) -> DeviceTransfers:
        assert self.worker.transfers is not None
        return self.worker.transfers

    def add(self, values: Tensor, into: Tensor | None = None) -> Callable[[], Reply]:
        """Starts a call; returns what waits for its end."""
        into = torch.empty_like(values) if into is None else into
        calling = self.worker.call(Address("server 0", "store"), "add", values, into=[into])
        return lambda: self.until(calling)

    def until(self, operation):
        while not operation.done:
            self.turn()
        return operation.result()

    def turn(self) -> None:
        for node in (self.worker, self.server):
            node.loop.turn(0.0)

    def until_given(self, count: int) -> None:
        while len(self.store.given) < count:
            self.turn()


def values(number: float = 1.0) -> Tensor:
    return torch.arange(1.0, NUMEL + 1) * number


class Deaf(torch.Stream):
    """A stream that ignores events."""

    def wait_event(self, event: torch.Event) -> None:
        pass


class Early:
    """An event that claims to have come."""

    def query(self) -> bool:
        return True


@program("event_left_out", "event_not_asked_for", "wait_on_another_stream")
def a_call_carries_what_the_stream_computes(fault):
    two = Two()
    if fault == "event_left_out":
        two.transfers._side = Deaf(two.device)
    if fault == "wait_on_another_stream":
        two.transfers._here = lambda: two.transfers._side
    if fault == "event_not_asked_for":
        start = two.transfers._start_copy
        two.transfers._start_copy = lambda message: (start(message), setattr(message, "copied", Early()))
    two.store.hold = True
    two.add(values().to(two.device) * 3)
    two.until_given(2)
    return two.store.given[1], values(3)


@program("event_left_out", "wait_on_another_stream")
def a_reply_is_there_when_the_stream_reads_it(fault):
    two = Two()
    into = torch.empty(NUMEL, device=two.device)
    if fault == "wait_on_another_stream":
        two.transfers._here = lambda: two.transfers._arrival
    if fault == "event_left_out":
        here = Deaf(two.device)
        two.transfers._here = lambda: here
    two.add(values().to(two.device), into)()
    return (into * 2).cpu(), values(2)


@program("memory_still_in_use")
def a_reply_waits_for_the_readers_of_its_memory(fault):
    two = Two()
    two.store.sum = values(5)
    if fault:
        two.transfers._arrival = Deaf(two.device)
    room = values().to(two.device)
    read = room * 2
    calling = two.worker.call(Address("server 0", "store"), "look", into=[room])
    two.until(calling)
    return torch.cat([read.cpu(), room.cpu()]), torch.cat([values(2), values(5)])


@program("record_stream_left_out")
def a_tensor_may_be_dropped_once_it_is_sent(fault):
    two = Two()
    if fault:
        torch.Tensor.record_stream = lambda tensor, stream: None
    sent = values().to(two.device)
    two.store.hold = True
    two.add(sent)
    two.until_given(1)
    for message in two.transfers._queues["calls of server 0"]:  # on a GPU it may have left
        message.tensors = [torch.empty(NUMEL)]  # the transfers themselves keep them longer
    del sent
    gc.collect()
    again = torch.full((NUMEL,), 7.0, device=two.device)
    two.until_given(2)
    return torch.cat([two.store.given[1], again.cpu()]), torch.cat([values(), torch.full((NUMEL,), 7.0)])


@program("returned_early")
def a_buffer_is_used_again_once_its_call_is_over(fault):
    """Four calls at a time, of which two wait for a buffer; they are larger than the memory of a socket."""
    two = Two(BIG)
    if fault:
        start = two.transfers._start_copy
        two.transfers._start_copy = lambda message: (
            start(message),
            two.transfers.pool.give_back(message.key, message.outgoing),
        )
    store = Address("server 0", "store")
    sent = [torch.full((BIG,), number, device=two.device) for number in (1.0, 2.0, 3.0, 4.0)]
    calls = [two.worker.call(store, "keep", each) for each in sent]
    for _ in range(50):
        two.worker.loop.turn(0.0)
    for each in calls:
        two.until(each)
    return torch.stack(two.store.given[1:])[:, -2:], torch.tensor([[1.0], [2.0], [3.0], [4.0]]).expand(4, 2)


@program("returned_when_received")
def the_memory_of_a_reply_is_kept_until_it_is_copied(fault):
    two = Two()
    if fault:
        arrived = two.transfers._arrived

        def early(message, answer):
            buffer = message.incoming
            result = arrived(message, answer)
            buffer.fill_(9)  # as the next reply would
            return result

        two.transfers._arrived = early
    first, second = (torch.empty(NUMEL, device=two.device) for _ in range(2))
    two.add(values(1).to(two.device), first)()
    two.add(values(1).to(two.device), second)()
    return torch.cat([first.cpu(), second.cpu()]), torch.cat([values(1), values(2)])


@program()
def a_message_without_elements_is_sent(fault):
    """A slice of a model with fewer elements than servers, in both directions."""
    two = Two(0)
    nothing_there, into = torch.empty(0, device=two.device), torch.empty(0, device=two.device)
    (answer,) = two.add(nothing_there, into)().tensors
    address = Address("worker 0", "store")
    two.until(two.server.call(address, "add", torch.empty(0), into=[torch.empty(0)]))
    assert answer is into
    return two.store.given[1], torch.empty(0)


@program()
def calls_of_one_peer_keep_their_order(fault):
    two = Two()
    waits = [two.add(values().to(two.device)) for _ in range(5)]
    plain = two.worker.call(Address("server 0", "store"), "look", into=[torch.empty(NUMEL)])
    (seen,) = two.until(plain).tensors
    for wait in waits:
        wait()
    return seen, values(5)


@program()
def a_cancelled_call_returns_its_buffers(fault):
    """More cancelled calls than buffers, before and after they have left."""
    two = Two()
    two.store.hold = True
    calls = []
    for number in range(6):
        room = torch.empty(NUMEL, device=two.device)
        address = Address("server 0", "store")
        calls.append(two.worker.call(address, "add", values(number).to(two.device), into=[room]))
        calls[-1].when_done(nothing)
    two.until_given(2)
    for each in calls:
        each.cancel()
    two.store.hold = False
    into = torch.empty(NUMEL, device=two.device)
    two.add(values(10).to(two.device), into)()
    return two.store.given[-1], values(10)


@program()
def pinned_memory_stays_as_it_is(fault):
    """Two buffers for each direction; the second one is taken where the first is still in use, as on a GPU."""
    two = Two()
    sizes = []
    for number in range(200):
        two.add(values(number).to(two.device))()
        sizes.append(two.transfers.pool.nbytes)
    assert max(sizes) <= 2 * SLOTS * ALIGNMENT
    return torch.tensor(sizes[100:]), torch.full((100,), sizes[100])


@program("event_left_out")
def a_service_with_a_device_is_called(fault):
    """Tensors of an incoming call are on the device, and so are those of its reply."""
    two = Two()
    if fault:
        two.transfers._side = Deaf(two.device)
    into = torch.empty(NUMEL)
    address = Address("worker 0", "store")
    for number in (1.0, 2.0):
        two.until(two.server.call(address, "add", values(number), into=[into]))
    where = {each.device.type for each in two.own.given}
    assert where == {two.device}
    return into, values(3)


@program()
def messages_between_two_nodes_are_on_the_device(fault):
    two = Two()
    into = torch.empty(NUMEL, device=two.device)
    two.server.send("worker 0", values(4)).when_done(nothing)
    two.until(two.worker.recv("server 0", into))
    back = torch.empty(NUMEL)
    two.worker.send("server 0", into * 2).when_done(nothing)
    two.until(two.server.recv("worker 0", back))
    return back, values(8)


@program("beside_without_an_event")
def work_beside_the_stream_is_sent(fault):
    """A message is encoded on the side stream, while the caller's stream goes on."""
    two = Two()
    if fault:
        two.transfers._side = Deaf(two.device)
    gradient = values().to(two.device) * 2
    with two.worker.overlapped(gradient):
        message = gradient * 3
    wait = two.add(message)
    busy = values().to(two.device).sum()
    wait()
    assert busy.item() > 0
    return two.store.given[1], values(6)


@program()
def a_step_waits_for_nothing(fault):
    """A push and a pull have no synchronization of the host."""
    two = Two()
    into = torch.empty(NUMEL, device=two.device)
    gradient = values().to(two.device)
    with target.synchronizations() as found:
        two.add(gradient, into)()
    return torch.tensor([float(found.total())]), torch.zeros(1)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    target.prepare()
    for name in names or PROGRAMS:
        run, faults = PROGRAMS[name]
        forms = faults if target.device_type() == "standin" else faults[:1]
        print(json.dumps([name, {fault: outcome(run, fault) for fault in forms}]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
