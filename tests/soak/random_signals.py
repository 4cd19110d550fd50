"""Random signals to the processes of real runs: each run ends in time, says why, and leaves nothing behind.

    python tests/soak/random_signals.py --count 300 --seed 1 --log signals.jsonl

Each trial is decided by the seed and its number: the strategy, the process (the launcher, the one that forks, a worker
or a server), the moment and the signal, SIGSTOP as often as SIGKILL. Results go to the log, a line per trial; trials
that are there already are not made again. Exit status 1 if a trial has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

STRATEGIES = (
    "bsp",
    "bsp collective:algorithm=ring",
    "bsp ps:shards=2",
    "bsp ps sign",
    "bsp collective 1bit",
    "averaging:period=4",
    "ssp:bound=3 ps",
    "downpour ps:shards=2",
    "downpour+dc-asgd:lambda=0.04 ps",
    "k-sync:k=2 ps",
    "k-async:k=2 ps",
    "backup:backups=1 ps",
    "easgd:period=4 ps",
    "bmuf:period=4",
    "ad-psgd",
    "hogwild",
    "asysvrg",
    "lbfgs ps",
    "one-shot",
)
"""One of each method and topology at least."""

LIMIT_SECONDS = 60.0
"""From the signal to the end of the run. Documented are the time after which a frozen process is given up, and 10 s of
grace for a last checkpoint; the rest is the training that is left, on a machine that does other things."""

MARK = "DURE_SIGNALS"
NAMED = re.compile(r"worker \d|server \d|the process that starts the others|dure: (terminated|interrupted)")


@dataclass
class Trial:
    """What one trial does, and how it ended; `problems` is empty where all was well."""

    number: int
    strategy: str
    target: str
    signal: str
    after: float
    status: int | None = None
    seconds: float = 0.0
    last: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pace:
    """Seconds: of training at most, up to the `latest` signal, and until a frozen process is given up."""

    training: float = 12.0
    latest: float = 5.0
    frozen_after: float = 3.0


def drawn(seed: int, number: int, pace: Pace) -> Trial:
    """The trial of that number."""
    rng = random.Random(f"{seed}/{number}")
    target = rng.choice(["launcher", "fork server", "child", "child", "child", "child", "child", "child"])
    signals = ["SIGKILL", "SIGTERM", "SIGINT"] if target == "launcher" else ["SIGKILL", "SIGSTOP", "pause"]
    weights = [1, 1, 1] if target == "launcher" else [5, 5, 2]
    strategy, number_of = rng.choice(STRATEGIES), rng.choices(signals, weights)[0]
    return Trial(number, strategy, target, number_of, round(rng.uniform(0, pace.latest), 2))


def run(trial: Trial, seed: int, pace: Pace) -> Trial:
    """Make the trial."""
    mark, rng = secrets.token_hex(8), random.Random(f"{seed}/{trial.number}/who")
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        place = Path(name)
        (place / "tmp").mkdir()
        environment = {**os.environ, MARK: mark, "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1"}
        limits = ["--warn-after", pace.frozen_after / 3, "--frozen-after", pace.frozen_after]
        length = ["--workers", 3, "--steps", 3000, "--seconds", pace.training]
        length += ["--checkpoint-every", 100, "--eval-every", 500]
        job = "quadratic" if "lbfgs" in trial.strategy else "digits-mlp"
        command = [sys.executable, "-m", "dure", "train", job, "--strategy", trial.strategy, *limits, *length]
        command += ["--out", place / "run", "--json"]
        with (place / "err").open("w+b") as errors:
            process = subprocess.Popen(
                [*map(str, command)], env=environment, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
            try:
                strike(trial, process, mark, rng, pace.frozen_after / 2)
                struck = time.monotonic()
                process.wait(LIMIT_SECONDS)
                trial.seconds = round(time.monotonic() - struck, 2)
            except subprocess.TimeoutExpired:
                trial.problems += (f"it had not ended {LIMIT_SECONDS:g} s after the signal",)
            finally:
                trial.status = process.poll()
                left = until_none(lambda: marked(mark)) if trial.status is not None else []
                for pid in marked(mark):
                    os.kill(pid, signal.SIGKILL)
                process.wait()
            text = (place / "err").read_text(errors="replace")
        judge(trial, text, left, set(os.listdir("/dev/shm")) - shared, os.listdir(place / "tmp"))
    return trial


def strike(trial: Trial, process: subprocess.Popen[bytes], mark: str, rng: random.Random, pause: float) -> None:
    """Wait for the moment, and send the signal to the process that the trial is about; continue it after a `pause`."""
    started = time.monotonic()
    needed = {"launcher": 0, "fork server": 1, "child": 2}[trial.target]
    while process.poll() is None and len(children(mark, process.pid)) < needed and time.monotonic() < started + 60:
        time.sleep(0.02)
    time.sleep(trial.after)
    here = children(mark, process.pid)
    pid = process.pid
    if trial.target != "launcher":
        if not here:
            return  # the run is over but for its launcher
        forking = [each for each in here if parent(each) == process.pid]
        forked = [each for each in here if each not in forking]
        pid = rng.choice(sorted(forked if trial.target == "child" and forked else forking or here))
    try:
        os.kill(pid, signal.SIGSTOP if trial.signal == "pause" else signal.Signals[trial.signal])
        if trial.signal == "pause":
            time.sleep(pause)
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass  # the run was over before


def judge(trial: Trial, text: str, left: list[int], shared: set[str], temporary: list[str]) -> None:
    """Note what is wrong with how the trial ended."""
    lines = [line for line in re.split(r"[\n\r]", text) if line.strip()]
    trial.last = next((line for line in reversed(lines) if line.startswith("dure: ")), lines[-1] if lines else "")[:300]
    killed = trial.target == "launcher" and trial.signal == "SIGKILL"
    problems = [
        *(["a traceback"] if "Traceback" in text else []),
        *(["no sentence names who"] if trial.status and not killed and not NAMED.search(text) else []),
        *([f"{len(left)} processes stayed"] if left else []),
        *([f"shared memory stayed: {sorted(shared)}"] if shared else []),
        *([f"temporary files stayed: {sorted(temporary)}"] if temporary else []),
    ]
    trial.problems += tuple(problems)


def marked(mark: str) -> list[int]:
    """The processes of this trial that run, or are stopped."""
    found, entry = [], f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stopped = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[0]
                if stopped != "Z" and entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
            except OSError:
                continue  # it has ended
    return found


def children(mark: str, launcher: int) -> list[int]:
    """The processes that the launcher has started, and theirs."""
    return [pid for pid in marked(mark) if pid != launcher]


def parent(pid: int) -> int:
    """The process that has started `pid`; 0 if that has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def until_none(look: Callable[[], list[int]], seconds: float = 10.0) -> list[int]:
    """What `look` still finds after some seconds."""
    ended = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < ended:
        time.sleep(0.1)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Make the trials that the log has not; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("signals.jsonl"))
    parser.add_argument("--quick", action="store_true", help="shorter runs, earlier signals")
    asked = parser.parse_args(arguments)
    pace = Pace(training=3.0, latest=1.5, frozen_after=1.5) if asked.quick else Pace()
    made = [json.loads(line) for line in asked.log.read_text().splitlines()] if asked.log.exists() else []
    known = {each["number"] for each in made}
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # runs would inherit that it is ignored, as in a background
    for number in range(asked.count):
        if number not in known:
            trial = run(drawn(asked.seed, number, pace), asked.seed, pace)
            made.append(asdict(trial))
            with asked.log.open("a") as log:
                log.write(f"{json.dumps(asdict(trial))}\n")
            sys.stdout.write(f"{trial}\n")
            sys.stdout.flush()
    failed = [each["number"] for each in made if each["problems"]]
    sys.stdout.write(f"{len(made)} trials, {len(failed)} failed: {failed}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
