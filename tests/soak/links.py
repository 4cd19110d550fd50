"""Links between two hosts that are down for a while, or reset: each run ends as if nothing had happened.

    python tests/soak/links.py --seconds 1 3 5 10 20 --log links.jsonl
    python tests/soak/links.py --count 30 --seed 1 --log links.jsonl
    python tests/soak/links.py --resets 5 --cases bsp ssp downpour gossip ring pipeline --log links.jsonl

A trial makes `--at-once` runs over two hosts in network namespaces, and takes the link down several times, each time
when all runs go on again: for each of `--seconds`, or `--count` times for 1 to 20 s, five times in a trial, at moments
that the seed decides. A reset ends all connections between the hosts except those of the store where the ranks meet;
the engine's collectives, which cannot connect again, must be left out. Results go to the log, a line per run; those
that are there already are not made again. Exit status 1 if a run has failed. It needs root, and does nothing without.

A run whose result does not depend on the order of messages is compared with the same run in virtual time. Of the others
the updates are counted: each counts once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dure import train
from dure.errors import DureError
from dure_studies import namespaces

STEPS = 4000
"""Steps of each worker, or a multiple or part of them, by the pace of a case."""

STORE_PORT = 29500
"""First port of the stores where the ranks of a run meet."""

LIMIT_SECONDS = 240.0
"""Most seconds of a trial, without the time in which the link is down."""

START_SECONDS = 180.0
EVERY = 20
"""Steps between two rows of the history, whose longest gap shows how long a run stood still."""

SETTLE_SECONDS = 4.0
"""Least time between two downs: all connections carry data again, as TCP tries again after 3 s at the latest."""

MOST = 5
"""Most downs of one run."""


@dataclass(frozen=True)
class Case:
    """A run of two workers, one on each host. `ordered`: its result does not depend on the order of messages."""

    strategy: str
    job: str = "digits-mlp"
    steps: int = STEPS
    ordered: bool = False
    options: tuple[str, ...] = ("--dtype", "float64")


CASES = {
    "collective": Case("bsp collective", steps=4 * STEPS, ordered=True),
    "ring": Case("bsp collective:algorithm=ring", steps=3 * STEPS, ordered=True),
    "pipeline": Case("bsp collective gpipe:stages=2", steps=STEPS, ordered=True),
    "bsp": Case("bsp ps:shards=2", ordered=True),
    "ssp": Case("ssp ps:shards=2"),
    "ssp-1": Case("ssp ps:shards=1"),
    "downpour": Case("downpour ps:shards=2", steps=3 * STEPS),
    "gossip": Case("ad-psgd", steps=24 * STEPS),  # it computes on while the link is down
    # actor 0 and the replay are on host 0, actor 1 is on the other
    "rl": Case("bsp collective", "apex:env=CartPole-v1,actors=2,min_size=200", STEPS // 2, options=()),
}


@dataclass
class Result:
    """The end of one run. `applied` and `expected` are updates; `missed` are the downs after its end.

    `stood_still` are its longest gaps between two rows, as many as `downs`, in their order.
    """

    trial: str
    case: str
    downs: list[float]
    status: int | None = None
    seconds: float = 0.0
    stood_still: tuple[float, ...] = ()
    applied: int = 0
    expected: int = 0
    refused: int = 0
    survived: int = 0
    equal: bool | None = None
    missed: int = 0
    last: str = ""


@dataclass(frozen=True)
class Down:
    """The link is down for `seconds`, `after` seconds after all runs had begun, or went on; 0 is a reset."""

    after: float
    seconds: float


def drawn(seed: int, count: int) -> dict[str, list[Down]]:
    """The trials of `count` downs."""
    rng = random.Random(seed)
    downs = [Down(round(rng.uniform(0.0, 1.5), 2), round(rng.uniform(1.0, 20.0), 2)) for _ in range(count)]
    return {f"{seed}/{first}": downs[first : first + MOST] for first in range(0, count, MOST)}


def trial(name: str, cases: Sequence[str], downs: Sequence[Down], folder: Path) -> list[Result]:
    """Make the runs of `cases` at once, with the link down in between."""
    runs: dict[str, list[subprocess.Popen[bytes]]] = {}
    missed = Counter[str]()
    with namespaces.hosts(2, bandwidth=125e6) as hosts:
        try:
            for number, each in enumerate(cases):
                runs[each] = [_started(hosts, CASES[each], number, rank, folder / each) for rank in (0, 1)]
            _until(lambda: all(_began(folder / each) or _over(runs[each]) for each in cases), START_SECONDS)
            for number, down in enumerate(downs):
                if number:
                    _until_all_go_on(runs, folder)
                    time.sleep(SETTLE_SECONDS if down.seconds else 0.0)
                time.sleep(down.after)
                for each, pair in runs.items():
                    missed[each] += _over(pair)
                _disturb(hosts, down)
            _until(lambda: all(map(_over, runs.values())), LIMIT_SECONDS)
        finally:
            statuses = {each: [process.poll() for process in pair] for each, pair in runs.items()}
            for host in hosts.names:
                namespaces._end_all(host)
            for pair in runs.values():
                for process in pair:
                    process.wait()
    results = [_result(name, each, downs, statuses[each], folder / each) for each in cases]
    for result in results:
        result.missed = missed[result.case]
    return results


def _disturb(hosts: namespaces.Hosts, down: Down) -> None:
    """Take the link down for a while, or reset all connections that are not a store's."""
    if down.seconds:
        namespaces._ip(hosts.names[1], "link set eth0 down")
        time.sleep(down.seconds)
        namespaces._ip(hosts.names[1], "link set eth0 up")
        return
    stores = f"{STORE_PORT}:{STORE_PORT + len(CASES)}"
    first, last = stores.split(":")
    others = [f"( {end} < :{first} or {end} > :{last} )" for end in ("sport", "dport")]
    chosen = f"dst {hosts.addresses[0]} and {others[0]} and {others[1]}"
    killed = namespaces._do("ip", "netns", "exec", hosts.names[1], "ss", "-KHt", "state", "established", chosen)
    if not killed:
        raise DureError("there was no connection to reset, or the kernel cannot (CONFIG_INET_DIAG_DESTROY).")


def _started(hosts: namespaces.Hosts, case: Case, number: int, rank: int, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "dure", "train", case.job, "--strategy", case.strategy, *case.options]
    command += ["--on", "torchrun", "--steps", str(case.steps), "--eval-every", str(EVERY), "--seed", "3"]
    command += ["--out", str(folder / "run")] if rank == 0 else []
    environ = {"MASTER_PORT": str(STORE_PORT + number), "OMP_NUM_THREADS": "1"}
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(hosts._command(rank, 1, command, environ), stdout=log, stderr=log)


def _until(over: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not over() and time.monotonic() < end:
        time.sleep(0.1)


def _until_all_go_on(runs: Mapping[str, Sequence[subprocess.Popen[bytes]]], folder: Path) -> None:
    rows = {each: len(_rows(folder / each)) for each in runs}
    _until(lambda: all(len(_rows(folder / each)) > rows[each] or _over(runs[each]) for each in runs), LIMIT_SECONDS)


def _over(pair: Sequence[subprocess.Popen[bytes]]) -> bool:
    return all(process.poll() is not None for process in pair)


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "history.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _began(folder: Path) -> bool:
    return len(_rows(folder)) >= 2


def _result(name: str, case: str, downs: Sequence[Down], statuses: Sequence[int | None], folder: Path) -> Result:
    """The end of one run."""
    worst = next((status for status in statuses if status != 0), 0)
    found = Result(name, case, [down.seconds for down in downs], worst, expected=2 * CASES[case].steps)
    seconds = [row["seconds"] for row in _rows(folder)]
    gaps = sorted(((late - early, late) for early, late in itertools.pairwise(seconds)), reverse=True)[: len(downs)]
    found.stood_still = tuple(round(gap, 2) for gap, _ in sorted(gaps, key=lambda gap: gap[1]))
    path = folder / "run" / "summary.json"
    if not path.exists():
        found.last = " | ".join((folder / f"{rank}.log").read_text()[-400:].strip() for rank in (0, 1))
        return found
    summary = json.loads(path.read_text())
    found.seconds, found.applied = round(summary["seconds"], 2), summary["updates_applied"]
    found.refused, found.survived = summary["updates_refused"], summary["failures_survived"]
    if CASES[case].ordered:
        found.equal = abs(summary["loss"] - undisturbed(case)) <= 1e-9 * abs(undisturbed(case))
        found.expected = found.applied
    return found


_losses: dict[str, float] = {}


def undisturbed(name: str) -> float:
    """The loss of the same run in virtual time."""
    if name not in _losses:
        case = CASES[name]
        options: dict[str, Any] = {"steps": case.steps, "seed": 3, "dtype": "float64", "eval_every": EVERY}
        _losses[name] = train(case.job, strategy=case.strategy, on="virtual", workers=2, **options).summary()["loss"]
    return _losses[name]


def failed(result: Result) -> bool:
    """Whether the downs have changed the result of a run."""
    return bool(result.status != 0 or result.equal is False or result.applied != result.expected or result.missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, nargs="*", default=[], help="one trial with one down for each")
    parser.add_argument("--count", type=int, default=0, help="downs of random length at random moments")
    parser.add_argument("--resets", type=int, default=0, help="resets in one trial")
    parser.add_argument("--short", action="store_true", help="runs of an eighth of the steps")
    parser.add_argument("--at-once", type=int, default=3, help="runs over the same link")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--log", type=Path, required=True)
    given = parser.parse_args()
    if given.short:
        CASES.update({name: replace(case, steps=case.steps // 8) for name, case in CASES.items()})
    if reason := namespaces.missing():
        print(f"skipped, as two hosts cannot be made: {reason}")
        return 0
    trials = drawn(given.seed, given.count)
    if given.seconds:
        trials["given"] = [Down(0.0, seconds) for seconds in given.seconds]
    if given.resets:
        trials["resets"] = [Down(0.3, 0.0)] * given.resets
    lines = given.log.read_text().splitlines() if given.log.exists() else []
    done = {(each["trial"], each["case"]) for each in map(json.loads, lines)}
    problems = 0
    for name, downs in trials.items():
        cases = [case for case in given.cases if (name, case) not in done]
        for first in range(0, len(cases), given.at_once):
            with tempfile.TemporaryDirectory(prefix="links-") as folder:
                for result in trial(name, cases[first : first + given.at_once], downs, Path(folder)):
                    problems += failed(result)
                    with given.log.open("a") as log:
                        log.write(json.dumps(asdict(result)) + "\n")
                    print("FAILED" if failed(result) else "right ", result, flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
