"""Microseconds of an actor's step: its choice of actions, and its environments beside Gymnasium's `SyncVectorEnv`.

    OMP_NUM_THREADS=1 python bench/acting.py [--env CartPole-v1] [--counts 1 4 16] [--repeats 31]

In each repeat the same number of vector steps is made, in turn, by `Environments`, by `SyncVectorEnv` (which begins the
next episode in the step that ends the last one) and by a bare loop over the environments that stores nothing. The
output has the least time of each over all repeats, and the medians of the ratios within a repeat.
`Environments` steps the environments in a loop of its own because `SyncVectorEnv` takes more than twice the time of the
bare loop for one environment.

Result on two x86_64 cores that other work kept busy (load 5): `Environments` takes 1.20, 1.10 and 1.09 times the bare
loop's time for 1, 4 and 16 CartPoles, `SyncVectorEnv` 2.26, 1.55 and 1.35 times. Acting and stepping together take 122,
122 and 379 microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _script import need, parse, print_ratios, ratio_of, told

need("gymnasium", "rl")

import gymnasium  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from dure.rl.dpg import Dpg  # noqa: E402
from dure.rl.dqn import Dqn  # noqa: E402
from dure.rl.environments import Environments, environment  # noqa: E402

STEPS = 1600
"""Steps of single environments in each measurement."""


def seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measured(text: str, count: int, repeats: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The least microseconds of each call, and the ratios."""
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
    seconds_of = {name: [each[name] for each in found] for name in calls}
    ratios = [
        ratio_of(f"steps of {count} x {text}", peer, seconds_of["ours"], seconds_of[name])
        for peer, name in (("SyncVectorEnv", "sync"), ("a bare loop", "bare"))
    ]
    return least, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path)
    given = parse(parser, repeats=3)
    torch.set_num_threads(1)
    with told("acting", given) as facts:
        facts |= {"env": given.env, "microseconds": {}, "ratios": []}
        print(f"{given.env}, microseconds")
        print("  n      act     step     both     bare     SyncVectorEnv")
        for count in given.counts:
            least, ratios = measured(given.env, count, given.repeats)
            cells = " ".join(f"{least[name]:8.0f}" for name in ("act", "ours", "both", "bare", "sync"))
            print(f"{count:3d} {cells}", flush=True)
            facts["microseconds"][count] = least
            facts["ratios"] += ratios
        print_ratios(facts["ratios"])


if __name__ == "__main__":
    main()
