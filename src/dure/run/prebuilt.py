"""Objects that the caller of a run has made already, in place of names in its configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dure.job.initial_model import InitialModel
from dure.job.job import Job
from dure.partition.profile import BlockTimes
from dure.run.strategy import Strategy
from dure.runtime.launch.interruption import Interruption
from dure.runtime.virtual.cluster import Cluster

if TYPE_CHECKING:
    from dure.runtime.launch.fork_server import ForkServer


@dataclass(frozen=True)
class Prebuilt:
    """Objects in place of names in a configuration, a fork server started earlier, and the caller's signals.

    `told`: an earlier run of this command has said which devices it uses. `model`: the initial model, if an earlier run
    of this process has had the same. `times`: measured seconds of the model's blocks, for virtual time.
    """

    job: Job | None = None
    cluster: Cluster | None = None
    strategy: Strategy | None = None
    fork_server: ForkServer | None = None
    interruption: Interruption = field(default_factory=Interruption)
    told: bool = False
    model: InitialModel | None = None
    times: BlockTimes | None = None
