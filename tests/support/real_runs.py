"""Real runs that a test interferes with."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from support import faulty_jobs

from dure.job.optimizer import FlatOptimizer
from dure.run.config import TrainConfig
from dure.run.driver import Driver
from dure.run.failures import RestartPolicy
from dure.run.launchers.local import keep_running
from dure.run.outcome import Outcome
from dure.run.prebuilt import Callbacks
from dure.run.process import FaultSettings
from dure.run.resolve import resolve
from dure.run.setup import Setup
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.launch.interruption import Interruption

JOBS = Path(faulty_jobs.__file__)


def configured(job: str, strategy: str, **options: Any) -> TrainConfig:
    """A run on this machine of one of `faulty_jobs`, or of a built-in job. No killed worker is replaced."""
    name = job if "-" in job or job == "quadratic" else f"{JOBS}:{job}"
    plain = {"job": name, "strategy": strategy, "on": "local", "eval_every": 1000, "replace": False}
    return TrainConfig(**plain | options)


class Driven(Driver):
    """A driver that lets `act` interfere at every turn."""

    act: Callable[[Driven], None] = staticmethod(lambda driver: None)
    always = False

    def turn(self) -> None:
        super().turn()
        if self.registration.begun.done or self.always:
            self.act(self)

    @property
    def statuses(self) -> Sequence[Mapping[str, Any]]:
        """What the shards reported at the end."""
        return list(self.results.statuses.values())

    @property
    def logs(self) -> Sequence[list[tuple[int, int, int]]]:
        """The updates that each shard applied."""
        return [[tuple(entry) for entry in status["log"]] for status in self.statuses]

    def steps(self, name: str) -> int:
        """The last step that a worker has reported."""
        return int(self.progress.reports[name]["steps"]) if name in self.progress.reports else 0


class Trial:
    """One run, and what can be done to it."""

    def __init__(self, config: TrainConfig, fault_settings: FaultSettings | None = None) -> None:
        self.config = config
        self.fault_settings = fault_settings or FaultSettings(log=True)
        self.setup: Setup = resolve(config)[0]
        self.drivers: list[Driven] = []

    def run(
        self,
        act: Callable[[Trial], None] = lambda trial: None,
        *,
        always: bool = False,
        fork_server: ForkServer | None = None,
        callbacks: Callbacks | None = None,
        interruption: Interruption | None = None,
    ) -> Outcome:
        """To its end; `act` is called at every turn, from when all are ready on or `always`."""
        folder = self.config.out and self.config.out / "checkpoints"
        restarts = RestartPolicy(self.setup, folder)

        def make() -> Driven:
            shown, given = (
                callbacks or Callbacks(),
                {"folder": folder, "restarts": restarts, "interruption": interruption},
            )
            driver = Driven(self.setup, shown, self.fork_server, fault_settings=self.fault_settings, **given)
            driver.act = lambda _: act(self)
            driver.always = always
            self.drivers.append(driver)
            return driver

        with ExitStack() as stack:
            self.fork_server = fork_server or stack.enter_context(ForkServer())
            self.fork_server.load(self.setup.plain())
            try:
                return keep_running(make, self.fork_server, self.config.resume and folder, interruption)
            finally:
                self.fork_server.clear()

    @property
    def driver(self) -> Driven:
        """The one that the run has now, or had last."""
        return self.drivers[-1]

    def kill(self, name: str) -> None:
        self.fork_server.signal(name, signal.SIGKILL)

    def pids(self) -> list[int]:
        return [self.fork_server._process.pid, *self.fork_server.pids.values()]


class Terminate:
    """Sends SIGTERM to this process once all workers have made `after` steps."""

    def __init__(self, after: int = 10) -> None:
        self.after, self.sent = after, False

    def __call__(self, trial: Trial) -> None:
        driver = trial.driver
        if not self.sent and all(driver.steps(name) >= self.after for name in driver.roster.workers):
            self.sent = True
            signal.raise_signal(signal.SIGTERM)


class Killer:
    """Kills `count` workers, one after another, at random moments, and starts each again once its death is known."""

    def __init__(self, count: int, seed: int, pause: float = 0.15) -> None:
        self.left = count
        self.killed: list[str] = []
        self.random = random.Random(seed)
        self.pause = pause
        self.victim: str | None = None
        self.due = 0.0

    def __call__(self, trial: Trial) -> None:
        driver = trial.driver
        if self.victim is not None:
            if self.victim not in driver.roster.failed or self.victim not in trial.fork_server.exited:
                return
            driver.start(self.victim)
            self.victim = None
            self.due = time.monotonic() + self.random.uniform(0.0, self.pause)
        working = sorted(
            name
            for name in driver.progress.reports
            if name not in driver.roster.finished and name in driver.roster.ready
        )
        if self.left and working and time.monotonic() >= self.due:
            self.victim = self.random.choice(working)
            self.left -= 1
            self.killed.append(self.victim)
            trial.kill(self.victim)


class Notes:
    """What the workers of a `counted` run wrote down: updates are (worker, incarnation, number)."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[tuple[int, int, int], int] = {}
        self.acknowledged: set[tuple[int, int, int]] = set()
        self.cut_short = 0
        for path in folder.iterdir():
            lines = [line.split() for line in path.read_text().splitlines()]
            for word, *figures in lines:
                worker, incarnation, number, *row = map(int, figures)
                if word == "pushes":
                    self.rows[worker, incarnation, number] = row[0]
                else:
                    self.acknowledged.add((worker, incarnation, number))
            self.cut_short += bool(lines) and lines[-1][0] == "pushes"

    def replay(self, setup: Setup, logs: Sequence[Sequence[tuple[int, int, int]]]) -> torch.Tensor:
        """The parameters that the shards' logs lead to."""
        values = setup.replica.params.detach().clone()
        table = faulty_jobs.table()
        for log, ranges in zip(logs, setup.topology.ranges, strict=True):
            for start, stop in ranges:
                optimizer = FlatOptimizer(setup.job.optimizer, stop - start, values.dtype)
                part = values[start:stop]
                for update in log:
                    optimizer.apply(part, table[self.rows[update], start:stop], part)
        return values


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; one that only waits to be reaped has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> dict[int, list[int]]:
    """Who is whose parent, on this machine."""
    found: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            found[parent].append(int(folder.name))
    return found


def descendants(pid: int) -> list[int]:
    tree = children()
    below = list(tree.get(pid, ()))
    for each in below:
        below += tree.get(each, ())
    return below


def gone_within(pids: Sequence[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
