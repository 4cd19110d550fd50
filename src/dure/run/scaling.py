"""The number of workers of an elastic run: how it is asked for from outside, and how the driver follows.

    dure scale DIR 6  -->  DIR/scale-request.json  -->  driver: starts workers, or has them retire
                      <--  DIR/scale.json          <--  driver: the range, the target, the workers that run

A run begins with the least number of workers. Until somebody asks for a number, it grows as far as the launcher has
room.

A worker that retires leaves at a step boundary, gives back the rest of its lease, and its process ends.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WORKER, NodeId, by_rank
from dure.core.regular_file import read_regular
from dure.core.text import log
from dure.errors import DureError, UsageError
from dure.report.files import replacing
from dure.run.config import WorkerRange

if TYPE_CHECKING:
    from dure.run.leases import Leases
    from dure.run.places import Launcher
    from dure.run.replacement import Replacements
    from dure.run.roster import Commands, ProcessRoster
    from dure.runtime.launch.interruption import Interruption

STATE = "scale.json"
REQUEST = "scale-request.json"

LOOK_SECONDS = 0.5
"""Period in which the driver looks for a request, and for room."""

ANSWER_SECONDS = 10.0
"""Seconds that a request waits for the driver's answer."""

MOST_BYTES = 10_000


@dataclass(frozen=True)
class RunSize:
    """The size of an elastic run: its range, the `target`, and the workers that `run`."""

    least: int
    most: int
    target: int
    run: list[str]


class Scaling:
    """Starts and retires workers until as many run as were asked for, or as the launcher has room for.

    `start` starts a worker by name. `folder` is that of the run; without it nobody can ask.
    """

    def __init__(
        self,
        elastic: WorkerRange,
        folder: Path | None,
        *,
        leases: Leases,
        roster: ProcessRoster,
        commands: Commands,
        launcher: Launcher,
        replacements: Replacements,
        start: Callable[[str], None],
    ) -> None:
        self._elastic, self._folder = elastic, folder
        self._target = elastic.least
        self._asked = False
        self._leases, self._roster, self._commands = leases, roster, commands
        self._launcher, self._start = launcher, start
        self._replacements = replacements
        self._retiring = set[str]()
        self._looked = 0.0
        self._shown: RunSize | None = None
        self.names = [str(NodeId(WORKER, rank)) for rank in range(elastic.most)]

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values."""
        return {"target": self._target, "asked": self._asked}

    def restore(self, state: Mapping[str, Any], saved: Collection[str], before: Scaling | None) -> list[str]:
        """Go on from a checkpoint that has the workers `saved`; returns the workers to begin with.

        `before` is that of the driver that goes back to the checkpoint. Without it the run may be on another machine:
        a number that nobody asked for follows the room there.
        """
        elastic = self._elastic
        if before is not None:
            self._target, self._asked = before._target, before._asked
        elif elastic.first is not None:
            self._target, self._asked = elastic.first, True
        else:
            self._target, self._asked = int(state["target"]), bool(state["asked"])
            if not self._asked:
                self._target = min(self._target, max(elastic.least, self._launcher.room()))
        chosen = [name for name in self.names if name in saved][: self._target]
        spare = [name for name in self.names if name not in chosen]
        return by_rank([*chosen, *spare[: max(0, elastic.least - len(chosen))]])

    def look(self, now: float) -> None:
        """Read a request, and start or retire the workers that are too few or too many."""
        if now >= self._looked + LOOK_SECONDS:
            self._looked = now
            self._read_request()
            self._grow()
        present = self._present()
        for name in present[self._target :]:
            self._retire(name)
        if self._leases.free:
            for name in self._absent()[: max(0, self._target - len(present))]:
                self._start(name)
        if not self._leases.left:
            for name in set(present) - self._roster.ready:
                self._retire(name)  # it would find nothing to do
        self._show()

    def _grow(self) -> None:
        """Raise the target by the room of the launcher, unless a number was asked for, or a worker only starts."""
        present = self._present()
        if not self._asked and len(present) >= self._target and self._roster.ready.issuperset(present):
            self._target = min(self._elastic.most, len(present) + self._launcher.room())

    def _retire(self, name: str) -> None:
        if name in self._replacements.awaited:
            self._replacements.give_up(name)
            self._roster.retire(name)
        elif name not in self._roster.ready:  # it has used nothing, and may wait for a machine
            self._launcher.signal(name, signal.SIGKILL)
            if self._roster.servers:
                self._commands.tell_clock("lost", name)
            self._roster.retire(name)
        else:
            self._retiring.add(name)
            self._commands.retire(name)

    def is_retiring(self, name: str) -> bool:
        """Whether a worker that leaves was asked to. Call it once."""
        asked = name in self._retiring
        self._retiring.discard(name)
        return asked

    def close(self) -> None:
        """Remove the files: the run is over."""
        if self._folder is not None:
            for name in (STATE, REQUEST):
                (self._folder / name).unlink(missing_ok=True)

    def _present(self) -> list[str]:
        """The workers that count: those that work, start or are replaced, and do not retire, in the order of ranks."""
        return by_rank((self._roster.living() | set(self._replacements.awaited)) - self._retiring)

    def _absent(self) -> list[str]:
        """The workers that can be started: their earlier processes, if any, have ended."""
        roster, exited = self._roster, self._launcher.exited
        return [
            name
            for name in self.names
            if name not in roster.workers and (name not in roster.incarnations or name in exited)
        ]

    def _read_request(self) -> None:
        if self._folder is None:
            return
        path = self._folder / REQUEST
        with suppress(FileNotFoundError):
            content = read_regular(path, MOST_BYTES)
            path.unlink(missing_ok=True)
            try:
                workers = int(json.loads(content)["workers"])
                self._elastic.beginning(workers)
            except (ValueError, KeyError, TypeError, UsageError) as error:
                log.warning("%s is no request that the run can follow: %s", path, error)
                return
            log.warning("%d workers are asked for, %d before.", workers, self._target)
            self._target, self._asked = workers, True

    def _show(self) -> None:
        """Write the state if it has changed."""
        scale = RunSize(self._elastic.least, self._elastic.most, self._target, self._present())
        if self._folder is None or scale == self._shown:
            return
        self._shown = scale
        with replacing(self._folder / STATE) as file:
            json.dump(asdict(scale), file)


def scale_of(folder: Path) -> RunSize:
    """The size of the elastic run of `folder`. Raises `UsageError` if none runs there."""
    try:
        return RunSize(**json.loads(read_regular(folder / STATE, MOST_BYTES)))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"no elastic run has its record in {folder}. Name the folder (--out) of a run that was started with a "
            "range, such as --workers 2..8, and that is not over."
        ) from error


def ask(folder: Path, workers: int, interruption: Interruption) -> RunSize:
    """Ask the driver of the run of `folder` for so many workers; returns the size after its answer.

    Raises `UsageError` for a number that the run cannot have, `DureError` if no driver answers.
    """
    size = scale_of(folder)
    WorkerRange(size.least, size.most).beginning(workers)
    with replacing(folder / REQUEST) as file:
        json.dump({"workers": workers}, file)
    request = folder / REQUEST
    # A driver that is gone may have left the same number: only one that runs removes the request.
    if interruption.until(lambda: not request.exists() and scale_of(folder).target == workers, ANSWER_SECONDS):
        return scale_of(folder)
    request.unlink(missing_ok=True)
    raise DureError(
        f"no driver has answered in {folder} for {ANSWER_SECONDS:g} s: its process has ended, or is stopped. Look at "
        "the output of the run."
    )
