"""Collectives written from sends: the sum in every bit, the bytes and the seconds of their closed forms, no hang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from oracles.forms.collectives import form_of, hosts_of
from oracles.forms.messages import Wire
from support.machines import placed
from support.runs import resolved
from support.wording import raising

from dure.core.node import Ghost, Operation
from dure.core.vectors import equal_ranges
from dure.errors import PeerLost, StrategyError
from dure.run.strategy import Strategy, make
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.network import Network
from dure.runtime.virtual.runtime import VirtualRuntime
from dure.topology.collective.choice import Collective
from dure.topology.collective.message_group import SentGroup, algorithm_of

SIZES = range(1, 10)
LENGTHS = [0, 1, 7, 100]
ALGORITHMS = [
    Collective("ring"),
    Collective("tree"),
    Collective("halving-doubling"),
    Collective("all-to-all"),
    *(Collective("hierarchical", per_host) for per_host in (1, 2, 3, 4)),
]
KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]
DIVISIBLE = 2520 * 4
"""A length that 1 .. 9 and 16 divide."""


class Virtual:
    """`size` workers on one machine each, or on `hosts` of so many workers, and their group."""

    def __init__(self, topology: Collective, size: int, *, hosts: Sequence[int] = (), **costs: Any) -> None:
        costs = {"alpha": 3e-5, "beta": 2e-10, "gamma": 5e-10, **costs}
        link = costs.pop("link", Link(bandwidth=1e8, latency=2e-4))
        machines = [Machines(workers=count, cores=16) for count in hosts] or [Machines(count=size)]
        cluster = Cluster(machines=machines, link=link, **costs)
        homes = [cluster.machine_of(rank) for rank in range(size)]
        self.runtime = VirtualRuntime(cluster, lambda kernel: Network(cluster, kernel, placed(cluster)), None, seed=0)
        self.nodes = [self.runtime.node(f"worker {rank}", rank) for rank in range(size)]
        self.groups = [SentGroup(node, range(size), algorithm_of(topology, homes), node.meter) for node in self.nodes]
        self.path = Wire(*self.runtime.network.path(range(size)), cluster.small)
        inner = cluster.inside
        self.inside = self.path._replace(latency=inner.latency, bandwidth=inner.bandwidth, beta=0.0)

    def all(self, call: Callable[[SentGroup, int], Operation[Any]]) -> list[Any]:
        """What `call` gives at each rank, all of them at once."""
        operations = [call(group, rank) for rank, group in enumerate(self.groups)]
        self.runtime.kernel.run()
        return [operation.result() for operation in operations]

    @property
    def counts(self) -> list[tuple[int, int, int]]:
        """Bytes sent and received, headers apart, and messages, of each rank."""
        network = self.runtime.network
        return [(n.payload_sent, n.payload_received, network.counters(n.name).messages) for n in self.nodes]


def values(size: int, numel: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """One vector per rank, of quarters: sums are exact in every order."""
    draw = np.random.default_rng(size * 1000 + numel)
    return [torch.tensor(draw.integers(-64, 65, numel) / 4, dtype=dtype) for _ in range(size)]


def call_of(kind: str, given: list[Any]) -> Callable[[SentGroup, int], Operation[Any]]:
    def call(group: SentGroup, rank: int) -> Operation[Any]:
        if kind == "barrier":
            return group.barrier()
        if kind == "broadcast":
            return group.broadcast(given[rank], 0)
        operation: Operation[Any] = getattr(group, kind)(given[rank])
        return operation

    return call


def same(found: torch.Tensor, expected: np.ndarray) -> None:
    assert found.numpy().tobytes() == expected.tobytes()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("topology", ALGORITHMS, ids=str)
def test_every_collective_is_numpys_in_every_bit(topology, size):
    for numel in LENGTHS:
        for dtype in (torch.float32, torch.int32):
            given = values(size, numel, dtype)
            total = np.sum([each.numpy() for each in given], axis=0, dtype=given[0].numpy().dtype)
            run = Virtual(topology, size)
            for found in run.all(lambda group, rank, given=given: group.all_reduce(given[rank].clone())):
                same(found, total)
            scattered = run.all(lambda group, rank, given=given: group.reduce_scatter(given[rank]))
            for found, (start, stop) in zip(scattered, equal_ranges(numel, size), strict=True):
                same(found, total[start:stop])
            for rows in run.all(lambda group, rank, given=given: group.all_gather(given[rank])):
                assert len(rows) == size
                for found, one in zip(rows, given, strict=True):
                    same(found, one.numpy())
            for root in {0, size // 2, size - 1}:
                for found in run.all(lambda g, rank, given=given, root=root: g.broadcast(given[rank].clone(), root)):
                    same(found, given[root].numpy())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", ALGORITHMS, ids=str)
def test_all_ranks_end_with_the_same_bits_where_sums_are_not_exact(topology):
    draw = torch.Generator().manual_seed(3)
    for size in SIZES:
        given = [torch.randn(101, generator=draw) for _ in range(size)]
        one, *others = Virtual(topology, size).all(
            lambda group, rank, given=given: group.all_reduce(given[rank].clone())
        )
        assert all(torch.equal(one, other) for other in others)
        assert torch.allclose(one, torch.stack(given).sum(dim=0), atol=1e-5)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", ALGORITHMS, ids=str)
def test_bytes_messages_and_seconds_are_the_closed_forms(topology, kind):
    for size in SIZES:
        for numel in (0, 5, 3001, DIVISIBLE, 16 * DIVISIBLE):
            run = Virtual(topology, size)
            hosts = hosts_of(size, topology.per_host) if topology.per_host else ()
            cost = form_of(topology.algorithm, kind, hosts)(numel, size, run.path, 4)
            run.all(call_of(kind, [Ghost(numel) for _ in range(size)]))
            assert run.counts == list(zip(cost.sent, cost.received, cost.messages, strict=True)), (size, numel)
            taken = run.runtime.kernel.now
            exact = kind in ("all_gather", "broadcast", "barrier") or numel in (0, DIVISIBLE, 16 * DIVISIBLE)
            queues = topology.algorithm == "all-to-all" and kind not in ("broadcast", "barrier")
            if queues and size > 2 and numel > 1000:
                assert 0.9 * cost.seconds <= taken <= cost.seconds, (size, numel)
            elif exact or topology.algorithm in ("ring", "tree"):
                assert taken == pytest.approx(cost.seconds, rel=1e-9, abs=1e-15), (size, numel)
            else:
                assert taken <= cost.seconds * (1 + 1e-9), (size, numel)
                assert taken >= cost.seconds * 0.98 - 2 * run.path.message(), (size, numel)


HOSTS = [(2, 2), (4, 4), (2, 2, 2), (3, 3, 3), (2, 4), (4, 2), (3, 1), (1, 1, 1), (5,), (2, 3, 4)]


EVEN = [hosts for hosts in HOSTS if len(set(hosts)) == 1]


@pytest.mark.parametrize("hosts", EVEN, ids=str)
def test_a_torus_gives_numpys_sum_in_every_bit(hosts):
    size, topology = sum(hosts), Collective("torus")
    for numel in LENGTHS:
        given = values(size, numel)
        total = np.sum([each.numpy() for each in given], axis=0, dtype=np.float32)
        run = Virtual(topology, size, hosts=hosts)
        for found in run.all(lambda group, rank, given=given: group.all_reduce(given[rank].clone())):
            same(found, total)
        scattered = run.all(lambda group, rank, given=given: group.reduce_scatter(given[rank]))
        for found, (start, stop) in zip(scattered, equal_ranges(numel, size), strict=True):
            same(found, total[start:stop])
        for rows in run.all(lambda group, rank, given=given: group.all_gather(given[rank])):
            for found, one in zip(rows, given, strict=True):
                same(found, one.numpy())
        for root in {0, size - 1}:
            for found in run.all(lambda g, rank, given=given, root=root: g.broadcast(given[rank].clone(), root)):
                same(found, given[root].numpy())


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
@pytest.mark.parametrize("hosts", EVEN, ids=str)
def test_a_torus_over_machines_takes_its_closed_form(hosts, kind):
    size = sum(hosts)
    for numel in (0, 5, 3001, DIVISIBLE, 16 * DIVISIBLE):
        run = Virtual(Collective("torus"), size, hosts=hosts, inside={"bandwidth": 5e9, "latency": 1e-5})
        cost = form_of("torus", kind, hosts, run.inside)(numel, size, run.path, 4)
        run.all(call_of(kind, [Ghost(numel) for _ in range(size)]))
        assert run.counts == list(zip(cost.sent, cost.received, cost.messages, strict=True)), numel
        taken = run.runtime.kernel.now
        if kind == "all_gather" or numel not in (5, 3001):
            assert taken == pytest.approx(cost.seconds, rel=1e-9, abs=1e-15), numel
        else:
            assert cost.seconds * 0.98 - 2 * run.path.message() <= taken <= cost.seconds * (1 + 1e-9), numel


@pytest.mark.parametrize("hosts", [(2, 2), (4, 4), (3, 3, 3), (2, 2, 2, 2, 2)], ids=str)
def test_a_torus_is_the_sum_of_its_two_levels(hosts):
    """Reduce-scatter of n on a host of g, all-reduce of n / g by h hosts of which g rings share a card, all-gather.

    And a request at the beginning of each, which takes a latency.
    """
    n, g, h = 4 * 4 * DIVISIBLE, hosts[0], len(hosts)
    slow, fast, card, slot, gamma = 2e-4, 1e-5, 1 / 1e8, 1 / 5e9, 5e-10
    link, inside = Link(bandwidth=1 / card, latency=slow), {"bandwidth": 1 / slot, "latency": fast}
    costs = {"alpha": 0.0, "beta": 0.0, "gamma": gamma, "header": 0, "small": 0, "link": link, "inside": inside}
    run = Virtual(Collective("torus"), g * h, hosts=hosts, **costs)
    run.all(call_of("all_reduce", [Ghost(n // 4) for _ in range(g * h)]))
    reduce_scatter = (g - 1) * fast + (g - 1) / g * n * (slot + gamma)
    across = 2 * (h - 1) * slow + 2 * (h - 1) / h * (n / g) * (g * card) + (h - 1) / h * (n / g) * gamma
    all_gather = (g - 1) * fast + (g - 1) / g * n * slot
    asks = fast + slow + fast
    assert run.runtime.kernel.now == pytest.approx(reduce_scatter + across + all_gather + asks, rel=1e-9)
    counters = [run.runtime.network.counters(f"worker {rank}") for rank in range(g * h)]
    assert {each.bytes_sent for each in counters} == {2 * (h - 1) * n // (h * g)}
    assert {each.bytes_local for each in counters} == {2 * (g - 1) * n // g}


def test_a_torus_needs_hosts_of_equal_size():
    cluster = Cluster(machines=[Machines(workers=2), Machines(workers=4)])
    with raising(StrategyError, "algorithm=hierarchical"):
        resolved("digits-mlp", "bsp collective:algorithm=torus", cluster, on="virtual")
    with raising(StrategyError, "have 4,"):
        resolved("digits-mlp", "bsp collective:algorithm=torus,per_host=4", cluster, on="virtual")
    resolved("digits-mlp", "bsp collective:algorithm=torus,per_host=3", cluster, on="virtual")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_hierarchical_takes_its_hosts_from_the_machines_and_their_links(hosts, kind):
    """Between the ranks of a host over the link inside, which is 50 times as fast as the card here."""
    size = sum(hosts)
    for numel in (0, 5, DIVISIBLE, 16 * DIVISIBLE):
        run = Virtual(Collective("hierarchical"), size, hosts=hosts, inside={"bandwidth": 5e9, "latency": 1e-5})
        cost = form_of("hierarchical", kind, hosts, run.inside)(numel, size, run.path, 4)
        run.all(call_of(kind, [Ghost(numel) for _ in range(size)]))
        assert run.counts == list(zip(cost.sent, cost.received, cost.messages, strict=True)), numel
        taken = run.runtime.kernel.now
        if kind == "barrier":
            assert taken <= cost.seconds * (1 + 1e-9)
        elif len(set(hosts)) == 1 and (numel != 5 or kind in ("all_gather", "broadcast")):
            assert taken == pytest.approx(cost.seconds, rel=1e-9, abs=1e-15), numel
        else:
            assert cost.seconds * 0.9 - 2 * run.path.message() <= taken <= cost.seconds * (1 + 1e-9), numel


def test_hierarchical_over_hosts_of_two_is_a_ring_of_hosts_and_two_messages_inside():
    """n bytes: each leader's card carries 2 (L - 1) / L n in each direction, the rest stays inside."""
    n = 4 * DIVISIBLE
    inside, link = {"bandwidth": 5e9, "latency": 1e-5}, Link(bandwidth=1e8, latency=2e-4)
    costs = {"alpha": 0.0, "beta": 0.0, "gamma": 0.0, "header": 0, "small": 0, "link": link, "inside": inside}
    run = Virtual(Collective("hierarchical"), 8, hosts=[2] * 4, **costs)
    run.all(call_of("all_reduce", [Ghost(DIVISIBLE) for _ in range(8)]))
    up_and_down = 2 * (n / 5e9 + 1e-5)
    ring = 2 * 3 * (n / 4 / 1e8 + 2e-4)
    asks = 1e-5 + 2e-4
    assert run.runtime.kernel.now == pytest.approx(up_and_down + ring + asks, rel=1e-9)
    counters = [run.runtime.network.counters(f"worker {rank}") for rank in range(8)]
    assert [each.bytes_sent for each in counters] == [2 * 3 * n // 4, 0] * 4
    assert [each.bytes_local for each in counters] == [n, n] * 4


@pytest.mark.parametrize("topology", ALGORITHMS[:5], ids=str)
def test_who_comes_late_is_waited_for(topology):
    """Each rank comes at a time of its own; nothing is lost or mixed up, and nobody ends before the last has come."""
    for size in (2, 5, 8):
        run, given = Virtual(topology, size), values(size, 3000)
        operations: list[tuple[Operation[Any], Operation[Any]]] = []

        def come(run: Virtual, given: list[torch.Tensor], rank: int, into: list[Any]) -> None:
            group = run.groups[rank]
            into.append((group.all_reduce(given[rank].clone()), group.all_gather(given[rank])))

        for rank in range(size):
            run.runtime.kernel.at(0.01 * ((rank * 3) % size), partial(come, run, given, rank, operations))
        run.runtime.kernel.run()
        assert run.runtime.kernel.now > 0.01 * (size - 1)
        for total, rows in operations:
            same(total.result(), np.sum([each.numpy() for each in given], axis=0))
            for row, one in zip(rows.result(), given, strict=True):
                same(row, one.numpy())


def test_a_pause_holds_up_what_its_machine_would_answer():
    calm, paused = (Virtual(Collective("ring"), 3) for _ in range(2))
    paused.runtime.kernel.at(1e-4, lambda: paused.nodes[1].pause(0.5))
    for run in (calm, paused):
        run.all(lambda group, rank: group.all_reduce(torch.ones(3000)))
    assert calm.runtime.kernel.now < 0.1
    assert 0.5 < paused.runtime.kernel.now < 0.6


@pytest.mark.parametrize("topology", ALGORITHMS[:5], ids=str)
def test_when_one_is_gone_everybody_hears_who(topology):
    """In the middle, with two more operations called after it, and again in every later one."""
    for size in (2, 5, 8):
        whole = Virtual(topology, size)
        whole.all(lambda group, rank: group.all_reduce(torch.ones(40_000)))
        run, victim = Virtual(topology, size), size // 2
        operations = [[group.all_reduce(torch.ones(40_000)) for _ in range(3)] for group in run.groups]
        crash = whole.runtime.kernel.now / 2
        run.runtime.kernel.at(crash, lambda run=run, victim=victim: run.runtime.lose(run.nodes[victim]))
        run.runtime.kernel.run()
        for rank in range(size):
            if rank != victim:
                for operation in [*operations[rank], run.groups[rank].barrier()]:
                    run.runtime.kernel.run()
                    with pytest.raises(PeerLost, match=f"worker {victim} is gone, and a collective needs every rank"):
                        operation.result()
        assert run.runtime.kernel.now < crash + run.runtime.detection + 0.01


@pytest.mark.parametrize(
    "text",
    ["collective", *(f"collective:algorithm={each}" for each in ("ring", "hierarchical", "hierarchical,per_host=2"))],
)
def test_its_text_is_read_back(text):
    assert str(Strategy.of("bsp", text)) == f"bsp {text} fp32 none"
    assert make(text) == Strategy.parse(f"bsp {text}").topology


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("collective:algorithm=hierarchical,per_host=0", "per_host"),
        ("collective:algorithm=tree,per_host=2", "per_host=2"),
        ("collective:algorithm=star", "halving-doubling"),
    ],
)
def test_what_makes_no_sense_is_refused(text, words):
    with raising(StrategyError, words):
        make(text)
