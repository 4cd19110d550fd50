"""Closed forms against rings and trees played message by message."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush

import pytest
from support.machines import placed

from dure.core.collective_cost import (
    COLLECTIVES,
    HEADER,
    Path,
    chunk_bytes,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.network import Network

PATH = Path(latency=1e-3, alpha=1e-4, bandwidth=1e6, beta=2e-7, gamma=0.0)
RANKS = range(1, 10)
LENGTHS = [0, 1, 3, 7, 16, 100, 1001]


def played_all_reduce(numel: int, ranks: int) -> tuple[list[int], list[int]]:
    """Elements that each rank sends and receives when the ring is played, and the sum is checked at every rank."""
    sizes = [n // 4 for n in chunk_bytes(numel, ranks)]
    held = [[Counter({i: 1}) for _ in range(ranks)] for i in range(ranks)]
    sent, received = [0] * ranks, [0] * ranks
    for phase, r in [(phase, r) for phase in (0, 1) for r in range(ranks - 1)]:
        moves = [((i + phase - r) % ranks, i, (i + 1) % ranks) for i in range(ranks)]
        packets = [held[i][chunk].copy() for chunk, i, _ in moves]
        for (chunk, i, j), packet in zip(moves, packets, strict=True):
            held[j][chunk] = packet if phase else held[j][chunk] + packet
            sent[i] += sizes[chunk]
            received[j] += sizes[chunk]
    everybody = Counter(range(ranks))
    assert all(chunk == everybody for chunks in held for chunk in chunks)
    return sent, received


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_all_reduce_counts_the_bytes_of_the_played_ring(numel: int, ranks: int) -> None:
    sent, received = played_all_reduce(numel, ranks)
    cost = ring_all_reduce(numel, ranks, PATH)
    assert cost.sent == tuple(4 * n for n in sent)
    assert cost.received == tuple(4 * n for n in received)
    assert sum(cost.sent) == 2 * (ranks - 1) * numel * 4
    assert cost.messages == (2 * (ranks - 1),) * ranks


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("numel", LENGTHS)
def test_halves_of_the_ring(numel: int, ranks: int) -> None:
    scatter, gather = ring_reduce_scatter(numel, ranks, PATH), ring_all_gather(numel, ranks, PATH)
    chunks = chunk_bytes(numel, ranks)
    assert scatter.sent == tuple(4 * numel - chunks[i] for i in range(ranks))
    assert scatter.received == tuple(4 * numel - chunks[i - 1] for i in range(ranks))
    assert gather.sent == gather.received == ((ranks - 1) * 4 * numel,) * ranks
    assert scatter.messages == gather.messages == (ranks - 1,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_broadcast_reaches_everybody_once(ranks: int) -> None:
    cost = tree_broadcast(50, ranks, PATH)
    assert sum(cost.messages) == ranks - 1
    assert cost.messages[0] == math.ceil(math.log2(ranks))
    assert sum(cost.sent) == sum(cost.received) == (ranks - 1) * 200
    assert cost.received[0] == 0
    assert cost.seconds == pytest.approx(math.ceil(math.log2(ranks)) * PATH.seconds(200))


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_one_rank_alone_costs_nothing(kind: str) -> None:
    assert COLLECTIVES[kind](100, 1, PATH, 4) == (0.0, (0,), (0,), (0,))


def test_a_barrier_is_a_header_per_round() -> None:
    cost = COLLECTIVES["barrier"](0, 5, PATH, 4)
    assert cost.seconds == pytest.approx(3 * PATH.seconds(HEADER))
    assert cost.sent == (3 * HEADER,) * 5


def test_adding_costs_gamma_while_reducing_only() -> None:
    adding = PATH._replace(gamma=1e-6)
    extra = ring_all_reduce(800, 4, adding).seconds - ring_all_reduce(800, 4, PATH).seconds
    assert extra == pytest.approx(3 * 800 * 1e-6)
    assert ring_all_gather(800, 4, adding) == ring_all_gather(800, 4, PATH)


class HeapKernel:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0

    def at(self, time: float, callback: Callable[[], None], /) -> None:
        self._sequence += 1
        heappush(self._heap, (time, self._sequence, callback))

    def run(self) -> None:
        while self._heap:
            self.now, _, callback = heappop(self._heap)
            callback()


def ring_network(ranks: int) -> tuple[HeapKernel, Network]:
    kernel = HeapKernel()
    link = Link(bandwidth=PATH.bandwidth, latency=PATH.latency)
    cluster = Cluster.uniform(ranks, link=link, alpha=PATH.alpha, beta=PATH.beta, gamma=0)
    return kernel, Network(cluster, kernel, placed(cluster))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_reduce_takes_as_long_as_its_messages_over_the_network(ranks: int) -> None:
    numel = 5000 * ranks
    kernel, network = ring_network(ranks)
    rounds = [0] * ranks

    def go(rank: int) -> None:
        if rounds[rank] < 2 * (ranks - 1):
            rounds[rank] += 1
            after = (rank + 1) % ranks
            network.send(rank, after, numel // ranks * 4, lambda: go(after), 0)

    for rank in range(ranks):
        go(rank)
    kernel.run()
    cost = ring_all_reduce(numel, ranks, network.path(range(ranks)))
    assert kernel.now == pytest.approx(cost.seconds, rel=1e-9)
    assert tuple(network.bytes_sent) == cost.sent


INSIDE = {"bandwidth": 4e6, "latency": 2e-4}


def hosted_network(per_host: int, hosts: int, **inside: float) -> tuple[HeapKernel, Network]:
    kernel = HeapKernel()
    link = Link(bandwidth=PATH.bandwidth, latency=PATH.latency)
    machines = Machines(count=hosts, workers=per_host, cores=32)
    cluster = Cluster(
        machines=[machines], link=link, inside={**INSIDE, **inside}, alpha=PATH.alpha, beta=PATH.beta, gamma=0
    )
    return kernel, Network(cluster, kernel, placed(cluster))


def play(kernel: HeapKernel, network: Network, rounds: list[list[tuple[int, int, int]]]) -> None:
    """Send the messages (sender, receiver, bytes) of each round once all of the round before have arrived."""
    waiting = len(rounds[0])

    def arrived() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting and len(rounds) > 1:
            play(kernel, network, rounds[1:])

    for src, dst, nbytes in rounds[0]:
        network.send(src, dst, nbytes, arrived, 0)


@pytest.mark.parametrize("slow_inside", [False, True])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 2, 1), (0, 1, 3, 2), (1, 3)])
def test_a_ring_over_hosts_of_two_workers_takes_as_long_as_its_messages(order, slow_inside: bool) -> None:
    """In order of hosts a card carries one message of a round in each direction; if hosts alternate, two."""
    kernel, network = hosted_network(2, 2, **({"bandwidth": 5e5} if slow_inside else {}))
    ranks, chunk = len(order), 20_000
    hops = [(order[i], order[(i + 1) % ranks], chunk) for i in range(ranks)]
    play(kernel, network, [hops] * (2 * (ranks - 1)))
    kernel.run()
    cost = network.cost("all_reduce", chunk * ranks, order)
    assert kernel.now == pytest.approx(cost.seconds, rel=1e-9)
    per_card = 2 if order in ((0, 2, 1, 3), (3, 0, 2, 1)) else 1
    over_cards = PATH.latency + PATH.alpha + chunk * (PATH.beta + per_card / PATH.bandwidth)
    inside = INSIDE["latency"] + PATH.alpha + chunk / 5e5
    slowest = max(over_cards, inside if slow_inside and ranks == 4 and per_card == 1 else 0.0)
    assert cost.seconds == pytest.approx(2 * (ranks - 1) * slowest, rel=1e-12)
    assert ring_all_gather(chunk // 4, ranks, network.paths(order)).seconds == pytest.approx(cost.seconds / 2)


@pytest.mark.parametrize(("per_host", "hosts"), [(2, 2), (4, 2), (3, 3), (2, 5), (6, 1), (1, 6)])
def test_a_broadcast_over_hosts_takes_as_long_as_its_messages(per_host: int, hosts: int) -> None:
    kernel, network = hosted_network(per_host, hosts)
    ranks = per_host * hosts
    rounds = [[(i, i + 2**r, 20_000) for i in range(2**r) if i + 2**r < ranks] for r in range((ranks - 1).bit_length())]
    play(kernel, network, rounds)
    kernel.run()
    cost = network.cost("broadcast", 20_000, range(ranks))
    assert kernel.now == pytest.approx(cost.seconds, rel=1e-9)
    assert cost.received == (0, *[20_000] * (ranks - 1))


def test_a_barrier_inside_a_host_does_not_wait_for_the_card() -> None:
    _, network = hosted_network(4, 2)
    inside = INSIDE["latency"] + PATH.alpha + HEADER / INSIDE["bandwidth"]
    assert network.cost("barrier", 0, range(4)).seconds == pytest.approx(2 * inside)
    across = PATH.latency + PATH.alpha + HEADER * (PATH.beta + 1 / PATH.bandwidth)
    assert network.cost("barrier", 0, (0, 4)).seconds == pytest.approx(across)


def test_without_shared_hosts_the_costs_are_those_of_one_path() -> None:
    _, network = hosted_network(2, 4)
    assert network.paths([0, 2, 4]) == network.path([0, 2, 4])
    assert network.paths([1, 7]) == network.path([1, 7])


SHARED = {
    "racks": {"racks": {"machines": 4, "oversubscription": 16, "latency": 2e-3}},
    "sites": {
        "sites": [{"machines": 4}, {"machines": 4}],
        "between": {"bandwidth": 5e5, "latency": 2e-3},
    },
}


def apart(workers: int = 1, **levels: object) -> tuple[HeapKernel, Network]:
    """Eight machines in two racks or at two sites, with cards of 1 MB/s."""
    kernel = HeapKernel()
    machines = Machines(count=8, workers=workers, cores=32)
    link, costs = Link(bandwidth=PATH.bandwidth, latency=PATH.latency), {"alpha": PATH.alpha, "beta": PATH.beta}
    cluster = Cluster(machines=[machines], link=link, gamma=0, inside=INSIDE, **costs, **levels)  # type: ignore[arg-type]
    return kernel, Network(cluster, kernel, placed(cluster))


def longest(messages: list[float], busy: list[float], rounds: int) -> float:
    """Seconds of `rounds` rounds of a ring: the longest way of a chunk that waits for one link in the other rounds."""
    ways = []
    for start, hops in itertools.product(range(len(messages)), range(1, rounds + 1)):
        way = [(start + hop) % len(messages) for hop in range(hops)]
        ways.append(sum(messages[i] for i in way) + (rounds - hops) * max(busy[i] for i in way))
    return max(ways)


@pytest.mark.parametrize("oversubscription", [1, 2, 8])
def test_a_ring_over_two_racks_has_its_closed_form(oversubscription: float) -> None:
    """An uplink of 4 cards / oversubscription has one message of a round, or four where racks alternate."""
    _, network = apart(racks={"machines": 4, "oversubscription": oversubscription})
    fixed, chunk, card = PATH.latency + PATH.alpha, 20_000, 1 / PATH.bandwidth
    for order, messages in ((range(8), 1), ((0, 4, 1, 5, 2, 6, 3, 7), 4)):
        share = max(card, messages * oversubscription / 4 * card)
        # In order, two of eight links are slower: they set the pace, and the last message also has its fixed part.
        fast, slow = (fixed + chunk * (PATH.beta + each) for each in (card, share))
        pace = slow if messages == 4 or share == card else chunk * share
        expected = 13 * pace + slow
        assert pace >= (2 * slow + 6 * fast) / 8 or share == card
        assert network.cost("all_reduce", 8 * chunk, order).seconds == pytest.approx(expected, rel=1e-12)
    within = network.cost("all_reduce", 4 * chunk, range(4))
    assert within.seconds == pytest.approx(6 * PATH.seconds(chunk), rel=1e-12)


def test_the_latency_of_a_line_counts_once_each_time_a_chunk_takes_it() -> None:
    """A chunk makes 14 hops round two sites of four, and four of these at most are between the sites."""
    line = {"bandwidth": 1e9, "latency": 0.5}
    _, network = apart(sites=[{"machines": 4}, {"machines": 4}], between=line)
    expected = 14 * PATH.seconds(20_000) + 4 * 0.5
    assert network.cost("all_reduce", 160_000, range(8)).seconds == pytest.approx(expected, rel=1e-12)
    gathered = network.cost("all_gather", 20_000, range(8)).seconds
    assert gathered == pytest.approx(7 * PATH.seconds(20_000) + 2 * 0.5, rel=1e-12)


@pytest.mark.parametrize("levels", SHARED)
@pytest.mark.parametrize("order", [range(8), (0, 4, 1, 5, 2, 6, 3, 7), (0, 1, 4, 5, 2, 3), (3, 4), (0, 1, 2, 5)])
@pytest.mark.parametrize("chunk", [5000, 20_000, 500_000])
def test_a_ring_over_shared_links_takes_as_long_as_its_messages(
    levels: str, order: tuple[int, ...], chunk: int
) -> None:
    """The uplink has a quarter of a card, the line half of one; each rank sends on what has arrived."""
    kernel, network = apart(**SHARED[levels])
    ranks = len(order)
    rounds = dict.fromkeys(order, 0)

    def send(place: int) -> None:
        here, after = order[place], (place + 1) % ranks
        if rounds[here] < 2 * (ranks - 1):
            rounds[here] += 1
            network.send(here, order[after], chunk, lambda: send(after), 0)

    for place in range(ranks):
        send(place)
    kernel.run()
    cost = network.cost("all_reduce", chunk * ranks, order)
    assert kernel.now == pytest.approx(cost.seconds, rel=1e-9)
    hops = [(order[i], order[(i + 1) % ranks]) for i in range(ranks)]
    crossing = sum(here < 4 <= there for here, there in hops)
    share = {"racks": 2.5e5, "sites": 5e5}[levels] / crossing
    shared = [(here < 4) != (there < 4) for here, there in hops]
    busy = [chunk / share if each else chunk / PATH.bandwidth for each in shared]
    fixed = PATH.latency + PATH.alpha + chunk * PATH.beta
    messages = [fixed + seconds + 2e-3 * each for seconds, each in zip(busy, shared, strict=True)]
    assert cost.seconds == pytest.approx(longest(messages, busy, 2 * (ranks - 1)), rel=1e-12)


@pytest.mark.parametrize("levels", SHARED)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_tree_over_shared_links_takes_as_long_as_its_messages(levels: str, workers: int) -> None:
    kernel, network = apart(workers, **SHARED[levels])
    ranks = 8 * workers
    rounds = [[(i, i + 2**r, 20_000) for i in range(2**r)] for r in range(ranks.bit_length() - 1)]
    play(kernel, network, rounds)
    kernel.run()
    assert kernel.now == pytest.approx(network.cost("broadcast", 20_000, range(ranks)).seconds, rel=1e-9)


def test_ranks_of_one_rack_have_the_costs_of_one_path() -> None:
    _, network = apart(**SHARED["racks"])
    assert network.paths([0, 2, 3]) == network.path([0, 2, 3])
    assert network.paths([5]) == network.path([5])
    assert network.cost("all_reduce", 4000, [5]).seconds == 0.0


def test_the_network_charges_and_counts_a_collective() -> None:
    _, network = ring_network(4)
    charged = network.cost("all_reduce", 10 * 8, [f"worker {i}" for i in (1, 2, 3)], itemsize=8)
    network.count(charged, [1, 2, 3])
    cost = ring_all_reduce(10, 3, PATH, itemsize=8)
    assert charged.seconds == cost.seconds
    assert network.bytes_sent == [0, *cost.sent]
    assert network.bytes_received == [0, *cost.received]
    assert network.messages == [0, 4, 4, 4]


def test_the_slowest_member_sets_the_pace() -> None:
    slow = Link(bandwidth=1e5, latency=0.1)
    cluster = Cluster(machines=[Machines(count=2), Machines(link=slow)], link=Link(bandwidth=1e6, latency=0.2))
    network = Network(cluster, HeapKernel(), placed(cluster))
    assert network.path([0, 2])[:3] == (0.2, cluster.alpha, 1e5)
    assert network.path([0, 1])[:3] == (0.2, cluster.alpha, 1e6)
