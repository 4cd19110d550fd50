"""Events per second of the virtual runtime's kernel, against SimPy's processes with the same time-outs.

    python bench/virtual_kernel.py [--repeats 5] [--events 200000]

Three parts, medians of alternating repeats in one process:

- time-outs alone: tasks that sleep for prepared, exponential times, again and again;
- messages alone: how many a second the network model carries, small (one event) and bulk (sharing cards);
- a whole timing-only run: SSP over one parameter server, with everything that a run has (admission, versions,
  shared cards, counters), against SimPy processes that wait as its workers do and do nothing else.

What counts as an event: each *time-out*, a callback that the kernel dispatches at its virtual time, and each
*hand-over*, by which one task of control resumes another: a message that reaches its service or comes back to the
worker that waits for it, the two sides of a transfer that have both ended, a task that is started or is over.
SimPy takes every one of them from its queue. Its workers go through the same pattern per step: 8 time-outs of which
those of a transfer's two sides run at once, a call of a server's process, one that applies the update, and the
answer. What a run does besides (admission, versions, shared cards, counters, choosing what to do next)
is left out. Both make the same steps, and both events/s are SimPy's count of events over the time taken, so that a
ratio is one of times: what only the run has counts for nothing. "time-outs only" is stricter still: SimPy's workers
make 8 time-outs a step, one after another, and nothing else.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from _script import need, parse, print_ratios, ratio_of, told

from dure.core.node import Operation
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import LogNormal
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.network import Network

if TYPE_CHECKING:
    import simpy

WORKERS = (64, 1000)
BULK = 100_000  # bytes
WIRE_SECONDS, LATENCY_SECONDS = 8e-6, 120e-6  # of a bulk message
APPLY_SECONDS = 3e-6
COMPUTE = LogNormal(seconds=0.02, sigma=0.3)


def delays(workers: int, steps: int) -> list[list[float]]:
    """What each worker sleeps, step by step: the same for both kernels."""
    drawn: list[list[float]] = np.random.default_rng(0).exponential(1.0, (workers, steps)).tolist()
    return drawn


def ours(times: list[list[float]]) -> None:
    """Every worker a task that sleeps its times."""
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
    import simpy

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
    names = [*(f"worker {rank}" for rank in range(workers)), *(f"server {number}" for number in range(4))]
    network = Network(cluster, kernel, {name: machine for machine, name in enumerate(names)})
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


def time_outs(workers: int, total: int, repeats: int) -> dict[str, Any]:
    """Time-outs per second of both, in each pair and their medians, and the median of their ratio."""
    times = delays(workers, total // workers)
    count = workers * (total // workers)
    pairs = [(rate(count, lambda: ours(times)), rate(count, lambda: theirs(times))) for _ in range(repeats + 1)][1:]
    return {
        "dure": statistics.median(pair[0] for pair in pairs),
        "simpy": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(mine / other for mine, other in pairs),
        "pairs": pairs,
    }


def ssp_run(workers: int, steps: int) -> Callable[[], tuple[int, int]]:
    """A run of `dure`, ready to be made: its time-outs and its messages."""
    cluster = Cluster.uniform(workers, compute=COMPUTE)
    strategy = "ssp:bound=3 ps:shards=1"
    config = TrainConfig(
        job="digits-mlp", strategy=strategy, on="virtual", workers=workers, steps=steps, timing_only=True
    )
    setup, _ = resolve(config, Prebuilt(cluster=cluster))
    setup.prepare()

    def run() -> tuple[int, int]:
        totals = VirtualRun(setup, cluster, Callbacks()).run().totals
        tables = (*totals.per_worker.values(), *totals.per_shard.values())
        return totals.events, sum(row["messages"] for row in tables)

    return run


def ssp_processes(workers: int, steps: int, *, calls: bool) -> Callable[[], int]:
    """SimPy processes that wait as the workers of `ssp_run` do: their events. Without `calls`, time-outs alone."""
    cluster = Cluster.uniform(workers, compute=COMPUTE)
    streams = [cluster.durations(rank, 0) for rank in range(workers)]
    draws = [[stream.draw() for _ in range(steps)] for stream in streams]

    def run() -> int:
        import simpy

        environment = simpy.Environment()
        server = Server(environment)
        if calls:
            environment.process(server.work())
        for own in draws:
            environment.process(worker(environment, server, own) if calls else sleeper(environment, own))
        environment.run()
        return workers * (steps * TIME_OUTS + 2) + server.hand_overs

    return run


class Server:
    """A SimPy process that is called with updates, and answers each once it has been applied: an event each way."""

    def __init__(self, environment: simpy.Environment) -> None:
        self.environment = environment
        self.bell = environment.event()
        self.asked: list[simpy.Event] = []
        self.hand_overs = 0

    def call(self) -> simpy.Event:
        answer = self.environment.event()
        self.asked.append(answer)
        if not self.bell.triggered:
            self.bell.succeed()
        return answer

    def work(self) -> Generator[simpy.Event, None, None]:
        while True:
            yield self.bell
            self.bell = self.environment.event()
            for answer in self.asked:
                self.environment.process(self.apply(answer))
            self.hand_overs += 1
            self.asked.clear()

    def apply(self, answer: simpy.Event) -> Generator[simpy.Event, None, None]:
        yield self.environment.timeout(APPLY_SECONDS)
        answer.succeed()
        self.hand_overs += 3  # its start, its end, the answer

    def transfer(self) -> simpy.Event:
        """Both sides of it."""
        self.hand_overs += 1
        return self.environment.timeout(WIRE_SECONDS) & self.environment.timeout(WIRE_SECONDS)


TIME_OUTS = 8  # per step of a `worker`, with what its server does


def worker(environment: simpy.Environment, server: Server, draws: list[float]) -> Generator[simpy.Event, None, None]:
    """Compute, push, pull; as the workers of `ssp_run`, with nothing decided and nothing shared."""
    after = environment.timeout
    for seconds in draws:
        yield after(seconds)
        yield server.transfer()
        yield after(LATENCY_SECONDS)
        yield server.call()
        yield server.transfer()
        yield after(LATENCY_SECONDS)


def sleeper(environment: simpy.Environment, draws: list[float]) -> Generator[simpy.Event, None, None]:
    """As many time-outs as a `worker`, one after another."""
    for seconds in draws:
        yield environment.timeout(seconds)
        for _ in range(TIME_OUTS - 1):
            yield environment.timeout(LATENCY_SECONDS)


def ssp(workers: int, total: int, repeats: int) -> dict[str, Any]:
    """Events per second of CPU and of wall time, ours and SimPy's, and the medians of their ratios."""
    steps = total // workers
    mine, other = ssp_run(workers, steps), ssp_processes(workers, steps, calls=True)
    bare = ssp_processes(workers, steps, calls=False)
    time_outs, messages = mine()
    counted = other()
    rows: dict[str, list[Seconds]] = {"dure": [], "simpy": [], "bare": []}
    for _ in range(repeats):
        for name, action in (("dure", mine), ("simpy", other), ("bare", bare)):
            rows[name].append(seconds_of(action))
    result: dict[str, Any] = {"steps per worker": steps}
    spent_cpu = {name: [each.cpu for each in own] for name, own in rows.items()}
    result["ratios"] = [
        ratio_of(f"SSP run, {workers} workers", "SimPy processes", spent_cpu["dure"], spent_cpu["simpy"]),
        ratio_of(f"SSP run, {workers} workers", "SimPy time-outs only", spent_cpu["dure"], spent_cpu["bare"]),
    ]
    result["dure, time-outs and messages per step"] = [round(n / (workers * steps), 2) for n in (time_outs, messages)]
    result["simpy, time-outs and hand-overs per step"] = [TIME_OUTS, round(counted / (workers * steps) - TIME_OUTS, 2)]
    for clock in ("cpu", "wall"):
        spent = {name: [getattr(each, clock) for each in own] for name, own in rows.items()}
        median = {name: statistics.median(own) for name, own in spent.items()}
        result[clock] = {
            "dure, events/s": round(counted / median["dure"]),
            "simpy, events/s": round(counted / median["simpy"]),
            "ratio": round(statistics.median(map(quotient, spent["simpy"], spent["dure"])), 3),
            "dure, time-outs/s": round(TIME_OUTS * workers * steps / median["dure"]),
            "simpy, time-outs only, time-outs/s": round(TIME_OUTS * workers * steps / median["bare"]),
            "ratio, time-outs only": round(statistics.median(map(quotient, spent["bare"], spent["dure"])), 3),
            "dure, microseconds per step": round(median["dure"] / (workers * steps) * 1e6, 2),
        }
    return result


class Seconds(NamedTuple):
    """What an action took."""

    cpu: float
    wall: float


def seconds_of(action: Callable[[], object]) -> Seconds:
    """How long `action` takes, the collector of cycles on, as in use."""
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    action()
    return Seconds(time.process_time() - cpu, time.perf_counter() - wall)


def quotient(a: float, b: float) -> float:
    return a / b


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=20_000, help="worker steps in all, of the SSP run")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS))
    parser.add_argument("--only", choices=("kernel", "ssp"), help="one part of it")
    parser.add_argument("--json", type=Path)
    given = parse(parser, repeats=2, events=2_000, steps=160, workers=[16])
    need("simpy", "bench")
    with told("virtual_kernel", given) as facts:
        facts["ratios"] = []
        for workers in given.workers if given.only != "ssp" else ():
            facts |= kernel(workers, given, facts["ratios"])
        for workers in given.workers if given.only != "kernel" else ():
            facts[f"ssp run, {workers} workers"] = found = ssp(workers, given.steps, given.repeats)
            facts["ratios"] += found.pop("ratios")
            print(f"an SSP run of {workers} workers: {found['cpu']['dure, microseconds per step']} us of CPU per step")
        print_ratios(facts["ratios"])


def kernel(workers: int, given: argparse.Namespace, ratios: list[dict[str, Any]]) -> dict[str, Any]:
    """Time-outs and messages per second; the ratio to SimPy's is added to `ratios`."""
    found: dict[str, Any] = {f"time-outs/s, {workers} workers": time_outs(workers, given.events, given.repeats)}
    pairs = found[f"time-outs/s, {workers} workers"].pop("pairs")
    seconds = ([1 / each[side] for each in pairs] for side in (0, 1))
    ratios.append(ratio_of(f"time-outs, {workers} workers", "SimPy", *seconds))
    for name, nbytes, count in (("small", 100, given.events), ("bulk", BULK, given.events // 4)):
        carry = partial(messages, workers, nbytes, count)
        rates = [rate(count, carry) for _ in range(given.repeats)]
        found[f"{name} messages/s, {workers} workers"] = statistics.median(rates)
        print(f"{workers} workers: {statistics.median(rates):,.0f} {name} messages a second")
    return found


if __name__ == "__main__":
    main()
