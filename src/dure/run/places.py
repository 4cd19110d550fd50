"""The places of real runs: the catalogue of launchers, by the name that `--on` has.

A launcher is a module in `run/launchers/` with two functions:

| function                               | result                                                                    |
|----------------------------------------|---------------------------------------------------------------------------|
| `after_restart(config)`                | the configuration to run: after a restart from outside, one that resumes  |
| `run_real(config, prebuilt, run_here)` | the record of the run; the leading process calls `run_here(config, launch)` |

`launch(setup, callbacks, saved, folder)` carries out the run on processes and returns its `Outcome`.
Its driver starts processes through a `Launcher`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from dure.runtime.heartbeat import BeatPipe


class RealPlace(NamedTuple):
    """A launcher's module. With `started_outside`, another program starts a process for each rank, on any machine.

    With `early_fork_server`, the launcher can use a fork server that was started before the run was resolved.
    """

    module: str
    started_outside: bool = False
    early_fork_server: bool = False

    def load(self) -> ModuleType:
        """Import the launcher."""
        return import_module(self.module)


LAUNCHERS: Mapping[str, RealPlace] = {
    "local": RealPlace("dure.run.launchers.local", early_fork_server=True),
    "torchrun": RealPlace("dure.run.launchers.torchrun", started_outside=True),
}
"""Adding a launcher is its module and a line here."""

DEFAULT = "local"
"""The place of a run that names none."""


def is_real(on: str) -> bool:
    """Whether processes run there; anywhere else time is modelled."""
    return on in LAUNCHERS


def is_started_outside(on: str) -> bool:
    """Whether another program starts a process for each rank there."""
    return on in LAUNCHERS and LAUNCHERS[on].started_outside


def has_early_fork_server(on: str) -> bool:
    """Whether a run there can use a fork server that was started before the run was resolved."""
    return on in LAUNCHERS and LAUNCHERS[on].early_fork_server


class Launcher(Protocol):
    """Starts processes by name, sends signals to them, and reports their exits."""

    @property
    def exited(self) -> Mapping[str, int]:
        """Exit statuses by name, negative for a signal."""
        ...

    @property
    def beats(self) -> BeatPipe:
        """The pipe through which the heartbeats of all processes come."""
        ...

    @property
    def processes(self) -> Mapping[str, int]:
        """Process ids of the running processes of this machine, by name."""
        ...

    def start(self, name: str, **arguments: Any) -> None:
        """Start a process; `arguments` are those of a `LaunchSpec`."""
        ...

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of this machine."""
        ...

    def look(self) -> None:
        """Read the exits since the last call. Raises `DureError` if the launcher itself has failed."""
        ...

    def last_line(self, name: str) -> str:
        """The last line of output of a process that has ended."""
        ...
