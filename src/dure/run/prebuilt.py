"""Objects that the caller of a run passes beside its configuration: objects made already, and callbacks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any

from dure.core.text import quoted
from dure.errors import UsageError
from dure.job.initial_model import InitialModel
from dure.job.job import Job
from dure.partition.profile import BlockTimes
from dure.run.checkpoint import Parts
from dure.run.strategy import Strategy
from dure.runtime.launch.interruption import Interruption
from dure.runtime.virtual.cluster import Cluster

if TYPE_CHECKING:
    from dure.runtime.launch.fork_server import ForkServer
    from dure.sync.worker_state import WorkerState


@dataclass(frozen=True)
class Prebuilt:
    """Objects in place of names in a configuration, a fork server started earlier, and the caller's signals.

    `told`: an earlier run of this command has said which devices it uses. `others`: the strategies of all runs of the
    command, as they are written. `model`: the initial model, if an earlier run
    of this process has had the same. `times`: measured seconds of the model's blocks, for virtual time.
    """

    job: Job | None = None
    cluster: Cluster | None = None
    strategy: Strategy | None = None
    fork_server: ForkServer | None = None
    interruption: Interruption = field(default_factory=Interruption)
    told: bool = False
    others: tuple[str, ...] = ()
    model: InitialModel | None = None
    times: BlockTimes | None = None


def named(job: Any) -> tuple[str, Job | None]:
    """The name of a job, and the object if it is given as one. Raises `UsageError` for what is neither."""
    if isinstance(job, str):
        return job, None
    if isinstance(job, Job):
        return job.name, job
    raise UsageError(
        f'a job is a name such as "digits-mlp", "FILE.py:FUNCTION", or a dure.Job, and {quoted(job)} is none of these.'
    )


def placed(on: Any) -> tuple[Any, Cluster | None]:
    """The place of a run as text, and the cluster if it is given as an object. A path is a text too."""
    if isinstance(on, Cluster):
        return "virtual", on
    return (str(on) if isinstance(on, PathLike) else on), None


Row = dict[str, Any]
"""A row of the history."""


@dataclass(slots=True)
class Callbacks:
    """Receivers of a run's rows, progress, checkpoints and notices; each does nothing if left out.

    `stepped` receives a worker, the seconds at which its gradient was complete, and a function for the payload bytes
    that workers have sent so far (virtual runs).
    """

    row: Callable[[Row], None] = lambda row: None
    progress: Callable[[int, int, float, int], None] = lambda step, steps, loss, samples: None
    evaluating: Callable[[], AbstractContextManager[None]] = nullcontext
    checkpoint: Callable[[int, Parts], None] = lambda step, parts: None
    rewind: Callable[[int], None] = lambda rows: None
    notice: Callable[[str], None] = lambda text: None
    stepped: Callable[[WorkerState, float, Callable[[], int]], None] = lambda worker, seconds, sent: None
