"""The companions of a job among the nodes of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, WORKER, Deployment, NodeSpec, WhenLost

if TYPE_CHECKING:
    from dure.job.companions import Companions


def with_companions(deployment: Deployment, companions: Companions, workers: int) -> Deployment:
    """Put companions between workers and servers.

    A worker that the others need goes back to the last checkpoint with all nodes, since a run of one worker would end
    with it otherwise.
    """
    learners = [_rolled_back(node) for node in deployment.nodes if node.id.kind == WORKER]
    others = [node for node in deployment.nodes if node.id.kind != WORKER]
    return Deployment((*learners, *companions.nodes(workers), *others))


def _rolled_back(node: NodeSpec) -> NodeSpec:
    return replace(node, when_lost=WhenLost.ROLL_BACK) if node.when_lost is WhenLost.END else node


def companions_of(deployment: Deployment) -> list[NodeSpec]:
    """The nodes that are neither workers nor servers."""
    return [node for node in deployment.nodes if node.id.kind not in (WORKER, SERVER)]


def own_machines(deployment: Deployment) -> list[str]:
    """The names of companions on machines of their own."""
    return [str(node.id) for node in companions_of(deployment) if node.beside is None]
