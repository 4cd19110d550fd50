"""Collectives written from sends: the sum in every bit, the bytes and the seconds of their closed forms, no hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dure.runtime.base import Ghost, Operation
from dure.runtime.cluster import Cluster, Link
from dure.runtime.network import Network
from dure.runtime.sent_collectives import form_of
from dure.runtime.virtual import VirtualRuntime
from dure.topology.collective import SentGroup
from dure.topology.sharding import equal_ranges
from dure.topology.spec import Collective

SIZES = range(1, 10)
LENGTHS = [0, 1, 5, 7, 16, 100]
ALGORITHMS = [
    Collective("ring"),
    Collective("tree"),
    Collective("halving-doubling"),
    *(Collective("hierarchical", per_host) for per_host in (1, 2, 3, 4)),
]
KINDS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]
DIVISIBLE = 2520 * 4
"""A length that 1 .. 9 and 16 divide."""


class Virtual:
    """`size` workers on one machine each, and their group."""

    def __init__(self, topology: Collective, size: int, **costs: Any) -> None:
        costs = {"alpha": 3e-5, "beta": 2e-10, "gamma": 5e-10, **costs}
        link = costs.pop("link", Link(bandwidth=1e8, latency=2e-4))
        cluster = Cluster.uniform(size, link=link, **costs)
        self.runtime = VirtualRuntime(cluster, lambda kernel: Network(cluster, kernel, cluster.hosts()), None, seed=0)
        self.nodes = [self.runtime.node(f"worker {rank}", rank) for rank in range(size)]
        self.groups = [SentGroup(node, range(size), topology, node.meter) for node in self.nodes]
        self.path = self.runtime.network.path(range(size))

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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("topology", ALGORITHMS, ids=str)
def test_bytes_messages_and_seconds_are_the_closed_forms(topology, kind):
    for size in SIZES:
        for numel in (*LENGTHS, 3001, DIVISIBLE, 16 * DIVISIBLE):
            run = Virtual(topology, size)
            cost = form_of(topology.algorithm, kind, topology.per_host)(numel, size, run.path, 4)
            run.all(call_of(kind, [Ghost(numel) for _ in range(size)]))
            assert run.counts == list(zip(cost.sent, cost.received, cost.messages, strict=True)), (size, numel)
            taken = run.runtime.kernel.now
            exact = kind in ("all_gather", "broadcast", "barrier") or numel in (0, DIVISIBLE, 16 * DIVISIBLE)
            if exact or topology.algorithm in ("ring", "tree"):
                assert taken == pytest.approx(cost.seconds, rel=1e-9, abs=1e-15), (size, numel)
            else:
                assert taken <= cost.seconds * (1 + 1e-9), (size, numel)
                assert taken >= cost.seconds * 0.98 - 2 * run.path.message(), (size, numel)
