"""Runs of `dure train` with the device under test: `python -m accelerator.train_programs TASKS`.

TASKS is a JSON list, and a line of JSON tells what became of each task. A list is a command of `dure`. An object is a
run of a `job` of `train_jobs` under a `strategy`, with options:

| with     | what is done                                                                                       |
|----------|----------------------------------------------------------------------------------------------------|
| nothing  | the run on the CPU and on the device                                                               |
| `moves`  | the run on the first of these devices, resumed on each of the others, with a checkpoint of `every` |
| `killed` | the run on the device, in which this process is killed at step `at`, and restarted with `again`    |

Under torchrun all tasks are commands, which write what they write.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerator import target
from support.real_runs import Trial
from support.runs import local

from dure.cli.main import main as command
from dure.errors import DureError
from dure.job.replica import digest
from dure.run import train
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.runtime.launch.fork_server import ForkServer

JOBS = Path(__file__).with_name("train_jobs.py")
KEPT = ("params_sha256", "bytes_sent", "updates_applied", "loss", "devices", "failures_survived")
"""What is told of a summary."""


THERE = ("dyadic", "bags", "sparse_bags", "plain", "slow")
"""Jobs that have a form, called `dyadic_there`, which fails unless gradients are computed on the device."""


def given(job: str, strategy: str, **options: Any) -> dict[str, Any]:
    """The options of a run."""
    return {"job": f"{JOBS}:{job}", "strategy": strategy, "workers": 2, "eval_every": 1000} | options


def both(fork_server: ForkServer, job: str, **options: Any) -> dict[str, Any]:
    """The run on the CPU and on the device; its errors as text."""
    found: dict[str, Any] = {}
    for device, name in (("cpu", job), ("auto", f"{job}_there" if job in THERE else job)):
        try:
            run = local(fork_server=fork_server, device=device, **given(name, **options))
            found[device] = {name: run.summary.get(name) for name in KEPT} | {"loss": run.rows[-1]["loss"]}
        except DureError as error:
            found[device] = {"error": str(error)}
    return found


def moved(fork_server: ForkServer, moves: Sequence[str], every: int, **options: Any) -> Mapping[str, Any]:
    """A run that has a checkpoint, ends one step later, and is resumed from it on another device."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        place: dict[str, Any] = {"out": out, "checkpoint_every": every, **given(**options)}
        for number, device in enumerate(moves, start=1):
            config = TrainConfig(**place, device=device, steps=number * every + 1)
            run = train.run(config, Prebuilt(fork_server=fork_server))
            place = {"resume": out}
    return {name: run.summary().get(name) for name in KEPT}


def killed(fork_server: ForkServer, killed: str, *, at: int, again: bool = False, **options: Any) -> Mapping[str, Any]:
    """A run on the device in which the process `killed` is killed."""
    done: list[str] = []

    def act(trial: Trial) -> None:
        if not done and trial.driver.steps("worker 0") >= at:
            done.append(killed)
            trial.kill(killed)
        if again and done == [killed] and killed in trial.driver.roster.failed and killed in fork_server.exited:
            done.append("started")
            trial.driver.start(killed)

    with tempfile.TemporaryDirectory() as folder:
        out = {"out": Path(folder) / "run"} if "checkpoint_every" in options else {}
        trial = Trial(TrainConfig(**given(**options), **out, device="auto"))
        try:
            outcome = trial.run(act, fork_server=fork_server)
        except DureError as error:
            return {"error": str(error)}
        counts = {"failures_survived": outcome.totals.failures_survived, **outcome.totals.counts}
        return {"params_sha256": digest(outcome.params), "unfinished": [*outcome.notes["unfinished"]], **counts}


def written(arguments: Sequence[str]) -> dict[str, Any]:
    """The exit status of a command, and its standard output and error."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        for descriptor, file in ((1, out), (2, errors)):
            os.dup2(file.fileno(), descriptor)
        try:
            status = command(arguments)
        finally:
            for descriptor, before in zip((1, 2), kept, strict=True):
                os.dup2(before, descriptor)
                os.close(before)
        texts = [(file.seek(0), file.read())[1] for file in (out, errors)]
    return {"status": status, "out": texts[0], "err": texts[1]}


def carried_out(fork_server: ForkServer, task: Any) -> Mapping[str, Any]:
    if isinstance(task, list):
        return written(task)
    kind = moved if "moves" in task else killed if "killed" in task else both
    return kind(fork_server, **task)


def main() -> None:
    tasks = json.loads(sys.argv[1])
    target.prepare()
    if "RANK" in os.environ:
        sys.exit(max(map(command, tasks)))
    with ForkServer() as fork_server:
        for task in tasks:
            print(json.dumps(carried_out(fork_server, task)), flush=True)


if __name__ == "__main__":
    main()
