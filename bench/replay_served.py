"""A replay served to actors and a learner over processes, beside the same calls of it in one process.

    OMP_NUM_THREADS=1 python bench/replay_served.py [--repeats 21] [--seconds 0.4] [--actors 2] [--json FILE]

Processes, as in a run: a replay (`ReplayService` on a `ProcessNode`), a learner (this process), and `--actors` actors.
An actor inserts messages of `--message` transitions of CartPole's form with priorities, without a pause. The learner
samples `--batch` transitions, `--prefetch` batches ahead, and sends their priorities back, in a loop. The replay has
`--capacity` transitions, `--filled` of them before the start; its rate limiter never delays.

Each repeat measures, for `--seconds` each, the learner alone, one actor alone, and all together. Then the replay's
process makes as many of the same calls of the same replay itself, all processes waiting: in process. The order
of the two changes from repeat to repeat. A ratio is the served rate over that in process in one repeat. The output has
the median of the ratios and the 95 % interval of that median, and the processor time of each process. The replay has
one thread, so that its processor time bounds the ratio, however many cores there are.

Result of `--seconds 0.3` on two x86_64 cores with nothing beside it, transitions a second:

| | served | in process | ratio | bound by the replay's processor time |
|---|---|---|---|---|
| samples, learner alone | 541,210 | 1,298,685 | 0.37x (0.35 to 0.38) | 0.42x |
| samples, learner with 2 actors | 318,038 | 1,042,055 | 0.28x (0.25 to 0.34) | 0.32x |
| inserts, one actor alone | 85,201 | 1,308,513 | 0.07x (0.05 to 0.08) | 0.12x |
| inserts, one actor alone, messages of 400 | 615,835 | 6,650,867 | 0.09x (0.07 to 0.11) | 0.14x |

All miss the bar of 0.5x: a message costs the replay 0.2 to 0.3 ms of processor time beside the work, and an insert of
50 transitions in process takes 0.04 ms. With messages of 400 transitions an actor inserts 7 times as many a second.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _script import median_interval, parse, told
from _side_by_side import CREDENTIALS
from replay import ALPHA, BETA, CARTPOLE, DIFFERENT, FILL, transitions

from dure.core.node import Address, Call, Reply, TensorSpec
from dure.rl.messages import InsertionTensors, SampleTensors, with_version
from dure.rl.replay import Replay
from dure.rl.services import RateLimiter, ReplayService
from dure.rl.transitions import Transitions
from dure.runtime.process.node import ProcessNode
from dure.runtime.wire import Identity

LAYOUT = with_version(CARTPOLE)
SAMPLES = SampleTensors(LAYOUT)
REPLAY = Address("replay 0", "replay")
CALLS = Address("replay 0", "calls")
BAR = 0.5
"""The ratio that is asked for."""
START_SECONDS = 0.05
"""Time for all processes to hear of a measurement before it begins."""


@dataclass(frozen=True)
class Done:
    """Calls of one process in one measurement, and its processor time."""

    calls: int
    cpu_seconds: float


# ---- the replay's process


class InProcess:
    """Makes calls of `replay` in its own process; gives the process's time to others."""

    def __init__(self, replay: Replay, given: argparse.Namespace) -> None:
        self.replay = replay
        self.messages = {size: messages(size) for size in sizes(given)}
        self.errors = priorities(given.batch)
        self.batch = given.batch

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return ()

    def handle(self, call: Call) -> Reply:
        if call.method == "make":
            return Reply({"seconds": self.make(**call.fields)})
        return Reply({"cpu_seconds": time.process_time()})

    def make(self, samples: int, inserts: int, message: int) -> float:
        """Seconds of so many samples with their updates, with so many inserts evenly among them."""
        given = self.messages[message]
        began, inserted = time.perf_counter(), 0
        for sampled in range(max(samples, 1)):
            while inserted < inserts * (sampled + 1) // max(samples, 1):
                self.replay.insert(*given[inserted % DIFFERENT])
                inserted += 1
            if samples:
                sample = self.replay.sample(self.batch, BETA)
                self.replay.update(sample.keys, self.errors[sampled % DIFFERENT])
        return time.perf_counter() - began


def serve(pipe: Connection, given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    node = ProcessNode(Identity("bench", REPLAY.node), CREDENTIALS)
    replay = Replay(LAYOUT, given.capacity, seed=0, alpha=ALPHA)
    rng = np.random.default_rng(0)
    for _ in range(-(-given.filled // FILL)):
        replay.insert(with_versions(transitions(rng, FILL)), rng.random(FILL, np.float32))
    node.serve(
        "replay",
        ReplayService(
            node,
            replay,
            RateLimiter(1.0, 1, math.inf),
            trim_every=100,
            actors=[f"actor {rank}" for rank in range(given.actors)],
        ),
    )
    node.serve("calls", InProcess(replay, given))
    pipe.send(node.wire.listen())
    done: list[Any] = []
    node.on_lost = done.append
    while len(done) <= given.actors:
        node.loop.turn(1.0)


# ---- actors


def act(rank: int, port: int, pipe: Connection, given: argparse.Namespace) -> None:
    """Insert for each span of time that the pipe tells."""
    torch.set_num_threads(1)
    node = joined(f"actor {rank}", rank, port)
    made = InsertionTensors(LAYOUT)
    sending = {size: [made.tensors(*message) for message in messages(size)] for size in sizes(given)}
    node.loop.run_until(node.spawn(insert_until(node, sending[given.message], 0.0), "connecting"))
    pipe.send(None)
    while (span := pipe.recv()) is not None:
        begin, end, message = span
        wait_until(begin)
        pipe.send(measured(node, insert_until(node, sending[message], end)))
    node.wire.close()


async def insert_until(node: ProcessNode, sending: Sequence[Sequence[torch.Tensor]], end: float) -> int:
    calls = 0
    while calls < 1 or time.monotonic() < end:
        await node.call(REPLAY, "insert", *sending[calls % DIFFERENT])
        calls += 1
    return calls


# ---- the learner


async def learn_until(node: ProcessNode, given: argparse.Namespace, errors: Sequence[torch.Tensor], end: float) -> int:
    """Sample and update as `ReplaySource` does."""
    calls, ahead = 0, deque([ask(node, given.batch) for _ in range(given.prefetch)])
    while time.monotonic() < end:
        arrives, tensors = ahead.popleft()
        await arrives
        node.call(REPLAY, "update", tensors["keys"], errors[calls % DIFFERENT])
        ahead.append(ask(node, given.batch))
        calls += 1
    for arrives, _ in ahead:
        await arrives
    return calls + len(ahead)


def ask(node: ProcessNode, batch: int) -> tuple[Any, dict[str, torch.Tensor]]:
    into, tensors = SAMPLES.room(batch)
    return node.call(REPLAY, "sample", into=into, count=batch, beta=BETA, version=0), tensors


class Bench:
    """The learner's process, which leads the others."""

    def __init__(self, node: ProcessNode, actors: Sequence[Connection], given: argparse.Namespace) -> None:
        self.node, self.actors, self.given = node, actors, given
        self.errors = [torch.from_numpy(each) for each in priorities(given.batch)]

    def served(self, learns: bool, actors: int, message: int) -> dict[str, Any]:
        """Calls and processor time of each process in `seconds` of real time."""
        begin = time.monotonic() + START_SECONDS
        end = begin + self.given.seconds
        for pipe in self.actors[:actors]:
            pipe.send((begin, end, message))
        before = self.call("time")["cpu_seconds"]
        wait_until(begin)
        learner = measured(self.node, learn_until(self.node, self.given, self.errors, end)) if learns else Done(0, 0.0)
        inserted = [pipe.recv() for pipe in self.actors[:actors]]
        seconds = time.monotonic() - begin
        spent = self.call("time")["cpu_seconds"] - before
        return {
            "seconds": seconds,
            "samples": learner.calls,
            "inserts": sum(each.calls for each in inserted),
            "message": message,
            "cpu": {
                "replay": spent,
                "learner": learner.cpu_seconds,
                "actors": sum(each.cpu_seconds for each in inserted),
            },
        }

    def in_process(self, calls: dict[str, Any]) -> float:
        """Seconds of the same `calls` as served ones."""
        wanted = {name: calls[name] for name in ("samples", "inserts", "message")}
        return float(self.call("make", **wanted)["seconds"])

    def call(self, method: str, **fields: Any) -> dict[str, Any]:
        async def called() -> dict[str, Any]:
            return dict((await self.node.call(CALLS, method, **fields)).fields)

        return self.node.loop.run_until(self.node.spawn(called(), method))


LONG = 8
"""Messages that an actor could send as one."""

SCENES = {
    "learner alone": (True, False, 1),
    "one actor alone": (False, True, 1),
    f"one actor alone, messages {LONG} times as long": (False, True, LONG),
    "together": (True, None, 1),
}
"""Whether the learner works, whether one actor does (None: all of them), and the length of a message."""


def compare(bench: Bench, given: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in SCENES}
    last: dict[str, dict[str, Any]] = {}
    for repeat in range(given.repeats + 1):  # the first warms up
        for name, (learns, actors, length) in SCENES.items():
            scene = (learns, given.actors if actors is None else int(actors), given.message * length)
            if repeat % 2 and name in last:
                seconds = bench.in_process(last[name])
                served = bench.served(*scene)
                unit = "samples" if learns else "inserts"
                seconds *= served[unit] / last[name][unit]
            else:
                served = bench.served(*scene)
                seconds = bench.in_process(served)
            last[name] = served
            if repeat:
                found[name].append({**served, "in_process": seconds})
    return {name: tell(name, each, given) for name, each in found.items()}


def tell(name: str, found: Sequence[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    def median(of: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(of, found))

    ratios = [each["in_process"] / each["seconds"] for each in found]
    ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
    print(f"{name}: {ratio:.2f}x of in process (95 % interval {low:.2f} to {high:.2f}; at least {BAR})")
    rates = {}
    for what, size in {"samples": given.batch, "inserts": found[0]["message"]}.items():
        for where, span in {"served": "seconds", "in process": "in_process"}.items():
            rates[f"{what} {where}"] = median(lambda each, of=(what, size, span): each[of[0]] * of[1] / each[of[2]])
    print("   " + "; ".join(f"{rate:,.0f} {what}" for what, rate in rates.items() if rate) + " a second")
    unit, size = ("samples", given.batch) if found[0]["samples"] else ("inserts", found[0]["message"])
    cpu = {side: 1e3 * median(lambda each, at=side: each["cpu"][at] / (each[unit] * size)) for side in found[0]["cpu"]}
    cpu["in process"] = 1e3 * median(lambda each: each["in_process"] / (each[unit] * size))
    bound = cpu["in process"] / cpu["replay"]
    shown = ", ".join(f"{side} {1e3 * each:.2f} ms" for side, each in cpu.items() if each)
    print(f"   processor time for 1,000 {unit}: {shown}; bound of one core for the replay: {bound:.2f}x")
    return {"ratio": ratio, "interval": [low, high], "bar": BAR, "rates": rates, "cpu_seconds_per_1000": cpu}


# ---- small parts


def sizes(given: argparse.Namespace) -> tuple[int, int]:
    return given.message, given.message * LONG


def messages(count: int) -> list[tuple[Transitions, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(with_versions(transitions(rng, count)), rng.random(count, np.float32)) for _ in range(DIFFERENT)]


def with_versions(values: Transitions) -> Transitions:
    return {**values, "version": np.zeros(len(values["reward"]), np.int64)}


def priorities(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.random(count, np.float32) for _ in range(DIFFERENT)]


def joined(name: str, rank: int, port: int) -> ProcessNode:
    node = ProcessNode(Identity("bench", name, rank), CREDENTIALS)
    node.directory[REPLAY.node] = ("127.0.0.1", port)
    return node


def measured(node: ProcessNode, work: Any) -> Done:
    before = time.process_time()
    calls = node.loop.run_until(node.spawn(work, "its work"))
    return Done(calls, time.process_time() - before)


def wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--filled", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--message", type=int, default=50)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--json", type=Path)
    given = parse(parser, capacity=20_000, filled=10_000, batch=64, repeats=2, seconds=0.05, actors=1)
    torch.set_num_threads(1)
    with ExitStack() as stack, told("replay_served", given) as facts:
        facts |= {name: value for name, value in vars(given).items() if name not in ("json", "smoke")}
        facts["rows"] = compare(started(stack, given), given)
        facts["ratios"] = [
            {"what": f"replay served, {name}", "peer": "the same calls in process"}
            | {"ratio": row["ratio"], "interval": row["interval"], "pairs": given.repeats}
            for name, row in facts["rows"].items()
        ]


def started(stack: ExitStack, given: argparse.Namespace) -> Bench:
    """Start all processes; they end with the `stack`."""
    context = multiprocessing.get_context("forkserver")

    def start(target: Any, *args: Any) -> Connection:
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(*args, theirs, given), daemon=True)
        process.start()
        stack.callback(process.join, 10)
        return ours

    port = start(serve).recv()
    actors = [start(act, rank, port) for rank in range(given.actors)]
    for pipe in actors:
        pipe.recv()
        stack.callback(pipe.send, None)
    node = joined("worker 0", 0, port)
    stack.callback(node.wire.close)
    return Bench(node, actors, given)


if __name__ == "__main__":
    main()
