"""Measurements of messages, updates, steps and collectives: `dure probe` calls a `LinkBenchmark` on each host.

    rank 0 ── "collective" ──> every rank      barrier, collective, barrier, collective, ...
           <── seconds of each ──

A collective ends when its last rank has ended. Of each repetition the longest time of a rank counts, and of the
repetitions the median.

    caller                            host                        measures
      ping  ------------------------->                            the smallest round trip, and the cores' time for it
      <-------------------------
      take: n bytes ----------------->  acknowledged              the way out; several at once show the link's share
      give  ------------------------->
      <------------------- n bytes ---                            the way in

The call `measure` makes a host measure; its reply has the figures: medians of several repetitions, in seconds.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dure.codec.cost import Slice, random_slices, slices_of, timed
from dure.core.cost import fit
from dure.core.node import Address, Call, Operation, Reply, TensorSpec
from dure.core.processors import usable_processors
from dure.core.protocol import COUNT, TEXT, RemoteService, carrying, listed, remote
from dure.job.gradient import GradientWork
from dure.job.gradient_engine import GradientEngine
from dure.job.optimizer import FlatOptimizer, OptimizerSpec
from dure.job.replica import Replica
from dure.run.process import engine_groups
from dure.runtime.launch.shard_process import Starter
from dure.runtime.memory import usable_memory
from dure.runtime.process.group import AloneGroup
from dure.runtime.process.node import ProcessNode
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network
from dure.runtime.wire import Credentials, Identity
from dure.topology.parameter_server.client import ServerClient
from dure.topology.parameter_server.shard import Shard
from dure.topology.parameter_server.topology import ServerLayout

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.core.node import Group
    from dure.job.job import Job


KINDS = ("all_reduce", "all_gather", "broadcast")

TENSOR_SIZES = tuple(1 << power for power in range(10, 25, 2))
"""Sizes of a rank's tensor in bytes: 1 KiB to 16 MiB, up to the first that takes LONGEST_COLLECTIVE."""

LONGEST_COLLECTIVE = 0.1
"""If a collective takes more seconds, no larger one is measured; at least FEWEST_COLLECTIVE sizes are measured."""

FEWEST_COLLECTIVE = 3
REPEATS, SHORT_REPEATS = 7, 25
"""Number of repetitions of a collective, and of one with a tensor of at most SHORT bytes."""

SHORT = 1 << 16

Points = list[tuple[int, float]]
"""Bytes of a rank's tensor, and seconds."""


async def repeated(group: Group, kind: str, nbytes: int) -> list[float]:
    """Seconds of repeated collectives at this rank, each after a barrier; a first one is not counted."""
    tensor = torch.zeros(nbytes // 4)
    arguments = {"root": 0} if kind == "broadcast" else {}
    times = []
    for _ in range(1 + (SHORT_REPEATS if nbytes <= SHORT else REPEATS)):
        await group.barrier()
        began = time.perf_counter()
        await getattr(group, kind)(tensor, **arguments)
        times.append(time.perf_counter() - began)
    return times[1:]


async def curve(at_ranks: Callable[[int], Awaitable[Sequence[Sequence[float]]]]) -> Points:
    """The points of one kind of collective. `at_ranks` gives the seconds of each rank for a size."""
    points: Points = []
    for nbytes in TENSOR_SIZES:
        times = await at_ranks(nbytes)
        points.append((nbytes, statistics.median(map(max, zip(*times, strict=True)))))
        if len(points) >= FEWEST_COLLECTIVE and points[-1][1] > LONGEST_COLLECTIVE:
            break
    return points


def fitted(kind: str, points: Points, cluster: Cluster, ranks: int) -> dict[str, Any]:
    """A curve of so many ranks: its line, `start` + `byte` * bytes, its `residual`, and what `cluster` predicts."""
    line = fit(points)
    return {
        "ranks": ranks,
        "points": points,
        "start": line.start,
        "byte": line.slopes[0],
        "residual": line.residual,
        "predicted": [predicted(cluster, kind, nbytes, ranks) for nbytes, _ in points],
    }


def predicted(cluster: Cluster, kind: str, nbytes: int, ranks: int) -> float:
    """Seconds of a collective of the first `ranks` workers of `cluster` in virtual time."""
    places = {f"worker {worker}": worker for worker in range(cluster.workers)}
    network = Network(cluster, Kernel(), cluster.placed(places), np.random.default_rng(0))
    return network.cost(kind, nbytes, list(places)[:ranks]).seconds


SERVICE = "benchmark"

SIZES = tuple(1 << power for power in range(16, 24))
"""Sizes of messages in bytes: 64 KiB to 8 MiB, up to the first that takes LONGEST."""

LONGEST = 0.15
"""If a message takes more seconds, no larger one is measured; at least FEWEST sizes are measured."""

SPENT = 0.4
"""Seconds after which a size is not repeated; it is measured at least FEWEST times."""

FEWEST, MOST = 3, 9  # fewer than three sizes cannot separate the cost of a byte from that of a message
PINGS = 200
TRAIN = 3
"""Number of messages at once; their time, compared with that of one, shows the link's share of a byte's time."""

APPLIED = (1 << 21, 1 << 22, 1 << 23, 1 << 24)
"""Sizes in bytes of the updates whose application is measured."""

MOST_APPLIED = 1 << 26
"""A model of more bytes than these sizes is measured too, up to so many."""

STEPS = 20
"""Least number of steps whose durations are measured."""

SPAN, MOST_STEPS = 0.5, 400
"""Seconds after which no further steps are measured, and the largest number of steps.

The system gives a core to two busy programs in turn, for milliseconds each; the mean of many steps shows the share.
"""

ORDER = 256
"""Rows of the matrices whose product is a step if no job is given."""

PRODUCT_FLOPS = 2.0 * ORDER**3

HAND_OVERS = 100
"""Number of pushes to the second process, each after a step, over which costs are averaged."""

MODEL = 25_000
"""Number of values in a push if no job is given."""

Figures = dict[str, Any]


class OpenShard(Shard, checked=False):
    """A shard for measurements: its calls are not limited to the workers of a run, so hosts may push."""


class LinkBenchmark(RemoteService, checked=False):
    """The service of a host: receives and sends messages, and measures messages between itself and a peer.

    `compute`, `collective` and `code` begin at a barrier of `group`, that of all ranks.
    """

    def __init__(self, node: ProcessNode, job: Job | None = None, codecs: Mapping[str, Codec] | None = None) -> None:
        self.over: Operation[None] = node.promise("the end of the measurements")
        self.group: Group = AloneGroup(node)
        self._node = node
        self._job = job
        self._codecs = codecs or {}
        self._buffer = torch.zeros(SIZES[-1], dtype=torch.uint8)

    def unknown(self, call: Call) -> str:
        return f'a benchmark has no method "{call.method}".'

    @remote()
    def _ping(self, call: Call) -> Reply:
        return Reply()

    @remote()
    @carrying(lambda benchmark: (TensorSpec("uint8", SIZES[-1], at_most=True),))
    def _take(self, call: Call) -> Reply:
        """Receive bytes."""
        return Reply()

    @remote(size=COUNT)
    def _give(self, call: Call) -> Reply:
        """Send so many bytes."""
        return Reply(tensors=[self._buffer[: call.fields["size"]]])

    @remote(size=COUNT)
    def _host(self, call: Call) -> Reply:
        """Make a shard of so many values, for pushes."""
        values = torch.zeros(call.fields["size"])
        self._node.serve("shard", OpenShard(self._node, values, OptimizerSpec(lr=0.0)))
        return Reply()

    @remote()
    def _over(self, call: Call) -> Reply:
        """End the measurements; this host may exit."""
        self.over.resolve()
        return Reply()

    @remote()
    def _spent(self, call: Call) -> Reply:
        """The `seconds` of a core that this process has used."""
        return Reply({"seconds": time.process_time()})

    @remote(peer=TEXT)
    async def _measure(self, call: Call) -> Reply:
        """`round_trip`, `cpu_message`, and `points` of (bytes, messages, out, in)."""
        there = Address(call.fields["peer"], SERVICE)
        await self._node.call(there, "ping")  # connects
        times, cores = [], await self._cores(there)
        for _ in range(PINGS):
            times.append(await self._timed(lambda: [self._node.call(there, "ping")]))
        pings = [later - earlier for earlier, later in zip(cores, await self._cores(there), strict=True)]
        figures = {
            "round_trip": statistics.median(times),
            "cpu_message": max(pings) / PINGS / 2,  # a round trip has two messages; each costs both hosts
            "points": [[*point] async for point in self._points(there)],
        }
        return Reply(figures)

    async def _points(self, there: Address) -> AsyncIterator[tuple[int, int, float, float]]:
        """Seconds of messages out and in for several sizes, alone and TRAIN at once."""
        for number, size in enumerate(SIZES, start=1):
            alone = await self._both_ways(there, size, 1)
            yield size, 1, *alone
            yield size, TRAIN, *await self._both_ways(there, size, TRAIN)
            if number >= FEWEST and min(alone) > LONGEST:
                break

    @remote(peers=listed(TEXT), size=COUNT, count=COUNT)
    async def _race(self, call: Call) -> Reply:
        """`rounds`, `count` times: seconds until `size` bytes of each of `peers` are here, all sent at once."""
        peers, size, count = (call.fields[name] for name in ("peers", "size", "count"))
        into = [torch.empty(size, dtype=torch.uint8) for _ in peers]
        rounds: list[list[float]] = []
        for _ in range(count + 1):  # the first round connects and is not counted
            began = time.perf_counter()
            gives = [
                self._node.call(Address(peer, SERVICE), "give", into=(part,), size=size)
                for peer, part in zip(peers, into, strict=True)
            ]
            ends = [self._node.spawn(_seconds_until(give, began), "the end of a message") for give in gives]
            rounds.append([await end for end in ends])
        return Reply({"rounds": rounds[1:]})

    async def _both_ways(self, there: Address, size: int, count: int) -> tuple[float, float]:
        parts = [self._buffer[:size]] * count
        into = [torch.empty_like(part) for part in parts]
        call = self._node.call
        out = await self._repeated(lambda: [call(there, "take", part) for part in parts])
        back = await self._repeated(lambda: [call(there, "give", into=(part,), size=size) for part in into])
        return statistics.median(out), statistics.median(back)

    async def _repeated(self, start: Callable[[], Sequence[Operation[Reply]]]) -> list[float]:
        times: list[float] = []
        while len(times) < FEWEST or (len(times) < MOST and sum(times) < SPENT):
            times.append(await self._timed(start))
        return times

    async def _timed(self, start: Callable[[], Sequence[Operation[Reply]]]) -> float:
        began = time.perf_counter()
        for operation in start():
            await operation
        return time.perf_counter() - began

    async def _cores(self, there: Address) -> tuple[float, float]:
        """Seconds of a core that this process and the peer's have used."""
        mine = time.process_time()
        return mine, (await self._node.call(there, "spent")).fields["seconds"]

    @remote()
    async def _apply(self, call: Call) -> Reply:
        """`points` of (bytes, seconds) of updates, with the `cores` and `memory` here.

        A shard of this process applies them on arrival, as in Downpour, without the wire.
        """
        points = []
        spec = OptimizerSpec() if self._job is None else self._job.optimizer
        model = 0 if self._job is None else 4 * Replica(self._job.build(0)).numel
        larger = [min(model, MOST_APPLIED) // 4 * 4] if model > APPLIED[-1] else []
        for nbytes in [*APPLIED, *larger]:
            values = torch.zeros(nbytes // 4)
            update = torch.full_like(values, 1e-6)
            self._node.serve("shard", OpenShard(self._node, values, spec))
            servers = ServerLayout([Address(self._node.name, "shard")], [[(0, nbytes // 4)]], ordered=False)
            client = ServerClient(self._node, 0, servers)
            times = [await self._pushed(client, update) for _ in range(MOST)]
            points.append([nbytes, statistics.median(times[1:])])
        return Reply({"points": points, "cores": usable_processors(), "memory": usable_memory()})

    @remote()
    async def _compute(self, call: Call) -> Reply:
        """`seconds` of steps, one after another: of the job, or of matrix products."""
        await self.group.barrier()
        return Reply({"seconds": step_seconds(self._job)})

    @remote(kind=TEXT, nbytes=COUNT)
    async def _collective(self, call: Call) -> Reply:
        """`seconds` of collectives of `nbytes` among all ranks."""
        return Reply({"seconds": await repeated(self.group, call.fields["kind"], call.fields["nbytes"])})

    @remote(codec=TEXT)
    async def _code(self, call: Call) -> Reply:
        """`encode`, `decode`, `combine`: points of (values, seconds)."""
        slices = self._slices
        await self.group.barrier()
        return Reply(timed(self._codecs[call.fields["codec"]], slices))

    @cached_property
    def _slices(self) -> list[Slice]:
        """The slices on which codecs are measured."""
        return list(random_slices() if self._job is None else slices_of(self._job))

    @remote(peer=TEXT)
    async def _hand_over(self, call: Call) -> Reply:
        """`points`: costs of a push to the peer's shard and of the reply, in a loop of steps.

        A point has the bytes of a push and the seconds of an iteration: by the clock, of this process's cores, of the
        peer's cores. The first point has no push.
        """
        peer = call.fields["peer"]
        there = Address(peer, SERVICE)
        step = None if self._job is None else begin_steps(self._job)
        sizes = [1, MODEL if self._job is None else Replica(self._job.build(0)).numel]
        points = [[0, *await self._looped(there, step, None)]]
        for size in sizes:
            await self._node.call(there, "host", size=size)
            servers = ServerLayout([Address(peer, "shard")], [[(0, size)]], ordered=False)
            client, update = ServerClient(self._node, 0, servers), torch.zeros(size)
            points.append(
                [4 * size, *await self._looped(there, step, partial(client.push_pull, update, update.clone()))]
            )
        return Reply({"points": points})

    async def _looped(
        self, there: Address, step: Callable[[], object] | None, exchange: Callable[[], Awaitable[object]] | None
    ) -> tuple[float, float, float]:
        """Mean seconds of `step` and `exchange` in a loop: by the clock, of this process's cores, of the peer's."""
        mine = theirs = began = 0.0
        for loop in range(-HAND_OVERS // 10, HAND_OVERS):
            if loop == 0:
                mine, theirs = await self._cores(there)
                began = time.perf_counter()
            if step is not None:
                step()
            if exchange is not None:
                await exchange()
        lasted = time.perf_counter() - began
        here, beside = await self._cores(there)
        return lasted / HAND_OVERS, (here - mine) / HAND_OVERS, (beside - theirs) / HAND_OVERS

    async def _pushed(self, client: ServerClient, update: torch.Tensor) -> float:
        began = time.perf_counter()
        await client.push(update)
        return time.perf_counter() - began


def begin_steps(job: Job) -> Callable[[], object]:
    """Make a function that does the next step of `job` in this process: data, gradient and optimizer."""
    gradient_engine = GradientEngine(job, exact=True)
    (sampler,) = job.samplers((job.batch_size,), seed=0)
    values = gradient_engine.initial_values(0)
    optimizer = FlatOptimizer(job.optimizer, values.numel(), values.dtype)
    number = itertools.count()

    def step() -> None:
        inputs, targets = job.train.batch(sampler.next())
        work = GradientWork(0, next(number), values, inputs, targets, seed=0, flops=0.0)
        optimizer.apply(values, gradient_engine.one(work).values, values, lr=0.0)

    return step


def begin_products() -> Callable[[], object]:
    """Make a function that multiplies two matrices: a step of PRODUCT_FLOPS operations."""
    factor = torch.full((ORDER, ORDER), 0.5)
    return partial(torch.matmul, factor, factor, out=torch.empty_like(factor))


def step_seconds(job: Job | None) -> list[float]:
    """Seconds of whole steps of `job`, or of products without a job, one after another; a first step is not counted."""
    step = begin_products() if job is None else begin_steps(job)
    times: list[float] = []
    step()
    while len(times) < STEPS or (len(times) < MOST_STEPS and sum(times) < SPAN):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    return times


async def _seconds_until(give: Operation[Reply], began: float) -> float:
    await give
    return time.perf_counter() - began


def main(starter: Starter) -> None:
    """Entry point of another process on a host; with it, messages and collectives within the host are measured."""
    torch.set_num_threads(1)
    request = starter.request()
    identity = Identity(request["run"], request["name"], request["rank"])
    node = ProcessNode(identity, Credentials.of(request["credentials"]))
    benchmark = LinkBenchmark(node)
    node.serve(SERVICE, benchmark)
    port = node.wire.listen(request["interface"])
    starter.answer(port=port)
    if request["workers"] > 1:
        groups = engine_groups(node, request["workers"], request["store"], torch.device("cpu"))
        benchmark.group = groups(range(request["workers"]))
    node.loop.run_until(benchmark.over)
    node.wire.close()
