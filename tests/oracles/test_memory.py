"""The memory that members declare, against the tensors that the nodes of a run hold at each step and at its end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CoroutineType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest
import torch

import dure
from dure.codec import CATALOGUE as CODECS
from dure.codec import WRAPPERS
from dure.job.optimizer import FlatOptimizer
from dure.run.config import TrainConfig
from dure.run.memory import of_server, of_workers
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun, VirtualSegment
from dure.runtime.virtual.cluster import Cluster, Machines
from dure.runtime.virtual.compute import LogNormal
from dure.sync import CATALOGUE as METHODS
from dure.sync import REMEDIES
from dure.sync.base import UNDECLARED
from dure.sync.worker_state import WorkerState
from dure.topology import CATALOGUE as TOPOLOGIES
from dure.topology.offers import offers_of

WORKERS = 4
OUTSIDE = (ModuleType, type, FunctionType, BuiltinFunctionType, FrameType, CoroutineType)
ELSEWHERE = ("dure.runtime", "dure.run.", "dure.job.job", "dure.job.replica", "dure.core.meter")
"""Modules of objects that are no part of a node: runtimes, the run, the job."""


def tensors(root: Any, stops: set[int]) -> Iterator[torch.Tensor]:
    """All tensors within reach of `root`, not beyond the objects whose ids are in `stops`."""
    seen, left = set(stops), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, OUTSIDE) or type(each).__module__.startswith(ELSEWHERE):
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, FlatOptimizer):
            left.append(each.vectors)  # its scratch memory is of constant size
        else:
            left.extend(gc.get_referents(each))


def nbytes(found: Iterator[torch.Tensor], least: int) -> int:
    """The bytes of distinct storages of `least` bytes or more. Encoded messages are not counted."""
    storages = [each.untyped_storage() for each in found if each.dtype != torch.uint8]
    return sum({each.data_ptr(): each.nbytes() for each in storages if each.nbytes() >= least}.values())


@dataclass
class Held:
    """The most bytes that the workers and servers of a run have held at once, by number, and the names of vectors."""

    segment: VirtualSegment
    workers: dict[int, int]
    servers: dict[int, int]

    def __call__(self, worker: WorkerState) -> None:
        """Look at a worker and at all servers."""
        servers = {id(each.shard): each for each in self.segment.servers}
        apart = {id(worker.source), id(worker.merge_buffers), id(worker.on_step), id(worker.boundary)}
        memory = worker.sessions.memory
        apart |= set(servers) | (set() if memory is None else {id(memory.access.segment)})
        whole = self.segment.setup.replica.params.nbytes
        shown = nbytes(tensors(worker, apart), whole // (4 * WORKERS))
        self.workers[worker.number] = max(self.workers.get(worker.number, 0), shown)
        for own, server in servers.items():
            shown = nbytes(tensors(server.shard, set(servers) - {own}), server.shard.values.nbytes // 8)
            self.servers[server.number] = max(self.servers.get(server.number, 0), shown)


def machines(count: int, **more: Any) -> Machines:
    return Machines(count=count, compute=LogNormal(seconds=0.01, sigma=0.5), **more)


ONE_SLOW = Cluster(machines=(machines(WORKERS - 1), machines(1, speed=0.2)))


def held_by(strategy: str, **options: Any) -> Held:
    """The memory that a run of `strategy` holds at step boundaries and at its end."""
    given = {"job": "digits-mlp", "on": "virtual", "batch_size": 16, "steps": 9, **options}
    setup, cluster = resolve(TrainConfig(strategy=strategy, **given), Prebuilt(cluster=ONE_SLOW))
    assert cluster is not None
    held = Held(VirtualSegment(VirtualRun(setup, cluster, Callbacks()), None), {}, {})
    for worker in held.segment.workers.values():
        worker.on_boundary = held
    held.segment.run()
    for worker in held.segment.workers.values():
        held(worker)
    return held


@dataclass(frozen=True)
class Law:
    """A strategy whose nodes hold what is declared; servers up to `fewer` vectors less, workers up to `fewer_each`."""

    strategy: str
    fewer: float = 0.0
    fewer_each: float = 0.0
    short: bool = False


LAWS = [
    Law("bsp collective", short=True),
    Law("bsp collective zero:stage=1"),
    Law("bsp ps:shards=2", short=True),
    Law("bsp hybrid:servers=all,shards=2", fewer=1),
    Law("one-shot ps:shards=2"),
    Law("averaging:period=3 collective"),
    Law("averaging:period=3 ps:shards=2,split=layer"),
    Law("averaging:period=4,pace=time ps:shards=2"),
    Law("averaging:schedule=overhead,weights=fisher,state=average collective"),
    Law("averaging:period=3 collective 1bit", short=True),
    Law("bmuf:period=4 collective", short=True),
    Law("bmuf:period=4 ps:shards=2", short=True),
    Law("bmuf:period=4,overlap=2 collective"),
    Law("bmuf:period=4,fragments=2 collective"),
    Law("bmuf:period=4 collective top-k:share=0.1"),
    Law("diloco:period=4 collective"),
    Law("easgd collective"),
    Law("easgd ps:shards=2", fewer=1),
    Law("eamsgd collective"),
    Law("eamsgd ps:shards=2", fewer=1),
    Law("backup ps:shards=2"),
    Law("k-sync ps:shards=2"),
    Law("k-batch-sync ps:shards=2"),
    Law("k-async ps:shards=2", fewer=3),
    Law("k-batch-async ps:shards=2", fewer=2),
    Law("ssp ps:shards=2", fewer=1),
    Law("downpour ps:shards=2", fewer=1),
    Law("downpour:n_push=2 ps:shards=2", fewer=1),
    Law("downpour+dc-asgd ps:shards=2", fewer=1),
    Law("k-batch-async:k=2+dc-asgd:mode=adaptive+staleness-lr ps:shards=2", fewer=2, short=True),
    Law("ssp+momentum-compensation:target=0.5 ps:shards=2", fewer=1),
    Law("hogwild shared"),
    Law("hogbatch:batch=2 shared"),
    Law("asysvrg shared", fewer=1),
    Law("lbfgs:m=1,batch=32 ps:shards=2", fewer=3, fewer_each=1),
    Law("ad-psgd gossip:graph=ring", fewer_each=2),
    Law("downpour ps:shards=2 strom", fewer=1),
    Law("bsp collective strom"),
    Law("bsp collective top-k"),
    Law("bsp collective fp16"),
    Law("bsp collective bf16+ef", short=True),
    Law("bsp collective int8"),
    Law("bsp collective sign"),
    Law("bsp ps:shards=2 sign+momentum"),
    Law("bsp collective ternary"),
    Law("bsp collective it-sign"),
    Law("bsp ps:shards=2 it-sign:granularity=coordinate,start=2", short=True),
]


@pytest.mark.parametrize(
    "law", [pytest.param(law, marks=() if law.short else pytest.mark.long, id=law.strategy) for law in LAWS]
)
def test_a_run_holds_the_vectors_that_its_members_declare(law):
    held = held_by(law.strategy)
    setup = held.segment.setup
    declared = dict(of_workers(setup, range(WORKERS)))
    nbytes = setup.replica.params.nbytes
    for number, shown in held.workers.items():
        use = declared[number]
        there = use.weights + use.optimizer + use.method + use.codec + use.topology
        assert there * 0.99 - law.fewer_each * nbytes <= shown <= there * 1.01
    for number, shown in held.servers.items():
        there, each = of_server(setup, number), held.segment.servers[number].shard.values.nbytes
        assert there * 0.99 - law.fewer * each <= shown <= there * 1.01
    names = setup.traits.kept_over(offers_of(setup.strategy.topology), encoded=setup.codec is not None)
    assert sorted(held.segment.workers[0].kept) == sorted(names)


def test_laws_cover_all_members():
    words = [law.strategy.replace("+", " ").replace(":", " ").split() for law in LAWS]
    named = {word for law in words for word in law} | {"fp32", "1bit"}
    assert {*METHODS, *TOPOLOGIES, *CODECS, *WRAPPERS, *REMEDIES} <= named


def test_a_method_without_a_declaration_counts_as_three_vectors():
    traits = dure.Traits(needs=("group",))
    assert len(traits.kept_over({"group"}, encoded=False)) == UNDECLARED == 3


def test_the_memory_of_a_server_beside_a_worker_counts():
    held = held_by("bsp ps:shards=1,colocated=true", steps=3)
    (server,), nbytes = held.servers.values(), held.segment.setup.replica.params.nbytes
    assert server == (WORKERS + 3) * nbytes  # an update of each worker, their sum, two versions
    beside = [use.server for _, use in of_workers(held.segment.setup, range(WORKERS))]
    assert beside == [server, 0, 0, 0]
