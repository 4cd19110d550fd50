"""Microseconds of an actor's step: its choice of actions, and its environments beside Gymnasium's `SyncVectorEnv`.

    OMP_NUM_THREADS=1 python bench/acting.py [--env CartPole-v1] [--counts 1 4 16] [--repeats 31]

In each repeat the same number of vector steps is made, in turn, by `Environments`, by `SyncVectorEnv` (which begins the
next episode in the step that ends the last one) and by a bare loop over the environments that stores nothing. The
output has the least time of each over all repeats, and the medians of the ratios to the bare loop within a repeat.
`Environments` steps the environments in a loop of its own because `SyncVectorEnv` takes more than twice the time of the
bare loop for one environment.

Result on two x86_64 cores that other work kept busy (load 5): `Environments` takes 1.20, 1.10 and 1.09 times the bare
loop's time for 1, 4 and 16 CartPoles, `SyncVectorEnv` 2.26, 1.55 and 1.35 times. Acting and stepping together take 122,
122 and 379 microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from dure.rl.dpg import Dpg
from dure.rl.dqn import Dqn
from dure.rl.environments import Environments, environment

STEPS = 1600
"""Steps of single environments in each measurement."""


def seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measured(text: str, count: int, repeats: int) -> str:
    ours = Environments(environment(text), count, seed=0)
    algorithm = Dpg() if isinstance(ours.action_space, gymnasium.spaces.Box) else Dqn()
    network = algorithm.network(ours.observation_space, ours.action_space)
    rng, noise = np.random.default_rng(0), np.full(count, 0.1)
    theirs = SyncVectorEnv([environment(text)] * count, autoreset_mode=AutoresetMode.SAME_STEP)
    theirs.reset(seed=0)
    bare = [environment(text)() for _ in range(count)]
    for each in bare:
        each.reset(seed=0)
    actions = algorithm.act(network, ours.observations, np.ones(count), rng)

    def loop() -> None:
        for each, action in zip(bare, actions, strict=True):
            *_, terminated, truncated, _ = each.step(action)
            if terminated or truncated:
                each.reset()

    calls = {
        "bare": loop,
        "ours": lambda: ours.step(actions),
        "sync": lambda: theirs.step(actions),
        "act": lambda: algorithm.act(network, ours.observations, noise, rng),
        "both": lambda: ours.step(algorithm.act(network, ours.observations, noise, rng)),
    }
    found = [{name: seconds(call, max(STEPS // count, 5)) for name, call in calls.items()} for _ in range(repeats)]
    least = {name: min(each[name] for each in found) * 1e6 for name in calls}
    ratios = {name: statistics.median(each[name] / each["bare"] for each in found) for name in ("ours", "sync")}
    return (
        f"{count:3d} {least['act']:8.0f} {least['ours']:8.0f} {least['both']:8.0f} "
        f"{least['bare']:8.0f} {ratios['ours']:8.2f} {ratios['sync']:8.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=31)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{given.env}, microseconds; the last two columns are ratios to the bare loop")
    print("  n      act     step     both     bare     step     SyncVectorEnv")
    for count in given.counts:
        print(measured(given.env, count, given.repeats), flush=True)


if __name__ == "__main__":
    main()
