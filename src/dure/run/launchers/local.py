"""A real run on processes of this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dure.errors import DureError
from dure.run import checkpoint
from dure.run.driver import Driver
from dure.run.failures import RestartPolicy
from dure.run.outcome import Outcome
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.launch.interruption import Interruption
from dure.runtime.launch.preemption import RANK, watching

if TYPE_CHECKING:
    from dure.report.run import Run
    from dure.run.config import TrainConfig
    from dure.run.places import ReusableLauncher
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.setup import Setup


def after_restart(config: TrainConfig) -> TrainConfig:
    """The configuration as it is: nothing restarts a run of this launcher from outside."""
    return config


def run_real(
    config: TrainConfig, prebuilt: Prebuilt, run_here: Callable[[TrainConfig, Callable[..., Outcome]], Run]
) -> Run:
    """Lead the run from this process, which starts all others."""
    fork_server, interruption = prebuilt.fork_server, prebuilt.interruption
    return run_here(config, partial(run_processes, fork_server=fork_server, interruption=interruption))


def run_processes(
    setup: Setup,
    callbacks: Callbacks,
    resume: Path | None,
    folder: Path | None,
    *,
    fork_server: ForkServer | None = None,
    interruption: Interruption | None = None,
) -> Outcome:
    """Train `setup` on processes of this machine.

    The caller closes a `fork_server` that it passes.
    Raises `Interrupted` after `interruption`, once a checkpoint is written where that is possible.
    """
    interruption = interruption or Interruption()
    setup.prepare()  # raises its errors before a process starts
    with ExitStack() as stack:
        if fork_server is None:
            fork_server = stack.enter_context(ForkServer())
        return train_on(fork_server, setup, callbacks, resume, folder, interruption=interruption)


def train_on(
    launcher: ReusableLauncher,
    setup: Setup,
    callbacks: Callbacks,
    resume: Path | None,
    folder: Path | None,
    *,
    interruption: Interruption,
    interface: str | None = None,
) -> Outcome:
    """Train `setup` on processes of `launcher`, which reach this one at `interface` if they are on other machines."""
    restarts = RestartPolicy(setup, folder)

    def make() -> Driver:
        return Driver(
            setup,
            callbacks,
            launcher,
            folder=folder,
            restarts=restarts,
            interface=interface,
            interruption=interruption,
        )

    launcher.load(setup.plain())
    notice = setup.config.preemption_notice
    with ExitStack() as stack:
        if notice is not None and RANK not in notice:
            stack.enter_context(watching(notice, interruption.warned))
        stack.callback(launcher.clear)
        return keep_running(make, launcher, resume, interruption)


def keep_running(
    make: Callable[[], Driver],
    launcher: ReusableLauncher,
    resume: Path | None,
    interruption: Interruption | None = None,
) -> Outcome:
    """Run one driver after another, each from the last checkpoint, until the work is done."""
    interruption = interruption or Interruption()
    before: Driver | None = None
    pause: float | None = 0.0
    while True:
        driver = make()
        try:
            driver.node.loop.run_until(driver.node.sleep(pause or 0.0))
            with interruption.deferred():
                return driver.run(resume, after=before)
        except DureError:
            pause = driver.begin_again()
            if pause is None:
                raise
        finally:
            driver.close()
        launcher.clear()
        assert driver.folder is not None
        resume, before = driver.folder, driver
        driver.callbacks.rewind(checkpoint.rows(checkpoint.load(resume)))
