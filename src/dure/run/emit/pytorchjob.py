"""The manifest of a `PyTorchJob`: Kubeflow Training Operator v1, kubeflow.org/v1 of release 1.9.0.

The first machine is the pod of the master, the others are pods of workers. A failed pod is not replaced: the ranks of
the others wait at another meeting than a new one would join.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dure.run.emit.pods import command_of, manifest, resources_of

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

CONTAINER = "pytorch"
"""The name that the operator expects."""


def emit(launch: Launch) -> str:
    """The manifest as YAML."""
    replicas = {"Master": _pods(launch, 1)}
    if launch.nodes > 1:
        replicas["Worker"] = _pods(launch, launch.nodes - 1)
    spec = {"nprocPerNode": str(launch.ranks), "pytorchReplicaSpecs": replicas}
    return manifest(launch, "PyTorchJob", "kubeflow.org/v1", spec)


def _pods(launch: Launch, count: int) -> dict[str, Any]:
    container: dict[str, Any] = {"name": CONTAINER, "image": launch.image, "command": command_of(launch)}
    if launch.gpus:
        container["resources"] = resources_of(launch)
    return {"replicas": count, "restartPolicy": "Never", "template": {"spec": {"containers": [container]}}}
