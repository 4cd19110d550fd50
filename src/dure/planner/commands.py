"""Commands that run a strategy of a plan for real."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.planner.ddp_script import ddp_script
from dure.planner.timing import config_of
from dure.run.config import TrainConfig
from dure.run.emit import Launch, arguments_of, ranks_of
from dure.run.emit_targets import line, start_words

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure.planner.options import PlanOptions
    from dure.planner.ranking import Ranked
    from dure.planner.scene import Scene


@dataclass(frozen=True, slots=True)
class Command:
    """The options of a real run, and the `ranks` on each of its machines."""

    config: TrainConfig
    ranks: Sequence[int]

    @property
    def line(self) -> str:
        """The line for a shell: on one machine for this machine, on several for each of them.

        NODE stands for a machine's number, HOST for machine 0, RANKS for the workers of a machine, where they differ.
        """
        if len(self.ranks) == 1:
            return shlex.join(["dure", *arguments_of(replace(self.config, workers=self.ranks[0], on="local"))])
        each = str(self.ranks[0]) if len(set(self.ranks)) == 1 else "RANKS"
        return line(Launch(self.config, len(self.ranks), self.ranks[0]), each)


def command_of(scene: Scene, config: PlanOptions, row: Ranked) -> Command:
    """The command that runs `row` on the machines of `scene`."""
    size = config_of(scene, row.strategy).batch_size or 1
    job = config.job or scene.job.name
    options = TrainConfig(job=job, strategy=row.strategy, batch_size=size, data=config.data, on="torchrun")
    return Command(options, ranks_of(scene.cluster))


def script_of(command: Command, job: Job, *, named: bool) -> str | None:
    """The script of PyTorch that does what `command` does for plain data parallelism, if one can be written.

    `named` says whether the job has a text by which it can be loaded.
    """
    config, text = command.config, command.config.job if named else None
    each = str(command.ranks[0]) if len(set(command.ranks)) == 1 else "RANKS"
    start = start_words(len(command.ranks), each)
    return ddp_script(
        job,
        text,
        config.data,
        workers=sum(command.ranks),
        batch=config.batch_size or job.batch_size,
        line=shlex.join([*start, "ddp.py"]),
    )
