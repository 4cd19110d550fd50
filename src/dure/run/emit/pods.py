"""Parts that the manifests of pods have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch


def manifest(launch: Launch, kind: str, version: str, spec: dict[str, Any]) -> str:
    """A manifest as YAML, after a comment with its use."""
    values = {"apiVersion": version, "kind": kind, "metadata": {"name": launch.name}, "spec": spec}
    text = yaml.safe_dump(values, sort_keys=False, width=10**6, allow_unicode=True)
    return f"# {launch.described}. Start it with: kubectl create -f FILE\n{text}"


def command_of(launch: Launch) -> list[str]:
    """The command of a pod. The operator gives torchrun the machines by PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...

    Kubernetes replaces $(NAME) in a command, and $$ by $, so each $ of an argument is doubled.
    """
    words = ["torchrun", *launch.restarts, "-m", *launch.arguments]
    return [word.replace("$", "$$") for word in words]


def resources_of(launch: Launch) -> dict[str, Any]:
    """The resources of a pod: its GPUs, if the options name some."""
    return {"limits": {"nvidia.com/gpu": launch.gpus}} if launch.gpus else {}
