"""Returns of architectures of reinforcement learning after equal seconds of this machine, in one report.

    pip install 'dure[rl]'
    python bench/rl_equal_time.py [--seconds 40] [--seeds 3] [--out runs/rl-equal-time]

All learn CartPole-v1 with double dueling Q-learning of 3 steps and the same network. `score` is the mean over the
evaluations of a run, each of 20 episodes: the mean return over the time. `dure reproduce reinforcement` compares the
same in virtual time, with more actors and learners than this machine has cores.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from _script import need, parse, told

SHARED = "--env CartPole-v1 --n-step 3 --set double=true --set dueling=true --eval-episodes 20"
SETTINGS = {
    "dqn": f"dqn {SHARED} --eval-every 500",
    "gorila-bsp": f"gorila {SHARED} --learners 2 --sync bsp --topology ps --eval-every 500",
    "gorila-downpour": f"gorila {SHARED} --learners 2 --eval-every 500",
    "apex-uniform": f"apex {SHARED} --actors 2 --alpha 0 --eval-every 500",
    "apex-prioritised": f"apex {SHARED} --actors 2 --eval-every 500",
}


def score(folder: Path) -> float:
    """The mean of the evaluations in a record."""
    rows = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return statistics.fmean(row["mean_return"] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/rl-equal-time"))
    parser.add_argument("--only", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--json", type=Path)
    given = parse(parser, seconds=1.0, seeds=1, only=["dqn"], out=Path("runs/rl-equal-time-smoke"))
    need("gymnasium", "rl")
    if given.smoke:
        shutil.rmtree(given.out, ignore_errors=True)
    with told("rl_equal_time", given) as facts:
        facts |= {"seconds": given.seconds, "rows": compare(given)}


def compare(given: argparse.Namespace) -> dict[str, list[float]]:
    """Make the runs, print the table, and write the report; the scores by setting."""
    program = [sys.executable, "-m", "dure"]
    print("| setting | score of each seed | best | frames/s | updates/s | samples per insert | parameter lag |")
    print("|---|---|---|---|---|---|---|")
    folders, rows = [], {}
    for name in given.only:
        command = SETTINGS[name]
        found, scores = [], []
        for seed in range(given.seeds):
            folder = given.out / f"{name}-{seed}"
            if given.smoke:
                command = command.replace("--eval-episodes 20", "--eval-episodes 1").replace("every 500", "every 50")
            line = f"{command} --seconds {given.seconds:g} --seed {seed} --out {folder} --json"
            done = subprocess.run([*program, "rl", *line.split()], stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            scores.append(score(folder))
            folders.append(str(folder))
        rows[name] = scores
        cells = [name, ", ".join(f"{each:.0f}" for each in scores)]
        cells.append(", ".join(f"{each['best_return']:.0f}" for each in found))
        for key in ("frames_per_second", "updates_per_second"):
            cells.append(f"{statistics.median(each[key] for each in found):,.0f}")
        cells.append(f"{statistics.median(each['replay']['ratio'] for each in found):.1f}")
        cells.append(f"{statistics.median(each['param_lag'] for each in found):,.0f}")
        print(f"| {' | '.join(cells)} |", flush=True)
    subprocess.run([*program, "report", *folders, "--out", str(given.out / "report.html")], check=True)
    return rows


if __name__ == "__main__":
    main()
