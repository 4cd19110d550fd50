"""The network model against brute-force fluids, closed forms and its own rules."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machines import placed

from dure.core.collective_cost import HEADER, SMALL
from dure.runtime.virtual.cluster import Cluster, Link, Machines, ServerMachines
from dure.runtime.virtual.network import Network, Pair, PlainMessage, weights
from dure.runtime.virtual.sharing import SharingQueue, Transfer

MIB = 2**20


class HeapKernel:
    """The least kernel that the network needs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, callback: Callable[[], None], /) -> None:
        assert time >= self.now
        self.events += 1
        heappush(self._heap, (time, self.events, callback))

    def run(self, until: float = float("inf")) -> None:
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback = heappop(self._heap)
            callback()


class Wires:
    """A network of plain machines, and when each message arrived."""

    def __init__(
        self,
        workers: int = 4,
        bandwidth: float = 1e6,
        latency: float = 0.0,
        alpha: float = 0.0,
        beta: float = 0.0,
        servers: int = 0,
        **options: object,
    ) -> None:
        link = Link(bandwidth=bandwidth, latency=latency)
        colocated = bool(options.pop("colocated", False))
        per_host = int(options.pop("per_host", 1))  # type: ignore[call-overload]
        cores = int(options.pop("cores", 4))  # type: ignore[call-overload]
        rng = np.random.default_rng(options.pop("seed", 0))  # type: ignore[call-overload]
        machines = Machines(count=workers // per_host, workers=per_host, cores=cores)
        self.cluster = Cluster(machines=(machines,), link=link, alpha=alpha, beta=beta, **options)  # type: ignore[arg-type]
        self.kernel = HeapKernel()
        self.network = Network(self.cluster, self.kernel, placed(self.cluster, servers, colocated=colocated), rng)
        self.arrived: dict[object, float] = {}

    def send(self, src: str | int, dst: str | int, wire: int, name: object, at: float = 0.0) -> None:
        """Send `wire` bytes, header included, at a time."""

        def deliver() -> None:
            assert name not in self.arrived
            self.arrived[name] = self.kernel.now

        self.kernel.at(at, lambda: self.network.send(src, dst, wire - HEADER, deliver))

    def run(self, until: float = float("inf")) -> dict[object, float]:
        self.kernel.run(until)
        return self.arrived


def sides_of_cards(src: int, dst: int) -> tuple[str, str]:
    return f"out of {src}", f"into {dst}"


def fluid(
    messages: list[tuple[float, int, int, int]],
    rates: dict[str, float],
    sides: Callable[[int, int], tuple[str, ...]] = sides_of_cards,
) -> list[float]:
    """When each (start, src, dst, bytes) has left, by stepping a fluid from change to change: O(n^2), no tricks.

    Messages of one pair follow one another; each side of each link is shared equally by the messages in it.
    """
    left = [dict.fromkeys(sides(m[1], m[2]), float(m[3])) for m in messages]
    ends: list[float | None] = [None] * len(messages)
    now = 0.0
    while any(end is None for end in ends):
        busy: dict[tuple[int, int], int] = {}
        for i, (start, src, dst, _) in enumerate(messages):
            if ends[i] is None and start <= now:
                busy.setdefault((src, dst), i)
        inside: dict[str, list[int]] = {}
        for i in busy.values():
            for side in left[i]:
                inside.setdefault(side, []).append(i)
        steps = [left[i][side] * len(ids) / rates[side] for side, ids in inside.items() for i in ids]
        steps += [m[0] - now for m in messages if m[0] > now]
        step = min(steps)
        now += step
        for side, ids in inside.items():
            for i in ids:
                left[i][side] -= step * rates[side] / len(ids)
                if left[i][side] <= 1e-6:
                    del left[i][side]
        for i in busy.values():
            if not left[i]:
                ends[i] = now
    return [end for end in ends if end is not None]


traffic = st.lists(
    st.tuples(
        st.integers(0, 400).map(lambda i: i / 100),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(SMALL + 1, 3_000_000),
    ).filter(lambda m: m[1] != m[2]),
    min_size=1,
    max_size=24,
)


@settings(max_examples=150, deadline=None)
@given(traffic, st.lists(st.sampled_from([2.5e5, 1e6, 4e6]), min_size=4, max_size=4))
def test_sharing_is_that_of_a_fluid(messages: list[tuple[float, int, int, int]], bandwidths: list[float]) -> None:
    messages.sort(key=lambda m: m[0])
    machines = [Machines(link=Link(bandwidth=rate, latency=0)) for rate in bandwidths]
    cluster = Cluster(machines=machines, alpha=0, beta=0)
    wires = Wires()
    wires.network = Network(cluster, wires.kernel, placed(cluster))
    for i, (start, src, dst, wire) in enumerate(messages):
        wires.send(src, dst, wire, i, at=start)
    arrived = wires.run()
    rates = {side: rate for i, rate in enumerate(bandwidths) for side in sides_of_cards(i, i)}
    assert [arrived[i] for i in range(len(messages))] == pytest.approx(fluid(messages, rates), rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(traffic)
def test_no_card_carries_more_than_its_bandwidth_nor_rests_with_work(
    messages: list[tuple[float, int, int, int]],
) -> None:
    """All into machine 0: the last arrives when a card that never rests while something is there would be done."""
    wires = Wires(workers=len(messages) + 1)
    done = 0.0
    for i, (start, _, _, wire) in enumerate(sorted(messages)):
        wires.send(i + 1, 0, wire, i, at=start)
        done = max(done, start) + wire / 1e6
    arrived = wires.run()
    assert max(arrived.values()) == pytest.approx(done, rel=1e-9)
    for first, last in itertools.combinations_with_replacement(sorted(arrived.values()), 2):
        inside = [m for i, m in enumerate(sorted(messages)) if m[0] >= first and arrived[i] <= last]
        assert sum(m[3] for m in inside) <= (last - first) * 1e6 * (1 + 1e-9) + 1e-6


@pytest.mark.parametrize("senders", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("inwards", [True, False])
def test_k_at_once_take_k_times_as_long(senders: int, inwards: bool) -> None:
    wires = Wires(workers=senders + 1, latency=0.25)
    for i in range(1, senders + 1):
        wires.send(*((i, 0) if inwards else (0, i)), MIB, i)
    assert list(wires.run().values()) == pytest.approx([0.25 + senders * MIB / 1e6] * senders, rel=1e-12)


@pytest.mark.parametrize("wire", [HEADER, 1000, SMALL, SMALL + 1, 10 * MIB])
def test_alone_a_message_takes_its_closed_form(wire: int) -> None:
    beta = 3e-7
    wires = Wires(latency=0.01, alpha=0.002, beta=beta)
    wires.send("worker 1", "worker 2", wire, "it")
    handling = wire * beta if wire > SMALL else 0.0
    assert wires.run()["it"] == pytest.approx(0.01 + 0.002 + wire / 1e6 + handling, rel=1e-12)


def test_the_slower_card_and_the_larger_latency_count() -> None:
    fast, slow = Link(bandwidth="80 Mbit/s", latency="1 ms"), Link(bandwidth="8 Mbit/s", latency="30 ms")
    cluster = Cluster(
        machines=[Machines(link=fast), Machines(link=slow)], servers=ServerMachines(link=fast), alpha=0, beta=0
    )
    for wire, (src, dst) in itertools.product((100, MIB), (("worker 0", "worker 1"), ("worker 1", "server 0"))):
        wires = Wires()
        wires.network = Network(cluster, wires.kernel, placed(cluster, 1))
        wires.send(src, dst, wire, "it")
        assert wires.run()["it"] == pytest.approx(0.03 + wire / 1e6, rel=1e-12)


def test_directions_do_not_disturb_each_other() -> None:
    wires = Wires()
    wires.send(0, 1, MIB, "there")
    wires.send(1, 0, MIB, "back")
    assert wires.run() == pytest.approx({"there": MIB / 1e6, "back": MIB / 1e6})


def test_small_messages_cost_one_event_and_slow_nobody() -> None:
    wires = Wires()
    wires.send(1, 0, MIB, "bulk")
    for i in range(100):
        wires.send(2, 0, SMALL, i)
    wires.run()
    assert wires.arrived["bulk"] == pytest.approx(MIB / 1e6)
    assert wires.arrived[0] == pytest.approx(SMALL / 1e6)
    alone = Wires()
    alone.send(2, 0, SMALL, "it")
    alone.run()
    assert alone.kernel.events == 2  # the test's own, and the arrival


def test_a_header_counts_and_may_be_given() -> None:
    wires = Wires()
    wires.network.send(0, 1, 1000, lambda: wires.arrived.setdefault("it", wires.kernel.now), 64 + 48)
    assert wires.run()["it"] == pytest.approx(1112 / 1e6)
    assert wires.network.counters("worker 0").bytes_sent == 1112
    assert wires.network.counters("worker 1").bytes_received == 1112


sizes = st.lists(st.sampled_from([HEADER, 500, SMALL, SMALL + 1, 50_000, MIB]), min_size=2, max_size=12)


@settings(max_examples=100, deadline=None)
@given(sizes, st.lists(st.integers(0, 30), min_size=12, max_size=12), st.integers(1, 2), st.booleans())
def test_a_pair_keeps_its_order(wires_of: list[int], gaps: list[int], cores: int, colocated: bool) -> None:
    wires = Wires(alpha=0.001, beta=1e-6, latency=0.005, cores=cores, servers=1, colocated=colocated)
    at = 0.0
    for i, wire in enumerate(wires_of):
        at += gaps[i] / 100
        wires.send("worker 0", "server 0", wire, i, at=at)
        wires.send(2, "server 0", MIB, ("other", i), at=at)
    wires.run()
    order = [name for name in wires.arrived if isinstance(name, int)]
    assert order == list(range(len(wires_of)))


def test_names_and_numbers_are_the_same_pair() -> None:
    wires = Wires()
    wires.send("worker 0", "worker 1", MIB, "large")
    wires.send(0, 1, HEADER, "small")
    assert list(wires.run()) == ["large", "small"]


def test_messages_of_a_pair_follow_one_another() -> None:
    """One connection is one share, however much it has to say."""
    wires = Wires()
    for i in range(4):
        wires.send(1, 0, MIB, i)
    wires.send(2, 0, MIB, "other")
    arrived = wires.run()
    assert arrived[0] == pytest.approx(2 * MIB / 1e6)
    assert arrived["other"] == pytest.approx(2 * MIB / 1e6)
    assert arrived[3] == pytest.approx(5 * MIB / 1e6)


@pytest.mark.parametrize(("cores", "rounds"), [(1, 6), (2, 3), (4, 2), (6, 1)])
def test_handling_takes_a_core(cores: int, rounds: int) -> None:
    """Six messages arrive at once at a host: its cores serve them in turn."""
    wires = Wires(workers=7, bandwidth=1e12, alpha=1.0, cores=cores)
    for i in range(6):
        wires.send(i + 1, 0, MIB, i)
    assert max(wires.run().values()) == pytest.approx(rounds, rel=1e-5)


def occupied(network: Network, node: str, seconds: float) -> float:
    """Take seconds of a core of the machine of `node`. Return the time at which they end."""
    return network._processors[network._machine[network.node(node)]].reserve(network.kernel.now, seconds)


def test_a_request_waits_for_a_free_core() -> None:
    wires = Wires(cores=2)
    assert [occupied(wires.network, "worker 1", 1.0) for _ in range(5)] == [1, 1, 2, 2, 3]
    assert occupied(wires.network, "worker 2", 1.0) == 1


def test_colocated_nodes_use_memory_and_not_the_card() -> None:
    wires = Wires(workers=2, servers=2, colocated=True, memory_bandwidth=1e8, alpha=0.5)
    wires.send("worker 0", "server 0", 50_000_000, "here")
    wires.send("worker 0", "server 1", MIB, "there")
    arrived = wires.run()
    assert arrived["here"] == pytest.approx(1.0)
    assert arrived["there"] == pytest.approx(MIB / 1e6 + 0.5)
    counters = wires.network.counters("worker 0")
    assert (counters.bytes_local, counters.bytes_sent, counters.messages) == (50_000_000, MIB, 2)
    assert wires.network.counters("server 0").bytes_received == 0
    assert wires.network.counters("server 1").bytes_received == MIB


def test_colocated_messages_follow_one_another() -> None:
    wires = Wires(workers=1, servers=1, colocated=True, memory_bandwidth=1e8)
    wires.send("worker 0", "server 0", 50_000_000, "first")
    wires.send("worker 0", "server 0", 50_000_000, "second")
    assert wires.run() == pytest.approx({"first": 0.5, "second": 1.0})


def test_a_crash_frees_the_cores_unless_another_lives_there() -> None:
    wires = Wires(workers=2, servers=1, colocated=True, cores=1)
    occupied(wires.network, "worker 0", 100.0)
    occupied(wires.network, "worker 1", 100.0)
    for i in (0, 1):
        wires.network.drop(f"worker {i}")
        wires.network.restore(f"worker {i}")
    assert occupied(wires.network, "worker 0", 1.0) == 101
    assert occupied(wires.network, "worker 1", 1.0) == 1


def test_colocated_nodes_share_a_card() -> None:
    wires = Wires(workers=3, servers=1, colocated=True)
    wires.send(1, "worker 0", MIB, "to the worker")
    wires.send(2, "server 0", MIB, "to the server")
    assert list(wires.run().values()) == pytest.approx([2 * MIB / 1e6] * 2)


# ---- racks and sites

LINE = {"bandwidth": 5e5, "latency": 0.5}
TWO_SITES = {"sites": [{"machines": 2}, {"machines": 2}], "between": LINE}


def racks(machines: int, oversubscription: float, latency: float = 0.0) -> dict[str, object]:
    return {"racks": {"machines": machines, "oversubscription": oversubscription, "latency": latency}}


@pytest.mark.parametrize("wire", [1000, SMALL, MIB])
def test_alone_a_message_takes_the_slowest_link_and_all_latencies(wire: int) -> None:
    beta = 3e-7
    slow = {"latency": 0.01, "alpha": 0.002, "beta": beta}
    handling = 0.002 + (wire * beta if wire > SMALL else 0.0)
    for levels, latency, bandwidth in (
        (racks(2, 8, 0.1), 0.11, 2.5e5),
        (racks(2, 2, 0.1), 0.11, 1e6),
        (TWO_SITES, 0.51, 5e5),
        (TWO_SITES | racks(1, 4, 0.1), 0.61, 2.5e5),
    ):
        wires = Wires(**slow, **levels)  # type: ignore[arg-type]
        wires.send("worker 1", "worker 2", wire, "it")
        assert wires.run()["it"] == pytest.approx(latency + handling + wire / bandwidth, rel=1e-12)


@pytest.mark.parametrize("senders", [1, 2, 3, 8])
@pytest.mark.parametrize("levels", ["racks", "sites"])
def test_k_over_one_uplink_take_k_times_as_long(senders: int, levels: str) -> None:
    """From machines to as many others; the messages back and those within a rack are not in their way."""
    sites = {"sites": [{"machines": 10}] * 2, "between": {**LINE, "latency": 0}}
    chosen = {"racks": racks(10, 20), "sites": sites}
    wires = Wires(workers=20, latency=0.25, **chosen[levels])  # type: ignore[arg-type]
    for i in range(senders):
        wires.send(i, 10 + i, MIB, i)
    wires.send(10, 0, MIB, "back")
    wires.send(18, 19, MIB, "within")
    arrived = wires.run()
    assert [arrived[i] for i in range(senders)] == pytest.approx([0.25 + senders * MIB / 5e5] * senders, rel=1e-12)
    assert arrived["back"] == pytest.approx(0.25 + MIB / 5e5, rel=1e-12)
    assert arrived["within"] == pytest.approx(0.25 + MIB / 1e6, rel=1e-12)


def test_messages_to_several_racks_share_the_uplink_of_theirs_and_no_other() -> None:
    """Racks of two with uplinks of half a card: two out of rack 0 take twice as long, one from rack 3 does not."""
    wires = Wires(workers=8, **racks(2, 4))  # type: ignore[arg-type]
    wires.send(0, 2, MIB, "to rack 1")
    wires.send(1, 4, MIB, "to rack 2")
    wires.send(6, 3, MIB, "from rack 3")
    alone = MIB / 5e5
    # Into rack 1 come two: they share its downlink, as the first two share an uplink.
    assert wires.run() == pytest.approx({"to rack 1": 2 * alone, "to rack 2": 2 * alone, "from rack 3": 2 * alone})
    wires = Wires(workers=8, **racks(2, 4))  # type: ignore[arg-type]
    wires.send(0, 2, MIB, "to rack 1")
    wires.send(1, 4, MIB, "to rack 2")
    wires.send(6, 5, MIB // 2, "from rack 3")
    assert wires.run()["from rack 3"] == pytest.approx(alone)


def test_pairs_of_sites_have_lines_of_their_own() -> None:
    pairs = [(0, 1, 1e5, 0.1), (0, 2, 2e5, 0.2), (1, 2, 4e5, 0.4)]
    between = [{"sites": [a, b], "bandwidth": rate, "latency": late} for a, b, rate, late in pairs]
    wires = Wires(workers=3, sites=[{"machines": 1}] * 3, between=between)
    for a, b, _, _ in pairs:
        wires.send(a, b, MIB, (a, b))
        wires.send(b, a, MIB, (b, a))
    expected = {key: late + MIB / rate for a, b, rate, late in pairs for key in ((a, b), (b, a))}
    assert wires.run() == pytest.approx(expected)


def test_a_server_of_its_own_is_beside_the_racks_of_the_first_site() -> None:
    wires = Wires(servers=1, **racks(1, 4), **TWO_SITES)  # type: ignore[arg-type]
    wires.send("worker 0", "server 0", MIB, "near")
    assert wires.run()["near"] == pytest.approx(MIB / 2.5e5)
    wires.send("server 0", "worker 3", MIB, "far", at=10.0)
    assert wires.run()["far"] == pytest.approx(10.5 + MIB / 2.5e5)


RACKED = racks(2, 3)


def sides_of_racks(src: int, dst: int) -> tuple[str, ...]:
    """The sides of the links that a message takes between machines in racks of two."""
    return (*sides_of_cards(src, dst), *((f"up {src // 2}", f"down {dst // 2}") if src // 2 != dst // 2 else ()))


@settings(max_examples=100, deadline=None)
@given(traffic, st.lists(st.sampled_from([2.5e5, 1e6, 4e6]), min_size=4, max_size=4))
def test_racks_share_their_uplinks_as_a_fluid(
    messages: list[tuple[float, int, int, int]], bandwidths: list[float]
) -> None:
    messages.sort(key=lambda m: m[0])
    wires = Wires()
    machines = [Machines(link=Link(bandwidth=rate, latency=0)) for rate in bandwidths]
    wires.network = Network(c := Cluster(machines=machines, alpha=0, beta=0, **RACKED), wires.kernel, placed(c))  # type: ignore[arg-type]
    for i, (start, src, dst, wire) in enumerate(messages):
        wires.send(src, dst, wire, i, at=start)
    arrived = wires.run()
    rates = {side: rate for i, rate in enumerate(bandwidths) for side in sides_of_cards(i, i)}
    for rack in (0, 1):
        rates |= dict.fromkeys((f"up {rack}", f"down {rack}"), sum(bandwidths[2 * rack : 2 * rack + 2]) / 3)
    left = fluid(messages, rates, sides_of_racks)
    assert [arrived[i] for i in range(len(messages))] == pytest.approx(left, rel=1e-9, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(traffic)
def test_no_uplink_carries_more_than_its_bandwidth_nor_rests_with_work(
    messages: list[tuple[float, int, int, int]],
) -> None:
    """All from one rack to the other, each between cards of its own, which are wide."""
    count = len(messages)
    wires = Wires(workers=2 * count, **racks(count, count))  # type: ignore[arg-type]
    done = 0.0
    for i, (start, _, _, wire) in enumerate(sorted(messages)):
        wires.send(i, count + i, wire, i, at=start)
        done = max(done, start) + wire / 1e6  # an uplink is as wide as a card
    assert max(wires.run().values()) == pytest.approx(done, rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(traffic)
def test_racks_that_are_not_oversubscribed_change_nothing(messages: list[tuple[float, int, int, int]]) -> None:
    ends = []
    for levels in ({}, racks(2, 1)):
        wires = Wires(latency=0.01, alpha=0.001, beta=1e-7, **levels)  # type: ignore[arg-type]
        for i, (start, src, dst, wire) in enumerate(messages):
            wires.send(src, dst, wire, i, at=start)
        ends.append(wires.run())
    assert ends[0] == ends[1]


def test_a_crash_frees_the_uplink() -> None:
    """Cards of 1 MB/s and an uplink of half of that: the other message has half of it until the crash, then all."""
    wires = Wires(**racks(2, 4))  # type: ignore[arg-type]
    wires.send(0, 2, MIB, "lost")
    wires.send(1, 3, MIB, "it")
    wires.kernel.at(1.0, lambda: wires.network.drop(0))
    assert wires.run() == pytest.approx({"it": 1.0 + (MIB - 2.5e5) / 5e5})


# ---- several workers on one machine


def sides_of_hosts(src: int, dst: int) -> tuple[str, str]:
    """The sides of the links that a message takes on hosts of two workers."""
    if src // 2 == dst // 2:
        return f"out of worker {src}", f"into worker {dst}"
    return f"out of host {src // 2}", f"into host {dst // 2}"


@settings(max_examples=100, deadline=None)
@given(traffic)
def test_workers_of_a_host_share_its_card_and_have_links_of_their_own_inside(
    messages: list[tuple[float, int, int, int]],
) -> None:
    messages.sort(key=lambda m: m[0])
    wires = Wires(per_host=2, inside={"bandwidth": 4e6, "latency": 0})
    for i, (start, src, dst, wire) in enumerate(messages):
        wires.send(src, dst, wire, i, at=start)
    arrived = wires.run()
    rates = {side: 1e6 for host in (0, 1) for side in sides_of_hosts(2 * host, 2 * (1 - host))}
    rates |= {side: 4e6 for worker in range(4) for side in sides_of_hosts(worker, worker)}
    left = fluid(messages, rates, sides_of_hosts)
    assert [arrived[i] for i in range(len(messages))] == pytest.approx(left, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("inwards", [True, False])
def test_two_workers_of_a_host_share_its_card_and_take_twice_as_long(inwards: bool) -> None:
    wires = Wires(workers=6, per_host=2, latency=0.25)
    for here, there in ((0, 2), (1, 4)):
        wires.send(*((there, here) if inwards else (here, there)), MIB, here)
    assert list(wires.run().values()) == pytest.approx([0.25 + 2 * MIB / 1e6] * 2, rel=1e-12)


@pytest.mark.parametrize("wire", [HEADER, SMALL, SMALL + 1, 10 * MIB])
def test_a_message_inside_a_host_takes_the_inner_link_and_not_the_card(wire: int) -> None:
    """No core handles its bytes, and its neighbor's message over the card is as fast as alone."""
    wires = Wires(latency=0.3, alpha=0.002, beta=3e-7, per_host=2, inside={"bandwidth": 5e6, "latency": 0.01})
    wires.send(0, 1, wire, "inside")
    wires.send(0, 2, MIB, "over the card")
    arrived = wires.run()
    assert arrived["inside"] == pytest.approx(0.01 + 0.002 + wire / 5e6, rel=1e-12)
    assert arrived["over the card"] == pytest.approx(0.3 + 0.002 + MIB * (3e-7 + 1 / 1e6), rel=1e-12)
    counters = wires.network.counters("worker 0")
    assert (counters.bytes_local, counters.bytes_sent, counters.messages) == (wire, MIB, 2)
    assert wires.network.counters("worker 1").bytes_received == 0


def test_each_worker_has_an_inner_link_with_two_directions() -> None:
    def times(*hops: tuple[int, int]) -> dict[object, float]:
        wires = Wires(workers=3, per_host=3, inside={"bandwidth": MIB, "latency": 0})
        for src, dst in hops:
            wires.send(src, dst, MIB, (src, dst))
        return wires.run()

    assert times((0, 1), (1, 0)) == pytest.approx({(0, 1): 1, (1, 0): 1})
    assert times((1, 0), (1, 2)) == pytest.approx({(1, 0): 2, (1, 2): 2})
    assert times((0, 2), (1, 2)) == pytest.approx({(0, 2): 2, (1, 2): 2})


def test_a_server_is_reached_inside_the_host_of_the_worker_beside_it() -> None:
    """By that worker in memory, by the other worker of the host over the inner link, by all others over the card."""
    inside = {"bandwidth": 1e7, "latency": 0}
    wires = Wires(servers=4, colocated=True, per_host=2, memory_bandwidth=1e8, inside=inside)
    for worker in range(4):
        wires.send(f"worker {worker}", "server 1", MIB, worker)
    times = {1: MIB / 1e8, 0: MIB / 1e7, 2: 2 * MIB / 1e6, 3: 2 * MIB / 1e6}
    assert wires.run() == pytest.approx(times)


@pytest.mark.parametrize("faster", [1, 10])
@pytest.mark.parametrize("pulls", [False, True])
def test_incast_of_two_workers_per_host_fills_the_server_s_card_or_the_hosts(faster: int, pulls: bool) -> None:
    """Four workers on two hosts and one server. A card like the hosts' carries 4 messages, one ten times as fast frees
    the hosts' cards to carry 2 each."""
    server = ServerMachines(link=Link(bandwidth=faster * 1e6, latency=0))
    wires = Wires(workers=4, servers=1, per_host=2)
    wires.cluster = wires.cluster.changed(servers=server)
    wires.network = Network(wires.cluster, wires.kernel, placed(wires.cluster, 1))
    for worker in range(4):
        ends = (f"worker {worker}", "server 0")
        wires.send(*(ends[::-1] if pulls else ends), MIB, worker)
    assert list(wires.run().values()) == pytest.approx([(4 if faster == 1 else 2) * MIB / 1e6] * 4)


def test_a_crash_frees_the_inner_links_and_the_card() -> None:
    wires = Wires(workers=4, per_host=2, inside={"bandwidth": 1e6, "latency": 0})
    for dst in (1, 2):
        wires.send(0, dst, 3 * MIB, ("lost", dst))
    wires.send(1, 3, MIB, "over the shared card")
    crash(wires, 0, at=0.1)
    wires.send(1, 0, MIB, "to the crashed worker", at=0.2)
    assert wires.run() == pytest.approx({"over the shared card": 0.05 + MIB / 1e6})
    assert not wires.network.counters("worker 0").bytes_received


def crash(wires: Wires, node: str | int, at: float) -> None:
    wires.kernel.at(at, lambda: wires.network.drop(node))


def test_what_had_not_left_a_crashed_node_is_lost_and_its_share_is_free() -> None:
    wires = Wires()
    wires.send(1, 0, 1_000_000, "from the dead")
    wires.send(1, 0, 100, "behind it")
    wires.send(2, 0, 1_000_000, "from the living")
    crash(wires, 1, 0.5)
    # Half a second at half the rate, the rest alone.
    assert wires.run() == pytest.approx({"from the living": 1.25})


def test_what_has_left_arrives_though_its_sender_is_dead() -> None:
    wires = Wires(latency=0.3)
    wires.send(1, 0, 100_000, "left")
    wires.send(1, 2, 100, "small")
    crash(wires, 1, 0.25)
    assert wires.run() == pytest.approx({"small": 0.3001, "left": 0.4})


def test_what_left_the_sender_but_not_the_wire_arrives() -> None:
    """Three into one card: each has left its sender at 1 s, and all are in at 3 s."""
    machines = [Machines(count=4)]
    cluster = Cluster(machines=machines, link=Link(bandwidth=1e6, latency=0), alpha=0, beta=0)
    wires = Wires()
    wires.network = Network(cluster, wires.kernel, placed(cluster))
    for i in (1, 2, 3):
        wires.send(i, 0, 1_000_000, i)
    crash(wires, 1, 1.5)
    assert wires.run() == pytest.approx({1: 3.0, 2: 3.0, 3: 3.0})


@pytest.mark.parametrize("when", [0.1, 1.5])
def test_what_was_on_its_way_to_a_crashed_node_vanishes_and_frees_its_sender(when: float) -> None:
    wires = Wires(latency=0.2)
    wires.send(1, 0, 1_000_000, "to the dead")
    wires.send(1, 0, HEADER, "behind it")
    wires.send(2, 0, HEADER, "small to the dead")
    wires.send(1, 3, 1_000_000, "to the living")
    crash(wires, 0, when)
    arrived = wires.run()
    arrived.pop("small to the dead", None)
    assert arrived == pytest.approx({"to the living": 1 + when / 2 + 0.2})
    assert wires.network.counters(0).bytes_received == (0 if when < 0.2 else HEADER)


def test_a_new_incarnation_gets_only_what_is_sent_to_it() -> None:
    wires = Wires(latency=0.5)
    wires.send(1, 0, HEADER, "to the one before")
    wires.send(2, 0, 1_000_000, "also")
    wires.send(2, 0, 1_000_000, "behind it")
    crash(wires, 0, 0.1)
    wires.send(1, 0, HEADER, "while nobody is there", at=0.15)
    wires.send(0, 1, HEADER, "from nobody", at=0.15)
    wires.kernel.at(0.2, lambda: wires.network.restore("worker 0"))
    wires.send(2, 0, 1_000_000, "to the new one", at=0.3)
    wires.send(0, 1, 1_000_000, "from the new one", at=0.3)
    arrived = wires.run()
    assert arrived == pytest.approx({"to the new one": 1.8, "from the new one": 1.8})
    assert wires.network.counters(1).messages == 2


@settings(max_examples=100, deadline=None)
@given(traffic, st.integers(0, 3), st.integers(0, 500).map(lambda i: i / 100))
def test_a_crash_at_any_time_leaves_the_queues_sound(
    messages: list[tuple[float, int, int, int]], victim: int, when: float
) -> None:
    """Survivors' messages all arrive, once, and afterwards the cards are as free as new."""
    wires = Wires()
    for i, (start, src, dst, wire) in enumerate(messages):
        wires.send(src, dst, wire, i, at=start)
    crash(wires, victim, when)
    arrived = wires.run()
    living = {i for i, m in enumerate(messages) if victim not in m[1:3]}
    before = {i for i, end in arrived.items() if end <= when}
    assert living <= set(arrived)
    left = set(arrived) - living - before
    assert all(messages[i][1] == victim and messages[i][0] < when for i in left if isinstance(i, int))
    wires.network.restore(victim)
    later = wires.kernel.now + 1
    wires.send((victim + 1) % 4, victim, 1_000_000, "in", at=later)
    wires.send(victim, (victim + 1) % 4, 1_000_000, "out", at=later)
    assert wires.run()["in"] == wires.run()["out"] == pytest.approx(later + 1)


def test_counters_add_up() -> None:
    wires = Wires()
    for i, (src, dst) in enumerate(itertools.permutations(range(4), 2)):
        wires.send(src, dst, 1000 * (i + 1), i)
    wires.run()
    network = wires.network
    assert sum(network.bytes_sent) == sum(network.bytes_received) == sum(1000 * (i + 1) for i in range(12))
    assert network.messages == [3, 3, 3, 3]


def test_many_at_once_cost_few_events() -> None:
    """An arrival that cannot be the first to end asks for no event: one per message, and two per message to end."""
    wires = Wires(workers=513)
    for i in range(512):
        wires.network.send(i + 1, 0, MIB, lambda: None)
    wires.run()
    assert wires.kernel.events <= 4 * 512


def test_stale_events_breed_no_others() -> None:
    """Each message is the next to end, sooner than was asked for: every event before it is stale."""
    wires = Wires(workers=257)
    for i in range(256):
        wires.send(i + 1, 0, 4_000_000_000 // (i + 1) ** 2, i, at=i / 1000)
    wires.run()
    assert list(wires.arrived) == list(range(255, -1, -1))
    assert wires.kernel.events <= 7 * 256


def test_the_same_traffic_gives_the_same_bits() -> None:
    def run() -> dict[object, float]:
        wires = Wires(alpha=1e-4, beta=1e-9, latency=1e-3, cores=1)
        for i in range(200):
            wires.send(i % 4, (i * 7 + 1) % 4, 1 + (i * 7919) % 100_000 + HEADER, i, at=(i * 31 % 17) / 50)
        return wires.run()

    assert list(run().items()) == list(run().items())


# ---- unequal shares


def weighted_fluid(arrivals: list[tuple[float, int, float]], bandwidth: float) -> list[float]:
    """When each (start, bytes, weight) has left a queue that is shared by weight, by stepping from change to change."""
    left = [float(size) for _, size, _ in arrivals]
    ends = [0.0] * len(arrivals)
    now = 0.0
    while any(left):
        inside = [i for i, (start, _, _) in enumerate(arrivals) if left[i] and start <= now]
        total = sum(arrivals[i][2] for i in inside)
        rates = {i: bandwidth * arrivals[i][2] / total for i in inside}
        steps = [left[i] / rate for i, rate in rates.items()] + [start - now for start, _, _ in arrivals if start > now]
        now += min(steps)
        for i, rate in rates.items():
            left[i] -= min(steps) * rate
            if left[i] <= 1e-6:
                left[i], ends[i] = 0.0, now
    return ends


arrivals = st.lists(
    st.tuples(st.integers(0, 400).map(lambda i: i / 100), st.integers(1, 3_000_000), st.floats(0.1, 10.0)),
    min_size=1,
    max_size=24,
)


@settings(max_examples=100, deadline=None)
@given(arrivals)
def test_shares_by_weight_are_those_of_a_fluid(given: list[tuple[float, int, float]]) -> None:
    kernel = HeapKernel()
    ended: dict[int, float] = {}
    queue = SharingQueue(kernel, 1e6, 1, lambda transfer: ended.setdefault(number[id(transfer)], kernel.now))
    network, pair = Wires().network, Pair(0, 1)
    transfers = [Transfer(PlainMessage(network, pair, size, lambda: None), weight) for _, size, weight in given]
    number = {id(transfer): i for i, transfer in enumerate(transfers)}
    for transfer, (start, _, _) in zip(transfers, given, strict=True):
        transfer.pending = 1
        kernel.at(start, partial(queue.add, transfer))
    kernel.run()
    found = [ended[i] for i in range(len(given))]
    assert found == pytest.approx(weighted_fluid(given, 1e6), rel=1e-9, abs=1e-8)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_at_once_end_by_their_weights_and_the_last_on_time(seed: int) -> None:
    drawn = weights(0.5, np.random.default_rng(seed))
    first, second = next(drawn), next(drawn)
    wires = Wires(unfairness=0.5, seed=seed, latency=0.25)
    wires.send(1, 0, MIB, 0)
    wires.send(2, 0, MIB, 1)
    arrived = wires.run()
    assert min(arrived.values()) == pytest.approx(0.25 + (first + second) / max(first, second) * MIB / 1e6)
    assert max(arrived.values()) == pytest.approx(0.25 + 2 * MIB / 1e6)
    assert (arrived[0] < arrived[1]) == (first > second)


def test_alone_a_message_takes_as_long_whatever_its_weight() -> None:
    for seed in range(5):
        wires = Wires(latency=0.01, unfairness=1.0, seed=seed)
        wires.send(1, 2, MIB, "it")
        assert wires.run()["it"] == pytest.approx(0.01 + MIB / 1e6, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(traffic, st.integers(0, 9))
def test_unequal_shares_lose_no_bandwidth_and_repeat(messages: list[tuple[float, int, int, int]], seed: int) -> None:
    """All into machine 0, twice: the last arrives when a card that never rests would be done."""
    runs = []
    for _ in range(2):
        wires = Wires(workers=len(messages) + 1, unfairness=0.7, seed=seed)
        done = 0.0
        for i, (start, _, _, wire) in enumerate(sorted(messages)):
            wires.send(i + 1, 0, wire, i, at=start)
            done = max(done, start) + wire / 1e6
        runs.append(wires.run())
        assert max(runs[-1].values()) == pytest.approx(done, rel=1e-9)
    assert runs[0] == runs[1]


def test_weights_have_the_spread_that_was_asked_for() -> None:
    drawn = np.log(list(itertools.islice(weights(0.3, np.random.default_rng(0)), 20_000)))
    assert (drawn.mean(), drawn.std()) == pytest.approx((0.0, 0.3), abs=0.01)
    assert set(itertools.islice(weights(0.0), 1000)) == {1.0}
