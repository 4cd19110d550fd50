"""One server and several workers: total bytes per second, beside bare Gloo pairs and beside a Ray actor.

    python bench/server_throughput.py [--workers 1 2 4] [--values 25000000] [--repeats 7] [--no-ray] [--json FILE]
    python bench/server_throughput.py --callers 64 [--values 2000000] [--seconds 10] [--json FILE]

Every worker is a process and pushes and pulls `values` float32 through each arm, in turn, all workers at once:

    dure   a server with one `Shard` of plain SGD: an update is checked, applied and acknowledged, the values pulled.
           Bulk is neither sent nor copied: the update lies in `room_like` memory, the values are read where they lie
    dure in one call  the same, pushed and pulled in one call
    dure, copying     two calls, the update from memory of the worker's own, and the values into such memory
    gloo   a process with as many pairs as there are workers, a thread each: it receives, and sends as much back
    ray    an actor that holds the values (NumPy, which Ray does not copy to read) and takes the same step; what it
           answers stays where it is in shared memory, to be read only: nothing is copied to the worker's parameters

The bytes of a repeat are `2 x 4 x values x workers`; told are medians over the repeats of all workers' common time.
The small one is 1,000 values and one worker: Ray is asked in two calls, and in one that does both.

With --callers, so many processes push and pull at one shard for some seconds, and the server's staging memory is a
tenth of what all of them would like to send at once: who got how much, and what memory it took.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from _script import absent, parse, print_ratios, ratio_of, told

from dure.core.node import Address
from dure.job.optimizer import OptimizerSpec
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Credentials, Identity, WireLimits
from dure.topology.parameter_server.shard import Shard

JOB = "server-throughput"
CREDENTIALS = Credentials(bytes(32))  # the processes of a benchmark know them
WITHOUT_RAY = absent("ray", "bench")
LIMIT = datetime.timedelta(seconds=120)
WARM_UP = 2
RATE = 0.1
WINDOW_BEGINS = 1.0  # seconds after the callers' start

Arm = Callable[[int], None]


# ---- the servers


def serve(pipe: Connection, sizes: list[int], workers: int, staging: int) -> None:
    """A server with one shard per size, until all workers have finished."""
    torch.set_num_threads(1)
    limits = WireLimits(staging_nbytes=staging) if staging else WireLimits()
    node = ProcessNode(Identity(JOB, "server 0"), CREDENTIALS, limits=limits)
    shards = [Shard(node, torch.zeros(values), OptimizerSpec("sgd", lr=RATE)) for values in sizes]
    for values, shard in zip(sizes, shards, strict=True):
        node.serve(f"shard of {values}", shard)
    before = resident()
    pipe.send(node.wire.listen())
    gone: list[Any] = []
    node.on_lost = gone.append
    while len(gone) < workers:
        node.loop.turn(1.0)
    peak = int(status_of("VmHWM")) * 1024
    buffers = sum(shard.versions.pool.made * shard.values.nbytes for shard in shards)
    pipe.send({"before": before, "peak": peak, "staging": node.wire.staging_peak_nbytes, "versions": buffers})


def status_of(name: str) -> str:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1]
    raise SystemExit(f"no {name} in /proc/self/status")


def resident() -> int:
    return int(status_of("VmRSS")) * 1024


def pair(port: int, worker: int, rank: int) -> Any:
    """One end of a worker's pair."""
    store = dist.PrefixStore(str(worker), dist.TCPStore("127.0.0.1", port, None, False, LIMIT))
    return dist.ProcessGroupGloo(store, rank, 2, LIMIT)


def echo(port: int, workers: int, sizes: list[int], times: list[int]) -> None:
    """The other ends of all pairs; each size comes as often as `times` says."""
    torch.set_num_threads(1)

    def one(worker: int) -> None:
        group = pair(port, worker, 1)
        for values, count in zip(sizes, times, strict=True):
            buffer = torch.zeros(values)
            for _ in range(count):
                group.recv([buffer], 0, 0).wait()
                group.send([buffer], 0, 0).wait()

    threads = [threading.Thread(target=one, args=(worker,)) for worker in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ray_actor(sizes: list[int]) -> Any:
    """What holds the values in Ray's arm, by the name "server"."""
    import ray

    @ray.remote(num_cpus=0)
    class Server:
        def __init__(self, sizes: list[int]) -> None:
            self.values = {size: np.zeros(size, np.float32) for size in sizes}
            self.step = {size: np.zeros(size, np.float32) for size in sizes}

        def push(self, gradient: np.ndarray) -> int:
            size = gradient.size
            np.multiply(gradient, np.float32(RATE), out=self.step[size])
            self.values[size] -= self.step[size]
            return size

        def pull(self, size: int) -> np.ndarray:
            return self.values[size]

        def both(self, gradient: np.ndarray) -> np.ndarray:
            return self.pull(self.push(gradient))

    actor = Server.options(name="server", lifetime="detached").remote(sizes)
    ray.get(actor.pull.remote(sizes[0]))
    return actor


# ---- a worker


class Worker:
    """One process's ends of all arms."""

    def __init__(self, rank: int, port: int, store: int, sizes: list[int], ray_address: str | None) -> None:
        self.node = ProcessNode(Identity(JOB, f"worker {rank}", rank), CREDENTIALS)
        self.node.directory["server 0"] = ("127.0.0.1", port)
        self.rank, self.seq = rank, dict.fromkeys(sizes, 0)
        self.group = pair(store, rank, 0) if store else None
        self.gradient = {values: torch.ones(values) for values in sizes}
        self.room = {values: self.node.room_like(each).fill_(1.0) for values, each in self.gradient.items()}
        self.into = {values: torch.zeros(values) for values in sizes}
        self.arms: dict[str, Arm] = {
            "dure": self.through_dure,
            "dure in one call": self.through_dure_at_once,
            "dure, copying": self.through_dure_copying,
        }
        if store:
            self.arms["gloo"] = self.through_gloo
        if ray_address is not None:
            import ray

            ray.init(address=ray_address, namespace=JOB, log_to_driver=False, logging_level="error")
            self.get, self.actor = ray.get, ray.get_actor("server")
            self.arms |= {"ray": self.through_ray, "ray in one call": self.through_ray_at_once}

    def through_dure(self, values: int) -> None:
        self._run(self._push_and_pull(values, self.room[values], self._place(values)))

    def through_dure_at_once(self, values: int) -> None:
        self._run(self._exchange(values, self.room[values], self._place(values)))

    def through_dure_copying(self, values: int) -> None:
        self._run(self._push_and_pull(values, self.gradient[values], [self.into[values]]))

    def _place(self, values: int) -> list[torch.Tensor] | None:
        """Where values are received; None if they can be read where they lie."""
        return None if self.node.borrows("server 0", 4 * values) else [self.into[values]]

    def _run(self, work: Coroutine[Any, None, None]) -> None:
        self.node.loop.run_until(self.node.spawn(work, "worker"))

    async def _push_and_pull(self, values: int, gradient: torch.Tensor, into: list[torch.Tensor] | None) -> None:
        shard, fields = self._next(values)
        await self.node.call(shard, "push", gradient, **fields)
        (await self.node.call(shard, "pull", into=into)).release()

    async def _exchange(self, values: int, gradient: torch.Tensor, into: list[torch.Tensor] | None) -> None:
        shard, fields = self._next(values)
        (await self.node.call(shard, "push", gradient, into=into, pull=True, **fields)).release()

    def _next(self, values: int) -> tuple[Address, dict[str, Any]]:
        self.seq[values] += 1
        seq = self.seq[values]
        fields = {"worker": self.rank, "incarnation": 0, "seq": seq, "base": None, "weight": 1.0, "ordered": False}
        return Address("server 0", f"shard of {values}"), fields

    def through_gloo(self, values: int) -> None:
        self.group.send([self.gradient[values]], 1, 0).wait()
        self.group.recv([self.into[values]], 1, 0).wait()

    def through_ray(self, values: int) -> None:
        self.get(self.actor.push.remote(self.gradient[values].numpy()))
        self.get(self.actor.pull.remote(values))

    def through_ray_at_once(self, values: int) -> None:
        self.get(self.actor.both.remote(self.gradient[values].numpy()))


def work(
    rank: int, barrier: Any, answer: Connection, given: argparse.Namespace, port: int, store: int, ray_at: str | None
) -> None:
    """Take turns with the arms, all workers at once; tell of the common seconds of each repeat."""
    torch.set_num_threads(1)
    sizes, seconds = sizes_of(given, barrier.parties), {}
    worker = Worker(rank, port, store, sizes, ray_at)
    names = list(worker.arms)
    for values in sizes:
        rounds = 1 if values == given.values else given.small_rounds
        seconds[values] = {name: [] for name in names}
        for repeat in range(WARM_UP + given.repeats):
            first = repeat % len(names)
            for name in names[first:] + names[:first]:
                barrier.wait(LIMIT.total_seconds())
                began = time.perf_counter()
                for _ in range(rounds):
                    worker.arms[name](values)
                barrier.wait(LIMIT.total_seconds())
                seconds[values][name].append((time.perf_counter() - began) / rounds)
        check(worker, values, updates=barrier.parties * worker.seq[values])
    if rank == 0:
        answer.send({values: {name: each[WARM_UP:] for name, each in arms.items()} for values, arms in seconds.items()})
    worker.node.wire.close()


def check(worker: Worker, values: int, updates: int) -> None:
    """The server must have applied every update of every worker."""

    async def pull() -> None:
        await worker.node.call(Address("server 0", f"shard of {values}"), "pull", into=[worker.into[values]])

    worker.node.loop.run_until(worker.node.spawn(pull(), "worker"))
    expected = torch.full_like(worker.into[values], -RATE * updates)
    assert torch.allclose(worker.into[values], expected, rtol=1e-3), "the server lost updates"


def sizes_of(given: argparse.Namespace, workers: int) -> list[int]:
    return [given.values, given.small] if workers == 1 else [given.values]


# ---- the parent


def measure(workers: int, given: argparse.Namespace, ray_at: str | None) -> dict[int, dict[str, list[float]]]:
    """Seconds of every repeat of every arm, by values."""
    context = multiprocessing.get_context("forkserver")
    sizes = sizes_of(given, workers)
    store = dist.TCPStore("127.0.0.1", 0, None, True, LIMIT)
    ours, theirs = context.Pipe()
    answers, answer = context.Pipe(duplex=False)
    per_size = [(WARM_UP + given.repeats) * (1 if values == given.values else given.small_rounds) for values in sizes]
    server = context.Process(target=serve, args=(theirs, sizes, workers, 0), daemon=True)
    peers = context.Process(target=echo, args=(store.port, workers, sizes, per_size), daemon=True)
    server.start()
    peers.start()
    if not ours.poll(LIMIT.total_seconds()):
        raise SystemExit("the server did not start")
    port, barrier = ours.recv(), context.Barrier(workers)
    members = [
        context.Process(target=work, args=(rank, barrier, answer, given, port, store.port, ray_at), daemon=True)
        for rank in range(workers)
    ]
    for member in members:
        member.start()
    while not answers.poll(1.0):
        if any(member.exitcode for member in members):
            raise SystemExit("a worker failed; its message is above.")
    measured: dict[int, dict[str, list[float]]] = answers.recv()
    for process in (*members, peers, server):
        process.join(20)
    return measured


def ratios(arms: dict[str, list[float]], what: str) -> list[dict[str, Any]]:
    """By how much each arm of dure's is faster than the others'; one call stands against one, two against two."""
    return [
        ratio_of(f"{mine}, {what}", other, arms[mine], arms[other])
        for mine in arms
        for other in arms
        if mine.startswith("dure") and not other.startswith("dure")
        if other == "gloo" or mine.endswith("one call") == other.endswith("one call")
    ]


def counted(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def throughput(given: argparse.Namespace) -> dict[str, Any]:
    """All numbers of workers, one after another."""
    ray_at = begin_ray(given) if given.ray and not WITHOUT_RAY else None
    rows, small, compared = [], {}, []
    for workers in given.workers:
        measured = measure(workers, given, ray_at)
        arms, moved = measured[given.values], 8 * given.values * workers
        row: dict[str, Any] = {"workers": workers, "bytes_per_second": {}}
        for name, seconds in arms.items():
            row["bytes_per_second"][name] = round(moved / statistics.median(seconds))
        rows.append(row)
        compared += ratios(arms, f"{counted(workers)}, {given.values:,} values")
        rates = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in row["bytes_per_second"].items())
        print(f"{workers} workers: {rates}")
        if given.small in measured:
            small = {name: statistics.median(seconds) for name, seconds in measured[given.small].items()}
            print(f"{given.small:,} values: { ({name: f'{each * 1e3:.3f} ms' for name, each in small.items()}) }")
            compared += ratios(measured[given.small], f"{counted(workers)}, {given.small:,} values")
    print_ratios(compared)
    facts = {"values": given.values, "rows": rows, "small_values": given.small, "small_seconds": small}
    return facts | {"ratios": compared}


def begin_ray(given: argparse.Namespace) -> str:
    """A Ray of this machine with the actor in it; where it is."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=2, namespace=JOB, object_store_memory=4 << 30, **quiet)
    ray_actor([given.values, given.small])
    return str(ray.get_runtime_context().gcs_address)


# ---- many callers


def call_for_long(rank: int, port: int, given: argparse.Namespace, begin: float, answer: Connection) -> None:
    """Push and pull until the window ends; how many bytes this caller moved in it, and its longest turn."""
    torch.set_num_threads(1)
    worker = Worker(rank, port, 0, [given.values], None)
    worker.through_dure(given.values)
    opens, ends = begin + WINDOW_BEGINS, begin + WINDOW_BEGINS + given.seconds
    turns, longest = 0, 0.0
    while (began := time.monotonic()) < ends:
        worker.through_dure(given.values)
        turns += opens <= began
        longest = max(longest, time.monotonic() - began)
    answer.send((rank, turns * 8 * given.values, longest))
    worker.node.wire.close()


def crowd(given: argparse.Namespace) -> dict[str, Any]:
    """Many processes at one shard: each one's share, and the server's memory."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "dure.topology.parameter_server.shard", "dure.runtime.process.node"])
    staging = max(4 * given.values * given.callers // 10, 4 * given.values)
    ours, theirs = context.Pipe()
    answers, answer = context.Pipe(duplex=False)
    server = context.Process(target=serve, args=(theirs, [given.values], given.callers, staging), daemon=True)
    server.start()
    port, begin = ours.recv(), time.monotonic() + 0.15 * given.callers
    callers = [
        context.Process(target=call_for_long, args=(rank, port, given, begin, answer), daemon=True)
        for rank in range(given.callers)
    ]
    for caller in callers:
        caller.start()
    each = [answers.recv() for _ in callers]
    memory = ours.recv()
    for process in (*callers, server):
        process.join(20)
    moved = sorted(nbytes for _, nbytes, _ in each)
    grown = memory["peak"] - memory["before"]
    facts = {
        "callers": given.callers,
        "values": given.values,
        "bytes_per_second": round(sum(moved) / given.seconds),
        "least_share": round(moved[0] * len(moved) / sum(moved), 3),
        "largest_share": round(moved[-1] * len(moved) / sum(moved), 3),
        "longest_turn_seconds": round(max(longest for _, _, longest in each), 3),
        "staging_budget": staging,
        "staging_peak": memory["staging"],
        "versions_nbytes": memory["versions"],
        "server_grew_by": grown,
    }
    print(json.dumps(facts, indent=1))
    return facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--values", type=int)
    parser.add_argument("--small", type=int, default=1_000)
    parser.add_argument("--small-rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-ray", dest="ray", action="store_false")
    parser.add_argument("--callers", type=int)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    given = parse(parser, workers=[1, 2], values=250_000, small_rounds=5, repeats=2, seconds=1.0)
    given.values = given.values or (25_000_000 if given.callers is None else 2_000_000)
    torch.set_num_threads(1)
    if WITHOUT_RAY and given.ray and given.callers is None:
        print(WITHOUT_RAY)
    with told("server_throughput", given) as facts:
        facts |= throughput(given) if given.callers is None else crowd(given)


if __name__ == "__main__":
    main()
