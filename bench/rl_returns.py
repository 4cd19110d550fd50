"""Returns of real runs of reinforcement learning on this machine: three seeds of each setting, one after another.

    pip install 'dure[rl]'
    python bench/rl_returns.py [--only cartpole-apex,acrobot-apex,...] [--seeds 3] [--json FILE]
    pip install 'dure[atari]'
    python bench/rl_returns.py --only pong-apex --seeds 1      # 10 minutes

A run ends after a number of frames. Each evaluation, and that of the last model, plays 100 episodes without random
actions. The table has the return of the last model and the highest of all evaluations. Each command is printed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from _script import need, parse, told


class Aim(NamedTuple):
    """A command of `dure rl`, and the mean return that its model should reach."""

    command: str
    mean_return: float


LIKE_APEX = "--n-step 3 --set double=true --set dueling=true"
AIMS = {
    "cartpole-apex": Aim("apex --env CartPole-v1 --actors 2 --frames 60000", 475),
    "acrobot-apex": Aim("apex --env Acrobot-v1 --actors 2 --frames 60000", -100),
    "pendulum-apex": Aim("apex --env Pendulum-v1 --actors 2 --frames 40000", -200),
    "cartpole-gorila": Aim(f"gorila --env CartPole-v1 --learners 2 --frames 60000 {LIKE_APEX}", 475),
    "cartpole-gorila-bsp": Aim(f"gorila --env CartPole-v1 --sync bsp --topology ps --frames 60000 {LIKE_APEX}", 475),
    "pong-apex": Aim("apex --env ALE/Pong-v5 --actors 2 --seconds 600 --eval-episodes 3 --eval-every 500", -20),
    "smoke": Aim("dqn --env CartPole-v1 --frames 300 --set min_size=100 --eval-episodes 1", 475),
}
EPISODES = 100
FIGURES = ("frames", "frames_per_second", "updates", "updates_per_second", "seconds")
"""Of which the table has the medians over seeds."""


def run(command: str, seed: int) -> dict[str, Any]:
    """The JSON object of one run."""
    episodes = [] if "--eval-episodes" in command else ["--eval-episodes", str(EPISODES)]
    arguments = [*command.split(), "--seed", str(seed), *episodes, "--json"]
    print("dure rl", *arguments, flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "dure", "rl", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(name: str, aim: Aim, runs: list[dict[str, Any]]) -> str:
    """A row of the table: what each seed has reached."""
    final = ", ".join(f"{each['mean_return']:.0f}" for each in runs)
    best = ", ".join(f"{each['best_return']:.0f}" for each in runs)
    met = [sum(each[key] >= aim.mean_return for each in runs) for key in ("mean_return", "best_return")]
    cells = [name, f"{aim.mean_return:g}", final, best, f"{met[0]} and {met[1]} of {len(runs)}"]
    for key in FIGURES:
        cells.append(f"{statistics.median(each[key] for each in runs):,.0f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(name for name in AIMS if name not in ("pong-apex", "smoke")))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parse(parser, only="smoke", seeds=1)
    need("gymnasium", "rl")
    if "pong" in given.only:
        need("ale_py", "atari", "ale-py")
    with told("rl_returns", given) as facts:
        facts["runs"], rows = {}, []
        for name in given.only.split(","):
            facts["runs"][name] = [run(AIMS[name].command, seed) for seed in range(given.seeds)]
            rows.append(row(name, AIMS[name], facts["runs"][name]))
            print(rows[-1], flush=True)
        heads = ("setting", "aim", "last model", "best", "met by the last and the best", *FIGURES)
        print(f"\n| {' | '.join(heads)} |")
        print(f"|{'---|' * len(heads)}")
        print("\n".join(rows))


if __name__ == "__main__":
    main()
