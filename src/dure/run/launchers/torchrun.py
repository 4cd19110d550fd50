"""A real run whose workers `torchrun` has started: every rank is a worker.

    rank 0                                                       rank r
      driver, and a fork server that forks
        worker 0, and the servers s with s modulo ranks = 0        worker r, in this process
      in the store: "start worker r", "start server s"   ----->   a fork server that forks its servers
        actors and replays, shared out like servers
      in the store: the finished record ---------------------->   the same record

The driver is the same as on one machine (`run.driver`); only the launcher differs. If a rank fails, torchrun ends all
ranks. With `--max-restarts` torchrun starts all of them again, and the run resumes from its last checkpoint.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import WORKER, NodeId
from dure.core.regular_file import CHECKPOINTS, LATEST
from dure.core.text import log, sentence, text_of
from dure.core.user_code import explain_user_errors
from dure.errors import DureError, PeerLost, RemoteError, UsageError
from dure.report.record import versions
from dure.report.run import Run, read_run
from dure.run.config import TrainConfig
from dure.run.devices import CPU, check_alike, in_summary, notice
from dure.run.driver import Driver
from dure.run.process_main import LaunchSpec
from dure.run.process_main import main as be_member
from dure.run.resolve import resolve
from dure.runtime.heartbeat import put
from dure.runtime.launch.fork_server import ForkServer
from dure.runtime.launch.monitor import RankMonitor
from dure.runtime.launch.relay import relayed
from dure.runtime.launch.rendezvous import Rendezvous, credentials_of, met, place

if TYPE_CHECKING:
    from dure.run.outcome import Outcome
    from dure.run.prebuilt import Callbacks, Prebuilt
    from dure.run.setup import Setup
    from dure.runtime.heartbeat import BeatPipe

RUN_SECONDS = 10.0 * 24 * 3600
"""Time limit of a rank that has finished for the record from rank 0."""

WORD_SECONDS = 5.0
"""Time limit of a failed rank for the report of rank 0, before torchrun ends all ranks."""


LAUNCH = "launch"
"""File in a run's folder with the identity of its launch."""


def after_restart(config: TrainConfig) -> TrainConfig:
    """Have the run resume from its last checkpoint if torchrun has restarted this process.

    Without a checkpoint the run starts anew, and its folder is removed. The folder of another launch is left as it is.
    """
    here, out = place(), config.out
    if here is None or here.rank or not here.restarts or out is None or config.resume is not None:
        return config
    if not (out / LAUNCH).exists() or (out / LAUNCH).read_text(encoding="utf-8") != here.launch:
        return config
    if (out / CHECKPOINTS / LATEST).exists():
        return replace(config, resume=out)
    shutil.rmtree(out)
    return config


def run_real(
    config: TrainConfig, prebuilt: Prebuilt, run_here: Callable[[TrainConfig, Callable[..., Outcome]], Run]
) -> Run:
    """Take part in the run that `config` asks for. Every rank resolves it once and returns the same record.

    Raises:
        UsageError: torchrun has not started this process, or another number of workers is asked for.
    """
    here = place()
    if here is None:
        raise UsageError(
            "no torchrun has started this process (RANK and WORLD_SIZE are not set). Write, for example, "
            "torchrun --nproc-per-node 4 -m dure train digits-mlp --on torchrun, or use --on local."
        )
    config = config.for_workers(here.world_size)
    rendezvous = met(here, "train", _key_file(config))
    if here.rank:
        with relayed(f"worker {here.rank}"):
            return _follow(config, rendezvous, resolve(config, prebuilt)[0])
    try:
        with relayed("launcher"):
            run = run_here(config, lambda *given: _lead(rendezvous, *given))
    except BaseException as error:
        with suppress(RuntimeError):
            rendezvous.fail(f"{type(error).__name__}: {sentence(text_of(error))}")
        raise
    rendezvous.put("record", {"history": run.history, "summary": run.summary()})
    rendezvous.part()
    return run


def _key_file(config: TrainConfig) -> Path | None:
    """The key file of the run; a run that is resumed has that of its record, unless another is given."""
    if config.key_file is not None or config.resume is None:
        return config.key_file
    saved = read_run(config.resume).config.get("key_file")
    return None if saved is None else Path(saved)


def _lead(
    rendezvous: Rendezvous, setup: Setup, callbacks: Callbacks, saved: Path | None, folder: Path | None
) -> Outcome:
    """Lead the run from rank 0."""
    _check_companions(setup)
    devices = _devices(rendezvous, setup)
    if folder is not None:
        (folder.parent / LAUNCH).write_text(rendezvous.place.launch, encoding="utf-8")
    credentials = credentials_of(rendezvous, setup.config.integrity)
    with ExitStack() as stack:
        fork_server = stack.enter_context(ForkServer())
        beat = partial(put, fork_server.beats.sink)
        monitor = RankMonitor(rendezvous, credentials, setup.config.frozen_after, beat)
        stack.callback(monitor.close)
        fork_server.load(setup.plain())
        ranks = RankLauncher(fork_server, rendezvous, monitor)
        interface = rendezvous.place.interface
        driver = Driver(setup, callbacks, ranks, folder=folder, interface=interface, credentials=credentials)
        stack.callback(driver.close)
        outcome = driver.run(saved)
    outcome.notes |= in_summary(devices) | _machines(rendezvous)
    return outcome


def _machines(rendezvous: Rendezvous) -> dict[str, str]:
    """The hosts of all ranks, in words, for the summary; nothing if the note of a rank cannot be read."""
    ranks = range(rendezvous.place.world_size)
    with suppress(RemoteError):
        names = [rendezvous.get(f"device {rank}", 1.0)[1] for rank in ranks if rank]
        hosts = ", ".join(dict.fromkeys([socket.gethostname(), *names]))
        return {"machines": f"{len(ranks)} worker{'s' if len(ranks) != 1 else ''} on {hosts}, torchrun"}
    return {}


def _devices(rendezvous: Rendezvous, setup: Setup) -> list[str]:
    """Collect the device of each rank, and say which they are. Raises `UsageError` if they cannot train together."""
    asked, devices = setup.config.device, list(setup.devices)
    places: list[str] = []
    if asked not in (None, CPU):
        found = rendezvous.exchange("device", [setup.devices[0], socket.gethostname()])
        devices, places = [device for device, _ in found], [place for _, place in found]
        if setup.topology.uses_engine:
            check_alike(devices)
    said = notice(asked, devices, places=places)
    if said:
        log.warning("%s", said)
    return devices


class RankLauncher:
    """A launcher that starts the processes of rank 0, and has the other ranks start theirs."""

    def __init__(self, fork_server: ForkServer, rendezvous: Rendezvous, monitor: RankMonitor) -> None:
        self._fork_server = fork_server
        self._meeting = rendezvous
        self._monitor = monitor

    @property
    def beats(self) -> BeatPipe:
        """Heartbeats of the processes of rank 0, and those that its monitor passes on."""
        return self._fork_server.beats

    @property
    def exited(self) -> Mapping[str, int]:
        """Exits of the processes of rank 0; connections show the exits of others."""
        return self._fork_server.exited

    @property
    def processes(self) -> Mapping[str, int]:
        """Processes of rank 0; other ranks have only heartbeats."""
        return self._fork_server.processes

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of rank 0; torchrun ends those of other ranks."""
        self._fork_server.signal(name, number)

    def start(self, name: str, **arguments: Any) -> None:
        if rank_of(name, self._meeting) == 0:
            self._fork_server.start(name, interface=self._meeting.place.interface, **arguments)
        else:
            del arguments["credentials"]  # each rank has them; they must not be in the store
            _, *counted = arguments["heartbeat"]
            self._meeting.put(f"start {name}", {**arguments, "heartbeat": [self._monitor.address, *counted]})

    def room(self) -> int:
        """None: torchrun has started all ranks."""
        return 0

    def look(self) -> None:
        self._fork_server.look()
        reason = self._meeting.failure()
        if reason is not None:
            raise PeerLost(f"{reason}.")

    def last_line(self, name: str) -> str:
        return self._fork_server.last_line(name)


def _follow(config: TrainConfig, rendezvous: Rendezvous, setup: Setup) -> Run:
    """Run this rank's worker in this process, and its servers and companions in processes of their own."""
    rank = rendezvous.place.rank
    _check_companions(setup)
    rendezvous.put(f"device {rank}", [setup.devices[rank], socket.gethostname()])
    credentials = credentials_of(rendezvous, setup.config.integrity)
    mine: dict[str, Any] = {"interface": rendezvous.place.interface, "credentials": credentials.plain()}
    with ExitStack() as stack:
        monitor = RankMonitor(rendezvous, credentials, config.frozen_after)
        stack.callback(monitor.close)
        start_others(setup, rendezvous, stack, mine)
        given = rendezvous.get(f"start worker {rank}")
        try:
            with explain_user_errors(f"worker {rank}: your own code raised", DureError, only=True):
                be_member(setup, LaunchSpec.of(name=f"worker {rank}", **mine, **given), monitor.check)
        except SystemExit:
            _let_rank_0_speak(rendezvous)
            raise
        record = rendezvous.get("record", RUN_SECONDS, monitor.check)
        rendezvous.part()
    return Run(
        config.plain(), record["history"], record["summary"], None, versions(), config.seeded, written=config.written()
    )


def _check_companions(setup: Setup) -> None:
    """Raise `UsageError` for companions that join late: ranks fork their processes at the start only."""
    late = [str(node.id) for node in setup.deployment.nodes if node.joins_after]
    if late:
        raise UsageError(
            f"{', '.join(late)} would join late, and torchrun starts all processes at once. Use --on local, or leave "
            "late out."
        )


def start_others(setup: Setup, rendezvous: Rendezvous, stack: ExitStack, mine: Mapping[str, Any]) -> None:
    """Start the servers and companions of this rank."""
    others = [str(node.id) for node in setup.deployment.nodes if node.id.kind != WORKER]
    names = [name for name in others if rank_of(name, rendezvous) == rendezvous.place.rank]
    if not names:
        return
    fork_server = stack.enter_context(ForkServer())
    fork_server.load(setup.plain())
    for name in names:
        given = rendezvous.get(f"start {name}")
        fork_server.start(name, **mine, **given)


def _let_rank_0_speak(rendezvous: Rendezvous) -> None:
    """Wait until rank 0 has reported the error of the run: the exit of this rank makes torchrun end rank 0 too."""
    with suppress(RemoteError, DureError):
        rendezvous.get("record", WORD_SECONDS)


def rank_of(name: str, rendezvous: Rendezvous) -> int:
    """The rank that starts the process `name`."""
    return NodeId.of(name).rank % rendezvous.place.world_size
