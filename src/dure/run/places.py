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

from dure.core.address import FOUND, host_and_port
from dure.errors import UsageError

if TYPE_CHECKING:
    from dure.runtime.heartbeat import BeatPipe


class RealPlace(NamedTuple):
    """A launcher's module. With `started_outside`, another program starts a process for each rank, on any machine.

    With `early_fork_server`, the launcher can use a fork server that was started before the run was resolved.
    With `takes_address`, a place may be the name and an address, as in ray:10.0.0.1:6379.
    """

    module: str
    started_outside: bool = False
    early_fork_server: bool = False
    takes_address: bool = False

    def load(self) -> ModuleType:
        """Import the launcher."""
        return import_module(self.module)


LAUNCHERS: Mapping[str, RealPlace] = {
    "local": RealPlace("dure.run.launchers.local", early_fork_server=True),
    "torchrun": RealPlace("dure.run.launchers.torchrun", started_outside=True),
    "ray": RealPlace("dure.run.launchers.ray", takes_address=True),
}
"""Adding a launcher is its module and a line here."""

DEFAULT = "local"
"""The place of a run that names none."""


def launcher_of(on: str) -> RealPlace | None:
    """The launcher of a place; None for a place in virtual time."""
    name, colon, _ = on.partition(":")
    found = LAUNCHERS.get(name)
    return None if found is None or (colon and not found.takes_address) else found


def address_of(on: str) -> str:
    """The address in a place; empty if it has none."""
    return on.partition(":")[2] if is_real(on) else ""


def check_address(on: str) -> None:
    """Raise `UsageError` for a place whose address is none."""
    name, colon, address = on.partition(":")
    if not is_real(on) or not colon or address == FOUND:
        return
    if "//" in address:
        raise UsageError(
            f"{on} is an address of Ray's client, which can start no process on the cluster that dure needs. Run dure "
            f"on a machine of the cluster, with --on {name}:{FOUND}, or by ray job submit."
        )
    if not host_and_port(address):
        raise UsageError(
            f'"{on}" has no address of a machine and a port after {name}:. Write {name}:10.0.0.1:6379 with the '
            f"address that ray start --head prints, {name}:{FOUND} for the cluster of this machine, or {name} alone "
            "for one that this run starts."
        )


def is_real(on: str) -> bool:
    """Whether processes run there; anywhere else time is modelled."""
    return launcher_of(on) is not None


def is_started_outside(on: str) -> bool:
    """Whether another program starts a process for each rank there."""
    found = launcher_of(on)
    return found is not None and found.started_outside


def is_here(on: str) -> bool:
    """Whether all processes of a run there are on this machine, and share its memory."""
    found = launcher_of(on)
    return found is not None and not found.started_outside and not found.takes_address


def takes_address(on: str) -> bool:
    """Whether another program chooses the machines there, as Ray does; the place may have its address."""
    found = launcher_of(on)
    return found is not None and found.takes_address


def has_early_fork_server(on: str) -> bool:
    """Whether a run there can use a fork server that was started before the run was resolved."""
    found = launcher_of(on)
    return found is not None and found.early_fork_server


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

    def room(self) -> int:
        """How many more workers can be started now, each on processors that no other worker uses; 0 if none.

        An elastic run grows by as many, once all its workers have begun. It starts those that a user has asked for
        without this question: `start` may share processors, or wait for a machine.
        """
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


class ReusableLauncher(Launcher, Protocol):
    """A launcher that starts all processes itself, and can start all again."""

    def load(self, setup: Mapping[str, Any]) -> None:
        """Load a run from its `setup` (plain values). Call it before any `start`."""
        ...

    def clear(self) -> None:
        """End all processes of the run; the launcher stays ready for others."""
        ...
