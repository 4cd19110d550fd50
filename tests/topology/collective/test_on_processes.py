"""Collectives written from sends over real sockets: the same bits and the same closed forms; a kill is heard by all."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.forms.collectives import form_of, hosts_of
from oracles.forms.messages import Wire
from support.raw_caller import CREDENTIALS
from topology.collective.test_message_group import ALGORITHMS, KINDS, call_of, same, values

from dure.core.node import Operation
from dure.core.vectors import equal_ranges
from dure.errors import PeerLost
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity
from dure.topology.collective.message_group import SentGroup, algorithm_of

LENGTHS = [0, 3, 101]
ANY = Wire(latency=0.0, alpha=0.0, bandwidth=1.0)


class Real:
    """`size` nodes in this process, each with its own sockets, turned one after another."""

    def __init__(self, size: int) -> None:
        self.nodes = [ProcessNode(Identity("test", f"worker {rank}", rank), CREDENTIALS) for rank in range(size)]
        directory = {node.name: ("127.0.0.1", node.wire.listen()) for node in self.nodes}
        for node in self.nodes:
            node.directory.update(directory)

    def join(self, topology: Any) -> list[SentGroup]:
        return [SentGroup(node, range(len(self.nodes)), algorithm_of(topology), node.meter) for node in self.nodes]

    def all(self, groups: list[SentGroup], call: Callable[[SentGroup, int], Operation[Any]]) -> list[Any]:
        """What `call` gives at each rank, all of them at once."""
        operations = [call(group, rank) for rank, group in enumerate(groups)]
        deadline = time.monotonic() + 20
        while not all(operation.done for operation in operations):
            assert time.monotonic() < deadline, [each.label for each in operations if not each.done]
            for node in self.nodes:
                node.loop.run_ready()
                node.loop.turn(0.0)
        return [operation.result() for operation in operations]

    @property
    def counts(self) -> list[tuple[int, int, int]]:
        """Payload bytes sent and received, and messages, of each rank."""
        rows = []
        for node in self.nodes:
            found = node.wire.traffic.values()
            sent, received = (sum(getattr(t, f"payload_nbytes_{way}") for t in found) for way in ("sent", "received"))
            rows.append((sent, received, sum(traffic.messages_sent for traffic in found)))
        return rows

    def close(self) -> None:
        for node in self.nodes:
            node.services.clear()  # nobody tells the others whose turn to close has not come
        for node in self.nodes:
            node.wire.close(0.0)


@pytest.fixture(params=range(1, 10))
def real(request: Any) -> Iterator[Real]:
    world = Real(request.param)
    yield world
    world.close()


@pytest.mark.sampled(3)
@pytest.mark.alone  # beside others, in a process that has run many tests, each message took tens of milliseconds
def test_over_sockets_too_it_is_numpys_sum_at_the_cost_of_the_closed_form(real):
    size = len(real.nodes)
    for topology in ALGORITHMS:
        groups = real.join(topology)
        for kind in KINDS:  # everybody is connected to whom it will ask
            real.all(groups, call_of(kind, values(size, 3)))
        for numel in LENGTHS:
            given = values(size, numel)
            total = np.sum([each.numpy() for each in given], axis=0, dtype=np.float32)
            for kind in KINDS:
                before = real.counts
                found = real.all(groups, call_of(kind, [each.clone() for each in given]))
                moved = [tuple(np.subtract(after, then)) for after, then in zip(real.counts, before, strict=True)]
                hosts = hosts_of(size, topology.per_host) if topology.per_host else ()
                cost = form_of(topology.algorithm, kind, hosts)(numel, size, ANY, 4)
                assert moved == list(zip(cost.sent, cost.received, cost.messages, strict=True)), (topology, kind)
                check(kind, found, given, total)


def check(kind: str, found: list[Any], given: list[torch.Tensor], total: np.ndarray) -> None:
    cuts = equal_ranges(len(total), len(given))
    for rank, value in enumerate(found):
        if kind == "all_gather":
            for row, one in zip(value, given, strict=True):
                same(row, one.numpy())
        elif kind != "barrier":
            start, stop = cuts[rank]
            same(value, {"all_reduce": total, "reduce_scatter": total[start:stop], "broadcast": given[0].numpy()}[kind])


def test_they_happen_in_the_order_in_which_they_were_called():
    """Many at once, and one rank that comes late."""
    world = Real(3)
    groups = world.join(ALGORITHMS[0])
    first = [groups[rank].all_reduce(torch.full((5,), 1.0)) for rank in (0, 1)]
    for _ in range(20):
        for node in world.nodes:
            node.loop.turn(0.0)
    assert not any(operation.done for operation in first)
    found = world.all(groups, lambda group, rank: group.all_reduce(torch.full((5,), 1.0)) if rank == 2 else first[rank])
    assert [value.tolist() for value in found] == [[3.0] * 5] * 3
    several = [[group.all_reduce(torch.full((7,), float(n))) for n in range(6)] for group in groups]
    for n in range(6):
        for value in world.all(groups, lambda group, rank, n=n: several[rank][n]):
            assert value.tolist() == [3.0 * n] * 7
    world.close()


# ---- a rank is killed

RANKS, VICTIM = 5, 2


def be(rank: int, topology: Any, folder: Path) -> None:
    """All-reduce for ever; write down what ended it, and when."""
    node = ProcessNode(Identity("test", f"worker {rank}", rank), CREDENTIALS)
    tell(folder / f"port-{rank}", node.wire.listen())
    ports = [folder / f"port-{other}" for other in range(RANKS)]
    wait_for(ports)
    node.directory.update({f"worker {r}": ("127.0.0.1", json.loads(p.read_text())) for r, p in enumerate(ports)})
    group = SentGroup(node, range(RANKS), algorithm_of(topology), node.meter)

    async def work() -> None:
        done = 0
        while True:
            await group.all_reduce(torch.ones(200_000))
            done += 1
            if done == 3:
                tell(folder / f"going-{rank}", done)

    try:
        node.loop.run_until(node.spawn(work(), node.name))
    except PeerLost as error:
        tell(folder / f"heard-{rank}", [time.monotonic(), str(error)])
    end = time.monotonic() + 30  # a survivor lives on: nobody hears of the loss by its connections
    while time.monotonic() < end:
        node.loop.turn(0.05)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("topology", [*ALGORITHMS[:3], ALGORITHMS[4]], ids=str)
def test_a_killed_rank_is_heard_of_by_every_survivor(topology, tmp_path):
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            try:
                be(rank, topology, tmp_path)
            finally:
                os._exit(1)
        children.append(pid)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    try:
        wait_for([tmp_path / f"going-{rank}" for rank in range(RANKS)])
        os.kill(children[VICTIM], signal.SIGKILL)
        killed = time.monotonic()
        wait_for([tmp_path / f"heard-{rank}" for rank in survivors])
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    for rank in survivors:
        when, what = json.loads((tmp_path / f"heard-{rank}").read_text())
        assert when - killed < 5
        assert what.startswith(f"worker {VICTIM} is gone")
        assert what.endswith("Use a method over a parameter server (ps), or resume from the last checkpoint.")


def tell(path: Path, what: Any) -> None:
    """Write a file that is there whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(what))
    draft.rename(path)


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 30
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths if not path.exists()]
        time.sleep(0.01)
