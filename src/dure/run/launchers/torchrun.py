"""A real run whose workers `torchrun` has started: every rank is one.

    rank 0                                                       rank r
      hub, and a nursery that forks
        worker 0, and the servers s with s modulo ranks = 0        worker r, in this process
      notes in the store: "start worker r", "start server s" -->   a nursery that forks its servers
      note: the finished record ------------------------------->   the same record

The hub is that of `process_run`; only who starts what differs. A rank that fails is torchrun's to notice: it
ends all. Told to (`--max-restarts`), it starts all again, and the run goes on from its last checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.folder_names import CHECKPOINTS, LATEST
from dure.errors import DureError, PeerLost, RemoteError, UsageError
from dure.report.run import Run
from dure.report.values import versions
from dure.run.config import TrainConfig
from dure.run.driver import Hub
from dure.run.process import Start
from dure.run.process import main as be_member
from dure.runtime.launch.fork_server import Nursery
from dure.runtime.launch.monitor import RankMonitor
from dure.runtime.launch.relay import relayed
from dure.runtime.launch.rendezvous import Meeting, place
from dure.runtime.launch.shared_key import credentials_of

if TYPE_CHECKING:
    from dure.run.outcome import Outcome
    from dure.run.prebuilt import AtHand
    from dure.run.setup import Task
    from dure.run.virtual import Watch

RUN_SECONDS = 10.0 * 24 * 3600
"""How long a rank waits for what rank 0 makes of a run in which it has done its part."""

WORD_SECONDS = 5.0
"""How long a rank that failed leaves rank 0 to say so, before torchrun ends it."""


LAUNCH = "launch"
"""The file in a run's folder that says which launch it belongs to."""


def after_restart(config: TrainConfig) -> TrainConfig:
    """The same run, to go on with from its last checkpoint if torchrun has started us again.

    An attempt that came to no checkpoint is begun anew. What another launch has left in the folder stays as it is.
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


def run_together(
    config: TrainConfig,
    run_here: Callable[[TrainConfig, Callable[..., Outcome]], Run],
    resolve: Callable[[TrainConfig], tuple[Task, Any]],
) -> Run:
    """Take part in the run that `config` asks for, with all ranks; its record, the same at each.

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
    meeting = Meeting(here, "train")
    if here.rank:
        with relayed(f"worker {here.rank}"):
            return _follow(config, meeting, *resolve(config))
    try:
        with relayed("launcher"):
            run = run_here(config, lambda *given: _lead(meeting, *given))
    except BaseException as error:
        with suppress(RuntimeError):
            meeting.fail(f"{type(error).__name__}: {error}")
        raise
    meeting.put("record", {"history": run.history, "summary": run.summary()})
    meeting.part()
    return run


def _lead(
    meeting: Meeting, task: Task, watch: Watch, saved: Path | None, folder: Path | None, at_hand: AtHand
) -> Outcome:
    """What rank 0 does: the launcher's part of the run."""
    if at_hand.job is not None:
        raise UsageError('a Job object cannot be handed to other processes. Name it: "train.py:make_job".')
    if folder is not None:
        (folder.parent / LAUNCH).write_text(meeting.place.launch, encoding="utf-8")
    credentials = credentials_of(meeting, task.config.key_file, task.config.integrity)
    with ExitStack() as stack:
        stack.callback(RankMonitor(meeting, task.config.frozen_after, ranks=()).close)  # the other ranks hear it
        nursery = stack.enter_context(Nursery())
        nursery.load(task.config.plain())
        ranks = Ranks(nursery, meeting)
        interface = meeting.place.interface
        hub = Hub(task, watch, ranks, folder=folder, interface=interface, credentials=credentials)
        stack.callback(hub.close)
        return hub.run(saved)


class Ranks:
    """A launcher that starts what belongs to rank 0, and tells the other ranks to start what is theirs."""

    def __init__(self, nursery: Nursery, meeting: Meeting) -> None:
        self._nursery = nursery
        self._meeting = meeting

    @property
    def exited(self) -> Mapping[str, int]:
        """Those that belong to rank 0: of the others' ends their connections tell."""
        return self._nursery.exited

    @property
    def processes(self) -> Mapping[str, int]:
        """Those of rank 0: the others have only their heartbeats."""
        return self._nursery.processes

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a process of rank 0; those of other ranks are torchrun's to end."""
        self._nursery.signal(name, number)

    def start(self, name: str, **arguments: Any) -> None:
        if _owner(name, self._meeting) == 0:
            self._nursery.start(name, interface=self._meeting.place.interface, **arguments)
        else:
            del arguments["credentials"]  # which each rank has; the store is no place for them
            self._meeting.put(f"start {name}", arguments)

    def look(self) -> None:
        self._nursery.look()
        reason = self._meeting.failure()
        if reason is not None:
            raise PeerLost(f"{reason}.")

    def last_words(self, name: str) -> str:
        return self._nursery.last_words(name)


def _follow(config: TrainConfig, meeting: Meeting, task: Task, _: Any) -> Run:
    """What the other ranks do: one worker each, and their servers in processes of their own."""
    rank = meeting.place.rank
    mine: dict[str, Any] = {
        "interface": meeting.place.interface,
        "credentials": credentials_of(meeting, config.key_file, config.integrity).plain(),
    }
    with ExitStack() as stack:
        monitor = RankMonitor(meeting, config.frozen_after, ranks=[0])  # the launcher there watches all others
        stack.callback(monitor.close)
        _start_servers(task, meeting, stack, mine)
        given = meeting.get(f"start worker {rank}")
        try:
            be_member(task, Start.of(name=f"worker {rank}", **mine, **given), monitor.check)
        except SystemExit:
            _let_rank_0_speak(meeting)
            raise
        record = meeting.get("record", RUN_SECONDS, monitor.check)
        meeting.part()
    return Run(config.plain(), record["history"], record["summary"], None, versions(), config.seeded)


def _start_servers(task: Task, meeting: Meeting, stack: ExitStack, mine: Mapping[str, Any]) -> None:
    names = [
        name for name in map("server {}".format, range(task.servers)) if _owner(name, meeting) == meeting.place.rank
    ]
    if not names:
        return
    nursery = stack.enter_context(Nursery())
    nursery.load(task.config.plain())
    for name in names:
        given = meeting.get(f"start {name}")
        nursery.start(name, **mine, **given)


def _let_rank_0_speak(meeting: Meeting) -> None:
    with suppress(RemoteError, DureError):
        meeting.get("record", WORD_SECONDS)


def _owner(name: str, meeting: Meeting) -> int:
    """The rank on whose machine `name` lives."""
    return int(name.split()[1]) % meeting.place.world_size
