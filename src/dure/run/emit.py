"""The launch of a run on other machines: `--emit` of `dure train` and `dure plan` makes it of their options.

A launch is a configuration and the ranks on each machine. `run.emit_targets` writes its text; nothing is started.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from dure.core.address import FOUND
from dure.core.deployment import WORKER
from dure.errors import UsageError
from dure.run.config import TrainConfig, WorkerRange
from dure.run.devices import kind_of
from dure.run.reservation import GPU, reservations
from dure.run.strategy import AXES

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster

Target = Literal["torchrun", "slurm", "kubernetes", "pytorchjob", "ray"]

PODS: Sequence[Target] = ("kubernetes", "pytorchjob", "ray")
"""Targets whose machines are pods of an image."""

TORCHRUN = "torchrun"
"""The place of a run whose ranks torchrun starts."""

ON: Mapping[Target, str] = {"ray": f"ray:{FOUND}"}
"""The places of other runs, by target."""

RESTARTS = 3
"""Restarts by torchrun of a run that writes checkpoints."""

NAME_LENGTH = 40
"""Characters of the name of a job: Kubernetes appends to it in the names of pods, which have at most 63."""

FIRST, LAST = ("strategy", *AXES), ("workers", "on")
"""Options at the beginning and at the end of the arguments."""


# ---- the options


@dataclass(frozen=True, kw_only=True)
class Emission:
    """Options of the commands that can write how a run is started elsewhere."""

    emit: Target | None = None
    """Print how a run is started elsewhere, and start nothing: torchrun (a line), slurm (a batch script), kubernetes
    (a TrainJob of Kubeflow Trainer v2), pytorchjob (the older PyTorchJob) or ray (a RayJob of KubeRay)."""
    image: str = ""
    """With --emit kubernetes, pytorchjob or ray: the container image of the pods."""


def check_emission(asked: Emission, nodes: int | None = None) -> None:
    """Raise `UsageError` for an option without the one that it goes with."""
    if asked.emit is None and nodes is not None:
        raise UsageError(f"nodes={nodes} is for a text that --emit writes. Leave it out, or add --emit slurm.")
    pods = asked.emit in PODS
    if asked.image and not pods:
        raise UsageError(
            f"image={asked.image} is for the pods of --emit {', '.join(PODS[:-1])} or {PODS[-1]}. Leave it out."
        )
    if pods and not asked.image:
        raise UsageError(
            f"--emit {asked.emit} needs the container image of the pods, and image is not given. Write --image "
            "REGISTRY/NAME:TAG for an image with dure, the job's file and its data."
        )


def launch_of_train(target: Target, options: Mapping[str, Any], nodes: int | None, image: str) -> Launch:
    """A launch of the run of `options` (those of `TrainConfig`) on the machines that `on` names, or on so many `nodes`.

    Raises `UsageError` if `target` cannot start the run there.
    """
    on = ON.get(target, TORCHRUN)
    if options["resume"] is not None:
        raise UsageError(
            f"--emit writes how a new run starts, and resume={options['resume']} names one that has begun. In the text "
            f"for that run, write --resume {options['resume']} --on {on} in place of the options of dure train."
        )
    if isinstance(options["workers"], WorkerRange):
        raise UsageError(f"--emit starts a fixed number of workers, and --workers is {options['workers']}. Give one.")
    ranks = _ranks(TrainConfig(on=options["on"], workers=options["workers"]), nodes)
    config = TrainConfig.of({**options, "on": on, "workers": None})
    return launch_of(target, config, ranks, image)


def _ranks(place: TrainConfig, nodes: int | None) -> Sequence[int]:
    """The workers of each machine: of a cluster, or of `nodes` machines with equal numbers of workers."""
    from dure.run.resolve import asked_cluster, workers_of

    cluster = asked_cluster(place)
    workers = workers_of(place, cluster)
    if cluster is not None:
        ranks = ranks_of(cluster)
        if nodes not in (None, len(ranks)):
            raise UsageError(
                f"nodes={nodes} was asked for, and --on {place.on} has {len(ranks)} machines. Leave nodes out."
            )
        return ranks
    machines = nodes or 1
    if workers % machines:
        raise UsageError(
            f"{workers} workers cannot be on {machines} machines with equal numbers of workers. Write --workers "
            f"{machines * max(1, workers // machines)}, or another number of nodes."
        )
    return [workers // machines] * machines


# ---- the launch


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of `config` by `ranks` workers on each of `nodes` machines.

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
        """The words after `python -m`: those of `dure train`, at each rank if torchrun starts it."""
        return ["dure", *arguments_of(self.config)]

    @property
    def restarts(self) -> list[str]:
        """The options of torchrun that restart the ranks after a failure; none for a run without checkpoints."""
        return ["--max-restarts", str(RESTARTS)] if self.config.checkpoint_every else []

    @property
    def gpus(self) -> int:
        """The GPUs of each machine that the options name; 0 for a run on CPUs and for `--device auto`."""
        config = self.config
        if config.on == TORCHRUN:
            return self.ranks if kind_of(config.device or "") == GPU else 0
        return math.ceil(self.ranks * reservations(config.reserve, config.device)[WORKER].gpus)

    @property
    def described(self) -> str:
        """The run in words, for a comment."""
        noun = "rank" if self.config.on == TORCHRUN else "worker"
        job, ranks = " ".join(self.config.job.split()), f"1 {noun}" if self.ranks == 1 else f"{self.ranks} {noun}s"
        return f"{job} on {'1 machine' if self.nodes == 1 else f'{self.nodes} machines'} with {ranks}" + (
            "" if self.nodes == 1 else " on each"
        )


def ranks_of(cluster: Cluster) -> list[int]:
    """The number of workers on each machine of a cluster."""
    if cluster.host is not None:
        return [cluster.workers]
    return list(Counter(map(cluster.machine_of, range(cluster.workers))).values())


def launch_of(target: Target, config: TrainConfig, ranks: Sequence[int], image: str = "") -> Launch:
    """A launch of `config` on machines with so many `ranks` each.

    Raises:
        UsageError: `target` cannot start the run there; the message names the nearest change.
    """
    from dure.run.resolve import check_without_job
    from dure.topology.base import topology_of

    if len(set(ranks)) > 1:
        raise UsageError(
            f"the machines have {', '.join(map(str, ranks))} workers, and --emit starts the same number of ranks "
            "on each. Describe machines with equal numbers of workers."
        )
    on = ON.get(target, TORCHRUN)
    config = replace(config, on=on, workers=None if on == TORCHRUN else sum(ranks))
    strategy = config.chosen()
    check_without_job(config, strategy, sum(ranks))
    if topology_of(strategy.topology).one_machine and len(ranks) > 1:
        raise UsageError(
            f'"{strategy}" needs one machine, whose memory its workers share, and there are {len(ranks)}. Use one with '
            f"{sum(ranks)} workers (--nodes 1), or train over servers: downpour ps."
        )
    return Launch(config, len(ranks), ranks[0], image)


# ---- the arguments


def arguments_of(config: TrainConfig) -> list[str]:
    """The words after `dure` that make `config`: the job, the strategy, and the options that differ from the defaults.

    >>> arguments_of(TrainConfig(job="digits-mlp", sync="ssp", trace=True, batch_sizes=(8, 4), out="runs/a"))[1:]
    ['digits-mlp', '--sync', 'ssp', '--batch-sizes', '8', '4', '--trace', '--out', 'runs/a', '--on', 'local']
    """
    options = {option.name: option.default for option in fields(TrainConfig) if option.name != "job"}
    between = [name for name in options if name not in (*FIRST, *LAST)]
    words = ["train", config.job]
    for name in (*FIRST, *between, *LAST):
        value = getattr(config, name)
        if value == options[name] or (name == "seed" and value == 0):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, tuple) else (value,))
    return words
