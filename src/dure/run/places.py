"""The places of real runs: the catalogue of launchers, by the name that `--on` has.

A launcher is a module in `run/launchers/` with two functions:

| function                     | result                                                                              |
|------------------------------|-------------------------------------------------------------------------------------|
| `after_restart(config)`      | the configuration to run: one that resumes after a restart from outside       |
| `run_real(config, run_here)` | the record of the run; the process that leads it calls `run_here(config, launch)`   |

`launch(setup, watch, saved, folder, prebuilt)` carries out the run on processes and returns its `Outcome`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class RealPlace(NamedTuple):
    """A launcher's module. With `started_outside`, another program starts a process for each rank, on any machine."""

    module: str
    started_outside: bool = False

    def load(self) -> ModuleType:
        """Import the launcher."""
        return import_module(self.module)


LAUNCHERS: Mapping[str, RealPlace] = {
    "local": RealPlace("dure.run.launchers.local"),
    "torchrun": RealPlace("dure.run.launchers.torchrun", started_outside=True),
}
"""Adding a launcher is its module and a line here."""


def is_real(on: str) -> bool:
    """Whether processes run there; anywhere else time is modelled."""
    return on in LAUNCHERS


def is_started_outside(on: str) -> bool:
    """Whether another program starts a process for each rank there."""
    return on in LAUNCHERS and LAUNCHERS[on].started_outside
