"""Events per second of the virtual runtime's kernel, against SimPy's processes with the same time-outs.

    python bench/virtual_kernel.py [--repeats 5] [--events 200000]

Two parts, medians of alternating repeats in one process:

- time-outs alone: strands that sleep for prepared, exponential times, again and again;
- messages alone: how many a second the network model carries, small (one event) and bulk (sharing cards).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any

import numpy as np
import simpy

from dure.runtime.base import Operation
from dure.runtime.cluster import Cluster
from dure.runtime.network import Network
from dure.runtime.virtual import Kernel

WORKERS = (64, 1000)
BULK = 100_000  # bytes


def delays(workers: int, steps: int) -> list[list[float]]:
    """What each worker sleeps, step by step: the same for both kernels."""
    drawn: list[list[float]] = np.random.default_rng(0).exponential(1.0, (workers, steps)).tolist()
    return drawn


def ours(times: list[list[float]]) -> None:
    """Every worker a strand that sleeps its times."""
    kernel = Kernel()

    async def role(own: list[float]) -> None:
        for delay in own:
            operation: Operation[None] = Operation(kernel)
            kernel.at(kernel.now + delay, operation.resolve)
            await operation

    for i, own in enumerate(times):
        coroutine: Coroutine[Operation[Any], None, None] = role(own)
        kernel.spawn(coroutine, f"worker {i}")
    kernel.run()


def theirs(times: list[list[float]]) -> None:
    """Every worker a SimPy process that times out after its times."""
    environment = simpy.Environment()

    def role(own: list[float]) -> Generator[simpy.Event, None, None]:
        for delay in own:
            yield environment.timeout(delay)

    for own in times:
        environment.process(role(own))
    environment.run()


def messages(workers: int, nbytes: int, count: int) -> None:
    """`count` messages: each worker sends to four servers in turn, the next when the last has arrived."""
    cluster = Cluster.uniform(workers)
    kernel = Kernel()
    network = Network(cluster, kernel, cluster.hosts(4))
    left = count

    def sender(worker: int) -> Callable[[], None]:
        server = worker

        def go() -> None:
            nonlocal left, server
            if left:
                left -= 1
                server += 1
                network.send(worker, workers + server % 4, nbytes, go)

        return go

    for worker in range(workers):
        kernel.at(worker * 1e-6, sender(worker))
    kernel.run()


def rate(count: int, action: Callable[[], None]) -> float:
    """`count` per second of `action`, the collector of cycles off as `timeit` has it."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        action()
        return count / (time.perf_counter() - start)
    finally:
        gc.enable()


def time_outs(workers: int, total: int, repeats: int) -> dict[str, float]:
    """Time-outs per second of both, and the median of their ratio."""
    times = delays(workers, total // workers)
    count = workers * (total // workers)
    pairs = [(rate(count, lambda: ours(times)), rate(count, lambda: theirs(times))) for _ in range(repeats + 1)][1:]
    return {
        "dure": statistics.median(pair[0] for pair in pairs),
        "simpy": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(mine / other for mine, other in pairs),
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--events", type=int, default=200_000)
    given = parser.parse_args()
    result: dict[str, Any] = {}
    for workers in WORKERS:
        result[f"time-outs/s, {workers} workers"] = time_outs(workers, given.events, given.repeats)
        for name, nbytes, count in (("small", 100, given.events), ("bulk", BULK, given.events // 4)):
            carry = partial(messages, workers, nbytes, count)
            rates = [rate(count, carry) for _ in range(given.repeats)]
            result[f"{name} messages/s, {workers} workers"] = statistics.median(rates)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
