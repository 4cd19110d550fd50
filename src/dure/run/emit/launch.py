"""A run as other programs are to start it: its configuration, and the ranks on each machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.errors import UsageError
from dure.run.devices import kind_of
from dure.run.emit.arguments import arguments_of

if TYPE_CHECKING:
    from dure.run.config import TrainConfig
    from dure.runtime.virtual.cluster import Cluster

RESTARTS = 3
"""Restarts by torchrun of a run that writes checkpoints."""

NAME_LENGTH = 40
"""Characters of the name of a job: Kubernetes appends to it in the names of pods, which have at most 63."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of `config` by `ranks` workers on each of `nodes` machines, all started by torchrun.

    `image` is the container image of the machines, where they are pods.
    """

    config: TrainConfig
    nodes: int
    ranks: int
    image: str = ""

    @property
    def name(self) -> str:
        """The name of the job: lower-case letters, digits and "-", as in `dure-digits-mlp`."""
        job = re.sub(r"[^a-z0-9]+", "-", self.config.job.rpartition("/")[2].lower())
        return f"dure-{job}"[:NAME_LENGTH].strip("-")

    @property
    def arguments(self) -> list[str]:
        """The words after `python -m`: those of `dure train` at each rank."""
        return ["dure", *arguments_of(self.config)]

    @property
    def restarts(self) -> list[str]:
        """The options of torchrun that restart the ranks after a failure; none for a run without checkpoints."""
        return ["--max-restarts", str(RESTARTS)] if self.config.checkpoint_every else []

    @property
    def gpus(self) -> int:
        """The GPUs of each machine that the options name; 0 for a run on CPUs and for `--device auto`."""
        return self.ranks if kind_of(self.config.device or "") == "cuda" else 0

    @property
    def described(self) -> str:
        """The run in words, for a comment."""
        job, ranks = " ".join(self.config.job.split()), "1 rank" if self.ranks == 1 else f"{self.ranks} ranks"
        return f"{job} on {'1 machine' if self.nodes == 1 else f'{self.nodes} machines'} with {ranks}" + (
            "" if self.nodes == 1 else " on each"
        )


def ranks_of(cluster: Cluster) -> list[int]:
    """The number of workers on each machine of a cluster."""
    if cluster.host is not None:
        return [cluster.workers]
    return list(Counter(map(cluster.machine_of, range(cluster.workers))).values())


def launch_of(config: TrainConfig, ranks: Sequence[int], image: str = "") -> Launch:
    """A launch of `config` on machines with so many `ranks` each.

    Raises:
        UsageError: torchrun cannot start the run there; the message names the nearest change.
    """
    from dure.run.resolve import check_without_job
    from dure.topology.base import topology_of

    if len(set(ranks)) > 1:
        raise UsageError(
            f"the machines have {', '.join(map(str, ranks))} workers, and dure's ranks of torchrun are as many on each "
            "machine. Describe machines with equal numbers of workers."
        )
    config = replace(config, on="torchrun", workers=None)
    strategy = config.chosen()
    check_without_job(config, strategy, sum(ranks))
    if topology_of(strategy.topology).one_machine and len(ranks) > 1:
        raise UsageError(
            f'"{strategy}" needs one machine, whose memory its workers share, and there are {len(ranks)}. Use one with '
            f"{sum(ranks)} workers (--nodes 1), or train over servers: downpour ps."
        )
    return Launch(config, len(ranks), ranks[0], image)
