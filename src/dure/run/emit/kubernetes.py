"""The manifest of a `TrainJob`: Kubeflow Trainer v2, trainer.kubeflow.org/v1alpha1 of release 2.3.0.

It names the runtime `torch-distributed`, which Kubeflow Trainer installs: one pod for each machine, and torchrun's
environment variables in it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dure.run.emit.pods import command_of, manifest, resources_of

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

RUNTIME = "torch-distributed"


def emit(launch: Launch) -> str:
    """The manifest as YAML."""
    trainer: dict[str, Any] = {
        "image": launch.image,
        "command": command_of(launch),
        "numNodes": launch.nodes,
        "numProcPerNode": launch.ranks,
    }
    if launch.gpus:
        trainer["resourcesPerNode"] = resources_of(launch)
    spec = {"runtimeRef": {"name": RUNTIME}, "trainer": trainer}
    return manifest(launch, "TrainJob", "trainer.kubeflow.org/v1alpha1", spec)
