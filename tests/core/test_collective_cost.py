"""Closed forms against rings and trees played message by message."""

from __future__ import annotations

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


def test_the_network_charges_and_counts_a_collective() -> None:
    _, network = ring_network(4)
    names = [f"worker {i}" for i in (1, 2, 3)]
    seconds = network.collective("all_reduce", 10 * 8, names, itemsize=8).seconds
    cost = ring_all_reduce(10, 3, PATH, itemsize=8)
    assert seconds == cost.seconds
    assert network.bytes_sent == [0, *cost.sent]
    assert network.bytes_received == [0, *cost.received]
    assert network.messages == [0, 4, 4, 4]


def test_the_slowest_member_sets_the_pace() -> None:
    slow = Link(bandwidth=1e5, latency=0.1)
    cluster = Cluster(machines=[Machines(count=2), Machines(link=slow)], link=Link(bandwidth=1e6, latency=0.2))
    network = Network(cluster, HeapKernel(), placed(cluster))
    assert network.path([0, 2])[:3] == (0.2, cluster.alpha, 1e5)
    assert network.path([0, 1])[:3] == (0.2, cluster.alpha, 1e6)
