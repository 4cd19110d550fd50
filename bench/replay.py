"""dure's prioritized replay beside `cpprb.PrioritizedReplayBuffer`, in one process on one core.

    OMP_NUM_THREADS=1 python bench/replay.py [--capacity 1000000] [--batch 512] [--message 50] [--repeats 31]
    OMP_NUM_THREADS=1 python bench/replay.py --frames

Both hold the same transitions of CartPole's form and are full. Each repeat times `--calls` samples with their priority
updates in one and in the other, then as many inserts of `--message` transitions with priorities; the order of the two
changes from repeat to repeat. A ratio is cpprb's time over dure's in one repeat. The output has the median of the
ratios and the 95 % interval of that median.

The work is the same but for three details. cpprb divides importance weights by the maximum over the whole buffer, dure
by the maximum over the batch. Sums of priorities are float32 in cpprb and float64 in dure. cpprb (without
`check_for_update`, which slows it) does not notice that an updated transition was overwritten; dure does.

`--frames` times samples of four stacked frames of 84 x 84, for a batch of 32 and of 512, beside a plain copy of as many
bytes in place.

Result of `--repeats 61` on two x86_64 cores that other work kept busy (load 8): sample and update 2.54x as fast as
cpprb 11.0.0 (2.47 to 2.59), insert 1.61x (1.41 to 1.79).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _script import need, parse, print_ratios, ratio_of, told

from dure.rl.replay import Replay
from dure.rl.transitions import STACKED, Column, FrameLayout, Layout, Transitions

ALPHA, BETA = 0.6, 0.4

CARTPOLE = Layout(
    (
        Column("observation", "float32", (4,)),
        Column("action", "int64"),
        Column("reward", "float32"),
        Column("discount", "float32"),
        Column("next_observation", "float32", (4,)),
    )
)

PIXELS = Layout(
    (*(Column(name, "uint8", (4, 84, 84)) for name in STACKED), Column("action", "int64"), Column("reward", "float32")),
    FrameLayout((84, 84), 4),
)

BARS = {"sample and update": 1.5, "insert": 1.0}
"""The ratio that is asked for."""

FILL = 10_000  # transitions of one insert while the replays are filled

DIFFERENT = 16  # priorities and messages, used in turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--message", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--frames", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parse(parser, capacity=10_000, batch=64, repeats=3, calls=10)
    if given.frames:
        time_frames(given)
        return
    need("cpprb", "bench")
    with told("replay", given) as facts:
        facts |= {"capacity": given.capacity, "batch": given.batch, "message": given.message, "repeats": given.repeats}
        facts |= compare(given)


# ---- beside cpprb


class Dure:
    def __init__(self, capacity: int) -> None:
        self.replay = Replay(CARTPOLE, capacity, seed=0, alpha=ALPHA)

    def insert(self, values: Transitions, priorities: np.ndarray) -> None:
        self.replay.insert(values, priorities)

    def learn(self, batch: int, priorities: np.ndarray) -> None:
        sample = self.replay.sample(batch, BETA)
        self.replay.update(sample.keys, priorities)


class Cpprb:
    def __init__(self, capacity: int) -> None:
        from cpprb import PrioritizedReplayBuffer

        columns = {each.name: {"shape": each.shape or 1, "dtype": np.dtype(each.dtype)} for each in CARTPOLE.columns}
        self.replay = PrioritizedReplayBuffer(capacity, columns, alpha=ALPHA)

    def insert(self, values: Transitions, priorities: np.ndarray) -> None:
        self.replay.add(priorities=priorities, **values)

    def learn(self, batch: int, priorities: np.ndarray) -> None:
        sample = self.replay.sample(batch, BETA)
        self.replay.update_priorities(sample["indexes"], priorities)


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a call in each by what is timed, and the ratios."""
    rng = np.random.default_rng(0)
    arms: dict[str, Dure | Cpprb] = {"dure": Dure(given.capacity), "cpprb": Cpprb(given.capacity)}
    for _ in range(-(-given.capacity // FILL)):
        values, priorities = transitions(rng, FILL), rng.random(FILL, np.float32)
        for arm in arms.values():
            arm.insert(values, priorities)
    messages = [transitions(rng, given.message) for _ in range(DIFFERENT)]
    initial = [rng.random(given.message, np.float32) for _ in range(DIFFERENT)]
    errors = [rng.random(given.batch, np.float32) for _ in range(DIFFERENT)]
    works: dict[str, Callable[[Dure | Cpprb, int], None]] = {
        "sample and update": lambda arm, call: arm.learn(given.batch, errors[call % DIFFERENT]),
        "insert": lambda arm, call: arm.insert(messages[call % DIFFERENT], initial[call % DIFFERENT]),
    }
    facts: dict[str, Any] = {"microseconds": {}, "ratios": []}
    for name, work in works.items():
        seconds: dict[str, list[float]] = {arm: [] for arm in arms}
        for repeat in range(given.repeats + 1):  # the first warms up
            for arm in sorted(arms, reverse=bool(repeat % 2)):
                seconds[arm].append(timed(work, arms[arm], given.calls))
        found = {arm: each[1:] for arm, each in seconds.items()}
        micros = {arm: statistics.median(each) / given.calls * 1e6 for arm, each in found.items()}
        print(f"{name:18} dure {micros['dure']:6.1f} us, cpprb {micros['cpprb']:6.1f} us; at least {BARS[name]}")
        facts["microseconds"][name] = micros
        facts["ratios"].append(ratio_of(name, "cpprb", found["dure"], found["cpprb"]))
    print_ratios(facts["ratios"])
    return facts


def timed(work: Callable[[Dure | Cpprb, int], None], arm: Dure | Cpprb, calls: int) -> float:
    began = time.perf_counter()
    for call in range(calls):
        work(arm, call)
    return time.perf_counter() - began


def transitions(rng: np.random.Generator, count: int) -> Transitions:
    return {
        "observation": rng.random((count, 4), np.float32),
        "action": rng.integers(0, 2, count),
        "reward": rng.random(count, np.float32),
        "discount": rng.random(count, np.float32),
        "next_observation": rng.random((count, 4), np.float32),
    }


# ---- frames


def time_frames(given: argparse.Namespace) -> None:
    rng, capacity = np.random.default_rng(0), 50_000
    replay = Replay(PIXELS, capacity, seed=0, alpha=ALPHA)
    references = np.arange(given.message)[:, None] + np.arange(4)
    for _ in range(capacity // given.message):
        values = {
            "observation": references,
            "next_observation": references + 3,
            "action": rng.integers(0, 18, given.message),
            "reward": rng.random(given.message, np.float32),
            "frames": rng.integers(0, 256, (given.message + 6, 84, 84), np.uint8),
        }
        replay.insert(values, rng.random(given.message))
    for batch in (32, 512):
        inputs = np.zeros((2, batch, 4, 84, 84), np.uint8)
        out = np.zeros_like(inputs)
        times: dict[str, list[float]] = {"sample": [], "copy": []}
        for _ in range(given.repeats):
            for name, work in {
                "sample": lambda batch=batch: replay.sample(batch, BETA),
                "copy": lambda out=out, inputs=inputs: np.copyto(out, inputs),
            }.items():
                began = time.perf_counter()
                work()
                times[name].append(time.perf_counter() - began)
        sample, copy = (statistics.median(times[name]) * 1e3 for name in ("sample", "copy"))
        print(f"batch {batch:3}: sample {sample:6.2f} ms, copy of its {inputs.nbytes / 1e6:.1f} MB {copy:6.2f} ms")


if __name__ == "__main__":
    main()
