"""Texts that start a run on other machines, made without starting it.

| target       | text                                                                  |
|--------------|-----------------------------------------------------------------------|
| `torchrun`   | the line for a shell, the same at each machine                        |
| `slurm`      | a batch script: one `srun` task on each machine, which runs torchrun  |
| `kubernetes` | the manifest of a `TrainJob` of Kubeflow Trainer v2                   |
| `pytorchjob` | the manifest of a `PyTorchJob` of the Kubeflow Training Operator v1   |

In all of them torchrun starts the ranks of `dure train --on torchrun` on each machine, and rank s modulo ranks starts
server s (`run.launchers.torchrun`). A target is a module with one function: `emit(launch)` returns the text of a
`launch.Launch`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

Target = Literal["torchrun", "slurm", "kubernetes", "pytorchjob"]

TARGETS: Mapping[Target, str] = {
    "torchrun": "dure.run.emit.torchrun",
    "slurm": "dure.run.emit.slurm",
    "kubernetes": "dure.run.emit.kubernetes",
    "pytorchjob": "dure.run.emit.pytorchjob",
}
"""Adding a target is its module and a line here."""

PODS: Sequence[Target] = ("kubernetes", "pytorchjob")
"""Targets whose machines are pods of an image."""


def emitted(target: Target, launch: Launch) -> str:
    """The text of `target` that starts `launch`."""
    text: str = import_module(TARGETS[target]).emit(launch)
    return text
