"""A real run on processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from dure.errors import DureError, UsageError
from dure.run import checkpoint
from dure.run.driver import Hub
from dure.run.outcome import Outcome
from dure.run.restart_policy import Restarts
from dure.runtime.launch.fork_server import Nursery
from dure.runtime.launch.interruption import Interruption
from dure.runtime.launch.room import check_memory, physical_memory

if TYPE_CHECKING:
    from dure.run.setup import Task
    from dure.run.virtual import Watch


def run_processes(
    task: Task,
    watch: Watch,
    resume: Path | None,
    folder: Path | None,
    *,
    named: bool,
    nursery: Nursery | None = None,
    interruption: Interruption | None = None,
) -> Outcome:
    """Train `task` on processes of this machine.

    `named`: its job can be made again from its name. `nursery`, if it was begun earlier, is its owner's to close.
    Raises `Interrupted` after `interruption`, once a checkpoint is written where that is possible.
    """
    interruption = interruption or Interruption()
    if not named:
        raise UsageError(
            "a Job object cannot be handed to other processes. Put its function into a file and name it "
            '("train.py:make_job"), or run in virtual time (on="virtual").'
        )
    check_memory(task.workers + task.servers, task.replica.params.nbytes, physical_memory())
    task.prepare()  # what is wrong with it is said here, before a process starts
    with ExitStack() as stack:
        if nursery is None:
            nursery = stack.enter_context(Nursery())
        nursery.load(task.config.plain())
        stack.callback(nursery.clear)
        restarts = Restarts(task, folder)

        def make() -> Hub:
            return Hub(task, watch, nursery, folder=folder, restarts=restarts, interruption=interruption)

        return keep_running(make, nursery, resume, interruption)


def keep_running(
    make: Callable[[], Hub], nursery: Nursery, resume: Path | None, interruption: Interruption | None = None
) -> Outcome:
    """One hub after another, each going on from the last checkpoint, until the work is done."""
    interruption = interruption or Interruption()
    before: Hub | None = None
    pause: float | None = 0.0
    while True:
        hub = make()
        try:
            hub.node.loop.run_until(hub.node.sleep(pause or 0.0))
            with interruption.deferred():
                return hub.run(resume, after=before)
        except DureError:
            pause = hub.begin_again()
            if pause is None:
                raise
        finally:
            hub.close()
        nursery.clear()
        assert hub.folder is not None
        resume, before = hub.folder, hub
        hub.watch.rewind(checkpoint.rows(checkpoint.load(resume)))
