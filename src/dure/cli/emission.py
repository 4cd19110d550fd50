"""Texts of `--emit` of `dure train` and `dure plan`: the options turned into a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.errors import UsageError
from dure.run.config import TrainConfig
from dure.run.emit import PODS, Target, emitted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dure.planner.answer import Ranking


@dataclass(frozen=True, kw_only=True)
class Emission:
    """Options of the commands that can write how a run is started elsewhere."""

    emit: Target | None = None
    """Print how a run is started elsewhere, and start nothing: torchrun (a line), slurm (a batch script), kubernetes
    (a TrainJob of Kubeflow Trainer v2) or pytorchjob (the older PyTorchJob)."""
    image: str = ""
    """With --emit kubernetes or pytorchjob: the container image of the pods."""


def check_emission(asked: Emission, nodes: int | None = None) -> None:
    """Raise `UsageError` for an option without the one that it goes with."""
    if asked.emit is None and nodes is not None:
        raise UsageError(f"nodes={nodes} is for a text that --emit writes. Leave it out, or add --emit slurm.")
    pods = asked.emit in PODS
    if asked.image and not pods:
        raise UsageError(f"image={asked.image} is for the pods of --emit {' or '.join(PODS)}. Leave it out.")
    if pods and not asked.image:
        raise UsageError(
            f"--emit {asked.emit} needs the container image of the pods, and image is not given. Write --image "
            "REGISTRY/NAME:TAG for an image with dure, the job's file and its data."
        )


def of_train(options: Mapping[str, Any], asked: Emission, nodes: int | None) -> str:
    """The text that starts the run of `options` (those of `TrainConfig`) on the machines that `on` names.

    Raises `UsageError` if torchrun cannot start the run there.
    """
    from dure.run.emit.launch import launch_of

    assert asked.emit is not None
    if options["resume"] is not None:
        raise UsageError(
            f"--emit writes how a new run starts, and resume={options['resume']} names one that has begun. In the text "
            f"for that run, write --resume {options['resume']} --on torchrun in place of the options of dure train."
        )
    ranks = _ranks(TrainConfig(on=options["on"], workers=options["workers"]), nodes)
    config = TrainConfig.of({**options, "on": "torchrun", "workers": None})
    return emitted(asked.emit, launch_of(config, ranks, asked.image))


def of_plan(found: Ranking, asked: Emission) -> str:
    """The text that starts the best strategy of a plan. Raises `UsageError` if torchrun cannot start it there."""
    from dure.run.emit.launch import launch_of

    assert asked.emit is not None
    command = found.commands[found.strategy]
    return emitted(asked.emit, launch_of(command.config, command.ranks, asked.image))


def _ranks(place: TrainConfig, nodes: int | None) -> Sequence[int]:
    """The workers of each machine: of a cluster, or of `nodes` machines with equal numbers of workers."""
    from dure.run.emit.launch import ranks_of
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
            f"{workers} workers cannot be on {machines} machines with as many on each. Write --workers "
            f"{machines * max(1, workers // machines)}, or another number of nodes."
        )
    return [workers // machines] * machines
