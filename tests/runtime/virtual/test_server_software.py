"""Software of servers, machines that push as one, and limits of input: closed forms, exact bytes, and whole runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from oracles.test_closed_forms import first_scene
from support.machines import placed
from support.wording import raising

import dure
from dure.errors import ClusterError
from dure.job.job import load_job
from dure.planner.bound import least_seconds
from dure.planner.candidates import Scene
from dure.planner.timing import setup_in, timed
from dure.run.prebuilt import Callbacks
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Link, Machines, ServerMachines
from dure.runtime.virtual.compute import Constant
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network, Pair
from dure.runtime.virtual.server_software import CompletedVariable, ServerSoftware

HEADER = 64
CARD = 1e8


class Tensors:
    """A push or a pull of `nbytes`, and when it arrived."""

    def __init__(self, kernel: Kernel, pair: Pair, nbytes: int) -> None:
        self._kernel, self.pair, self.nbytes = kernel, pair, nbytes
        self.wire, self.life, self.arrived = nbytes + HEADER, 0, -1.0

    def arrive(self) -> None:
        assert self.arrived < 0
        self.arrived = self._kernel.now


class Exchange:
    """Workers on machines, and servers with variables of `sizes` elements; the network costs the card alone."""

    def __init__(
        self,
        workers: int,
        sizes: Sequence[int],
        each: int = 1,
        servers: int = 1,
        completed: Sequence[CompletedVariable] = (),
        **software: object,
    ) -> None:
        link = Link(bandwidth=CARD, latency=0.0)
        machines = (Machines(count=workers // each, workers=each),)
        described = ServerMachines(**software)  # type: ignore[arg-type]
        cluster = Cluster(machines=machines, link=link, servers=described, alpha=0.0, beta=0.0, gamma=0.0)
        self.kernel = Kernel(0.0)
        self.network = Network(cluster, self.kernel, placed(cluster, servers))
        variables = {f"server {i}": sizes for i in range(servers)}
        early = dict.fromkeys(variables, completed) if completed else None
        self.software = ServerSoftware(self.network, variables, together=True, completed=early)
        self.sent: list[Tensors] = []

    def send(self, source: str, target: str, nbytes: int) -> None:
        self.sent.append(Tensors(self.kernel, self.network.route(source, target), nbytes))
        self.software.carry(self.sent[-1])

    def ends(self) -> list[float]:
        """The arrivals of all messages, once nothing is under way."""
        self.kernel.run()
        return [message.arrived for message in self.sent]


@pytest.mark.parametrize(("variable", "rate"), [(1e-3, None), (0.0, 20e6), (2e-4, 50e6), (50e-3, 1e9)])
@pytest.mark.parametrize("there", [True, False])
def test_one_worker_and_one_server_are_queues_in_series(variable: float, rate: float | None, there: bool) -> None:
    """p + (V - 1) max(p, w) + w + p for V equal variables, of a push as of a pull."""
    count, nbytes = 5, 400_000
    exchange = Exchange(1, [nbytes // 4] * count, variable=variable, process=rate)
    exchange.send(*("worker 0", "server 0") if there else ("server 0", "worker 0"), count * nbytes)
    process, wire = variable + nbytes / (rate or 1e99), (nbytes + HEADER) / CARD
    expected = process + (count - 1) * max(process, wire) + wire + process
    assert exchange.ends() == [pytest.approx(expected, rel=1e-9)]
    assert exchange.network.counters(0 if there else 1).bytes_sent == count * (nbytes + HEADER)


@pytest.mark.parametrize(("threads", "rate"), [(2, 20e6), (5, 20e6), (3, 2e9)])
def test_threads_pack_several_variables_at_once_and_one_unpacks(threads: int, rate: float) -> None:
    count, nbytes = 5, 400_000
    exchange = Exchange(1, [nbytes // 4] * count, process=rate, threads=threads)
    exchange.send("worker 0", "server 0", count * nbytes)
    process, wire = nbytes / rate, (nbytes + HEADER) / CARD
    left = unpacked = 0.0
    for number in range(count):
        packed = (1 + number // threads) * process
        left = max(left, packed) + wire
        unpacked = max(unpacked, left) + process
    assert exchange.ends() == [pytest.approx(unpacked, rel=1e-9)]


def test_unequal_variables_wait_in_their_order() -> None:
    """The largest one goes through process, card and process as a whole: it decides the seconds."""
    sizes, rate = [10_000, 500_000, 20_000], 20e6
    exchange = Exchange(1, sizes, process=rate)
    exchange.send("worker 0", "server 0", 4 * sum(sizes))
    packed = left = unpacked = 0.0
    for elements in sizes:
        packed += 4 * elements / rate
        left = max(left, packed) + (4 * elements + HEADER) / CARD
        unpacked = max(unpacked, left) + 4 * elements / rate
    assert exchange.ends() == [pytest.approx(unpacked, rel=1e-9)]


@pytest.mark.parametrize(("workers", "rate"), [(2, 50e6), (4, 50e6), (4, 2e9)])
def test_workers_share_the_process_of_a_server(workers: int, rate: float) -> None:
    """Pushes begin with p + K w. A slow process then unpacks K V variables, a fast one the last K after the card."""
    count, nbytes = 4, 1_000_000
    exchange = Exchange(workers, [nbytes // 4] * count, process=rate)
    for worker in range(workers):
        exchange.send(f"worker {worker}", "server 0", count * nbytes)
    process, wire = nbytes / rate, (nbytes + HEADER) / CARD
    if process > wire:
        expected = process + workers * wire + workers * count * process
    else:
        expected = process + workers * count * wire + workers * process
    assert max(exchange.ends()) == pytest.approx(expected, rel=1e-9)


def test_small_variables_travel_with_their_neighbors_and_cost_their_number() -> None:
    """Three pieces of more than 4 KiB: what is left at the end travels with the last."""
    sizes = [10, 2000, 5, 5, 3000, 1500, 7]
    exchange = Exchange(1, sizes, variable=1.0)
    exchange.send("worker 0", "server 0", 4 * sum(sizes))
    (end,) = exchange.ends()
    assert exchange.network.counters(0).messages == 3
    assert exchange.network.counters(0).bytes_sent == 4 * sum(sizes) + 3 * HEADER
    # pieces of 2, 3 and 2 variables: packed at 2, 5 and 7; unpacked one after another
    assert end == pytest.approx(10.0, rel=1e-4)


DONE = (0.4, 0.5, 0.55, 0.9, 1.0)
"""Shares of a step after which backward has completed its variables."""


@pytest.mark.parametrize("rate", [20e6, 2e9])
@pytest.mark.parametrize("seconds", [0.01, 0.1, 1.0])
def test_variables_that_leave_during_backward_pass_the_queues_once_they_are_complete(
    rate: float, seconds: float
) -> None:
    sizes = [100_000, 3_000_000, 400_000, 800_000, 20_000]
    exchange = Exchange(
        1, [1], completed=[CompletedVariable(*each) for each in zip(sizes, DONE, strict=True)], process=rate
    )
    exchange.software.begin(0, 0.0, seconds)
    exchange.kernel.at(seconds, lambda: exchange.send("worker 0", "server 0", sum(sizes)))
    packed = left = unpacked = 0.0
    for nbytes, done in zip(sizes, DONE, strict=True):
        packed = max(packed, done * seconds) + nbytes / rate
        left = max(left, packed) + (nbytes + HEADER) / CARD
        unpacked = max(unpacked, left) + nbytes / rate
    assert exchange.ends() == [pytest.approx(unpacked, rel=1e-9)]
    assert exchange.network.counters(0).bytes_sent == sum(sizes) + len(sizes) * HEADER


@pytest.mark.parametrize("rate", [20e6, 2e9])
def test_a_variable_is_pulled_as_soon_as_all_workers_have_pushed_it(rate: float) -> None:
    """Of two workers, the slower decides: a pull passes the server's process, its card, and the worker's process."""
    nbytes, slow, done = 400_000, 2.0, (0.25, 0.75)
    completed = [CompletedVariable(nbytes, each) for each in done]
    exchange = Exchange(2, [1], completed=completed, process=rate, overlap=True, early_pulls=True)
    for worker, span in enumerate((1.0, slow)):
        exchange.software.begin(worker, 0.0, span)
    exchange.kernel.at(slow, lambda: exchange.send("server 0", "worker 0", 2 * nbytes))
    process, wire = nbytes / rate, (nbytes + HEADER) / CARD
    summed = done[1] * slow + process + wire + process  # the first variable has gone by then
    pulled = summed + process + wire + process  # that of the other worker is packed after it
    assert exchange.ends() == [pytest.approx(max(slow, pulled), rel=1e-9)]
    assert exchange.network.counters("server 0").bytes_sent == 4 * (nbytes + HEADER)


def test_early_pulls_hide_what_backward_leaves_time_for() -> None:
    seconds = [
        timed(scene(servers=ServerMachines(overlap=True, early_pulls=early, per_machine=per)), "bsp ps").seconds
        for per in (False, True)
        for early in (False, True)
    ]
    assert seconds[1] < seconds[0]
    assert seconds[3] < seconds[2]


def test_pulls_are_early_only_where_pushes_are() -> None:
    with raising(ClusterError, "write overlap: true, too"):
        ServerMachines(early_pulls=True)


def test_a_machine_sums_a_variable_once_its_slower_worker_has_it() -> None:
    nbytes, seconds = 2_000_000, (1.0, 1.5)
    completed = [CompletedVariable(nbytes, 0.5), CompletedVariable(nbytes, 1.0)]
    exchange = Exchange(2, [1], each=2, completed=completed, per_machine=True)
    for worker, span in enumerate(seconds):
        exchange.software.begin(worker, 0.0, span)
        exchange.kernel.at(span, partial(exchange.send, f"worker {worker}", "server 0", 2 * nbytes))
    inside = exchange.network.cluster.inside
    summed = inside.latency + nbytes / 2 / inside.bandwidth
    expected = 1.5 + summed + (nbytes + HEADER) / CARD  # the first variable has left by then
    assert exchange.ends() == [pytest.approx(expected, rel=1e-9)] * 2
    assert exchange.network.counters(0).bytes_sent == 2 * (nbytes + HEADER)


def test_pushes_during_backward_leave_the_last_variable_alone() -> None:
    """A slow card: all bytes follow each other from the first variable on. A fast one: the last variable decides."""
    for bandwidth, sooner in ((2e6, 0.2), (1e9, 0.0)):
        after, during = (
            timed(scene(servers=ServerMachines(overlap=overlap), bandwidth=bandwidth), "bsp ps").seconds
            for overlap in (False, True)
        )
        assert during < after
        assert after - during > sooner * 0.05
    for strategy in ("downpour ps", "bsp ps fp16", "averaging:period=2 ps"):  # these push something else
        one, other = (timed(scene(servers=ServerMachines(overlap=x)), strategy).seconds for x in (False, True))
        assert one == other


@pytest.mark.parametrize("each", [2, 3])
@pytest.mark.parametrize("software", [{}, {"process": 40e6}])
def test_machines_push_as_one_and_the_card_has_their_bytes_once(each: int, software: dict[str, float]) -> None:
    nbytes, machines = 1_200_000, 2
    exchange = Exchange(machines * each, [nbytes // 4], each=each, per_machine=True, **software)
    for worker in range(machines * each):
        exchange.send(f"worker {worker}", "server 0", nbytes)
    ends = exchange.ends()
    inside = exchange.network.cluster.inside
    # k - 1 rounds of n / k inside, then a message of each machine into the server's card
    summed = (each - 1) * (inside.latency + nbytes / each / inside.bandwidth)
    process = nbytes / software.get("process", 1e99)
    expected = summed + process + machines * (nbytes + HEADER) / CARD + machines * process
    assert max(ends) == pytest.approx(expected, rel=1e-6)
    over_cards = [exchange.network.counters(worker).bytes_sent for worker in range(machines * each)]
    assert sum(over_cards) == machines * (nbytes + HEADER)
    assert [sum(over_cards[m * each : (m + 1) * each]) for m in range(machines)] == [nbytes + HEADER] * machines
    local = [exchange.network.counters(worker).bytes_local for worker in range(machines * each)]
    assert local == [nbytes * (each - 1) // each] * machines * each


def test_a_machine_pulls_as_one_and_gathers_inside() -> None:
    nbytes, each = 1_200_000, 2
    exchange = Exchange(4, [nbytes // 4], each=each, per_machine=True)
    for worker in range(4):
        exchange.send("server 0", f"worker {worker}", nbytes)
    inside = exchange.network.cluster.inside
    gathered = (each - 1) * (inside.latency + nbytes / each / inside.bandwidth)
    assert exchange.ends() == [pytest.approx(2 * (nbytes + HEADER) / CARD + gathered, rel=1e-9)] * 4
    assert exchange.network.counters("server 0").bytes_sent == 2 * (nbytes + HEADER)


@pytest.mark.parametrize("source", ["worker 0", "server 0"])
@pytest.mark.parametrize("crashed", [0, 1])
@pytest.mark.parametrize("at", [0.5, 2.5])
def test_a_crash_loses_what_a_process_has_not_packed_or_unpacked(source: str, crashed: int, at: float) -> None:
    """The pieces are packed at 1 and 2 s and unpacked at 2 and 3 s: only a sender's crash at 2.5 s comes too late."""
    exchange = Exchange(1, [50_000] * 2, variable=1.0)
    exchange.send(source, "server 0" if source == "worker 0" else "worker 0", 400_000)

    def crash() -> None:
        exchange.network.drop(crashed)
        exchange.network.restore(crashed)

    exchange.kernel.at(at, crash)
    (end,) = exchange.ends()
    sender = exchange.network.node(source)
    assert (end > 0) == (crashed == sender and at > 2)
    exchange.sent.clear()
    exchange.send(source, "server 0" if source == "worker 0" else "worker 0", 400_000)
    begun = exchange.kernel.now
    assert exchange.ends() == [pytest.approx(begun + 3, abs=0.01)]  # a new incarnation has an empty queue


# ---- whole runs

STEADY = Constant(seconds=0.05)


def scene(per: int = 2, machines: int = 2, bandwidth: float = CARD, **rest: object) -> Scene:
    kinds = (Machines(count=machines, workers=per, compute=STEADY, input=rest.pop("input", None)),)
    cluster = Cluster(machines=kinds, link=Link(bandwidth=bandwidth, latency=1e-4), **rest)  # type: ignore[arg-type]
    return first_scene("slices").on(cluster)


PLAIN = {
    "bsp ps": scene(),
    "bsp ps:shards=2": scene(),
    "bsp ps:shards=2,split=layer": scene(),
    "bsp ps:shards=4,colocated=true": scene(),
    "averaging:period=2 ps": scene(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", PLAIN)
def test_the_cards_of_a_run_carry_the_bytes_of_machines(strategy: str) -> None:
    """As many steps of two workers on each machine push and pull half of the bytes, and end earlier."""
    sent, seconds = [], []
    for per_machine in (False, True):
        here = scene(servers=ServerMachines(per_machine=per_machine))
        segment = VirtualSegment(VirtualRun(setup_in(here, strategy, steps=4), here.cluster, Callbacks()), None)
        segment.run()
        network = segment.runtime.network
        counted = [network.counters(name) for name in network.names]
        small = sum(each.messages for each in counted) * 1000
        sent.append(sum(each.bytes_sent for each in counted))
        seconds.append(segment.runtime.kernel.now)
        segment.end()
        if not per_machine:
            # of colocated servers, those on the machine of a worker use no card: two pushes of four
            assert small < sent[0] / 10
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)
    assert seconds[1] < 0.75 * seconds[0]


def test_servers_apply_an_update_of_each_machine() -> None:
    """K n gamma of memory for K workers; M n gamma for M machines, and (k - 1) / k n gamma for the sums inside."""
    slow = {"bandwidth": 1e12, "gamma": 5e-8}
    each, machine = (timed(scene(servers=ServerMachines(per_machine=x), **slow), "bsp ps") for x in (False, True))
    nbytes = scene().model.replica.params.nbytes
    assert each.seconds - machine.seconds == pytest.approx((4 - 2 - 1 / 2) * nbytes * slow["gamma"], rel=0.05)


def test_accelerators_push_as_one_over_their_inner_links() -> None:
    nbytes = scene().model.replica.params.nbytes
    seconds = []
    for per_machine in (False, True):
        kinds = (Machines(count=2, gpus=4, compute=STEADY),)
        cluster = Cluster(machines=kinds, link=Link(bandwidth=2e7), servers=ServerMachines(per_machine=per_machine))
        seconds.append(timed(first_scene("slices").on(cluster), "bsp ps").seconds)
    # push and pull of 8 workers, or of 2 machines, over the server's card
    assert seconds == [pytest.approx(0.05 + 2 * each * nbytes / 2e7, rel=0.05) for each in (8, 2)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp ps", "bsp ps:shards=2", "bsp ps:shards=2,colocated=true fp16"])
def test_software_changes_no_parameter(strategy: str) -> None:
    """Machines that push as one, and messages in pieces, are seconds and bytes: the values are those of each worker."""
    ends = []
    for servers in (ServerMachines(), ServerMachines(variable="50 us", process="1 GB/s", per_machine=True)):
        cluster = Cluster(machines=(Machines(count=2, workers=2),), servers=servers)
        ends.append(dure.train("digits-mlp", strategy=strategy, on=cluster, steps=8, batch_size=16).summary())
    assert ends[0]["params_sha256"] == ends[1]["params_sha256"]
    assert ends[0]["seconds"] != ends[1]["seconds"]


def test_a_crash_in_the_middle_of_a_push_loses_its_pieces() -> None:
    events = [
        {"at": "3 ms", "kind": "crash", "worker": 1},
        {"at": "90 ms", "kind": "join", "worker": 1},
        {"at": "4 ms", "kind": "pause", "worker": 0, "for": "2 ms"},
    ]
    cluster = Cluster(machines=(Machines(count=2),), servers=ServerMachines(process="10 MB/s"), events=events)
    run = dure.train("digits-mlp:hidden=512", strategy="downpour ps", on=cluster, steps=20, batch_size=16)
    assert run.summary()["steps"] == 20


@pytest.mark.parametrize("machines", [1, 2, 4])
def test_a_step_over_servers_takes_the_seconds_of_its_queues(machines: int) -> None:
    """The "slices" job has four variables, with small neighbors. The process of a server of several workers is never
    idle: it packs for the last worker while the first one computes and pushes.
    """
    rate, free = 30e6, {"alpha": 0.0, "beta": 0.0, "gamma": 0.0, "header": 0, "field": 0}
    here = scene(per=1, machines=machines, bandwidth=1e12, servers=ServerMachines(process=rate), **free)
    nbytes = here.model.replica.params.nbytes
    expected = 2 * machines * nbytes / rate if machines > 1 else 0.05 + 2 * (nbytes + nbytes / 4) / rate
    assert timed(here, "bsp ps").seconds == pytest.approx(expected, rel=0.02)


INPUTS = [
    ("2000 samples/s", "bsp"),
    ("500 samples/s", "bsp"),
    ("500 samples/s", "bsp ps"),
    ("500 samples/s", "downpour ps"),
]


@pytest.mark.parametrize(("rate", "strategy"), INPUTS)
def test_a_step_takes_as_long_as_its_computation_and_messages_or_its_input(rate: str, strategy: str) -> None:
    """The maximum, no sum: a machine loads the next mini-batches of its two workers beside this one."""
    free, limited = timed(scene(), strategy).seconds, timed(scene(input=rate), strategy).seconds
    loading = 32 * 2 / float(rate.split()[0])
    assert limited == pytest.approx(max(free, loading), rel=0.01)


@pytest.mark.parametrize("strategy", ["bsp 1f1b:stages=2,micro=4", "bsp pipedream:stages=2", "bsp tensor:ways=4"])
def test_the_first_workers_of_copies_load_their_samples(strategy: str) -> None:
    """Two copies on two machines load at both; one copy over all workers loads all samples at the first."""
    here = scene(input="100 samples/s", bandwidth=1e9)
    loading = 128 / (100 if "ways" in strategy else 200)
    assert timed(here, strategy).seconds == pytest.approx(loading, rel=0.02)
    assert least_seconds(here, strategy) == pytest.approx(loading)


def test_neighbors_share_the_input_of_their_machine() -> None:
    machines = (Machines(count=1, workers=3, input=30), Machines(count=2, workers=4, input=12), Machines(count=1))
    cluster = Cluster(machines=machines)
    assert [cluster.loading(worker) for worker in (0, 2, 3, 10, 11)] == [0.1, 0.1, 1 / 3, 1 / 3, 0.0]
    # copies of four begin at workers 0, 4 and 8: one on each machine; copies of two at five of these
    assert [cluster.loading(worker, 4) for worker in (0, 4, 8, 1)] == [1 / 30, 1 / 12, 1 / 12, 0.0]
    assert [cluster.loading(worker, 2) for worker in (0, 2, 4, 6, 8, 10)] == [
        1 / 15,
        1 / 15,
        1 / 6,
        1 / 6,
        1 / 6,
        1 / 6,
    ]


def test_slices_are_not_sent_while_a_worker_waits_for_data() -> None:
    """Backward is a share of the computation alone: the wait for data hides no message."""
    here = scene(input="200 samples/s", bandwidth=2e8)
    free = timed(scene(bandwidth=2e8), "bsp").seconds
    assert 0.06 < free < 0.5 * timed(here, "bsp").seconds
    segment = VirtualSegment(VirtualRun(setup_in(here, "bsp"), here.cluster, Callbacks()), None)
    segment.run()
    last, nodes = segment.runtime.kernel.now, segment.runtime.nodes
    assert last - nodes["worker 0"].loaded == pytest.approx(free, rel=0.01)
    segment.end()


@pytest.mark.parametrize("strategy", ["bsp", "bsp ps:colocated=true"])
def test_workers_of_other_machines_wait_for_the_data_of_one(strategy: str) -> None:
    """The first mini-batch is there, so waits begin in the second step, and those of the others behind it."""
    kinds = (Machines(count=3, compute=STEADY), Machines(compute=STEADY, input="100 samples/s"))
    here = Scene(load_job("digits-mlp"), Cluster(machines=kinds, link=Link(bandwidth=1e8)), 4 * 32)
    assert timed(here, strategy).seconds == pytest.approx(0.32, rel=0.002)


KEYS: dict[str, dict[str, object]] = {
    "one for a machine": {"servers": ServerMachines(per_machine=True), "per": 4},
    "slow processes": {"servers": ServerMachines(variable="1 ms", process="50 MB/s")},
    "all": {"servers": ServerMachines(variable="1 ms", process="50 MB/s", per_machine=True), "input": "600 samples/s"},
    "input": {"input": "600 samples/s", "bandwidth": 1e9},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KEYS)
def test_no_strategy_is_faster_than_its_bound(name: str) -> None:
    here = scene(**{"bandwidth": 2e7, **KEYS[name]})  # type: ignore[arg-type]
    for strategy in (*PLAIN, "bsp", "k-sync:k=3 ps", "downpour ps:shards=2", "bsp ps fp16"):
        least = least_seconds(here, strategy)
        assert timed(here, strategy).seconds >= 0.97 * least, strategy
        assert least >= 32 * 2 / 600 - 1e-9 or "input" not in KEYS[name]


def test_what_is_not_given_changes_nothing() -> None:
    cluster = Cluster(machines=(Machines(count=2, workers=2),))
    given = Cluster(
        machines=(Machines(count=2, workers=2, input="3000 samples/s"),),
        servers=ServerMachines(variable="50 us", process="1 GB/s"),
    )
    assert given.basis() == cluster.basis()
    assert torch.tensor([cluster.loading(0), given.loading(0) * 1500]).tolist() == [0.0, 1.0]
    segment = VirtualSegment(VirtualRun(setup_in(scene(), "bsp ps"), scene().cluster, Callbacks()), None)
    segment.run()
    assert segment.runtime.software is None
    segment.end()
