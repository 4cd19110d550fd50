"""Texts that start a run on other machines.

| target       | text                                                                                             |
|--------------|--------------------------------------------------------------------------------------------------|
| `torchrun`   | the line for a shell, the same at each machine                                                   |
| `slurm`      | a batch script: one `srun` task on each machine, which runs torchrun                             |
| `kubernetes` | the manifest of a `TrainJob`: Kubeflow Trainer v2, trainer.kubeflow.org/v1alpha1 of release 2.3.0 |
| `pytorchjob` | the manifest of a `PyTorchJob`: Kubeflow Training Operator v1, kubeflow.org/v1 of release 1.9.0  |
| `ray`        | the manifest of a `RayJob`: KubeRay, ray.io/v1 of release 1.6.2                                  |

In all but the last of them torchrun starts the ranks of `dure train --on torchrun` on each machine, and rank s modulo
ranks starts server s (`run.launchers.torchrun`). A target is a function that returns the text of an `emit.Launch`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from dure.core.regular_file import CHECKPOINTS, LATEST

if TYPE_CHECKING:
    from dure.run.emit import Launch, Target

# ---- torchrun

PORT = 29500
"""torchrun's own port of a rendezvous."""


def torchrun(launch: Launch) -> str:
    """The line for a shell, after a comment on the machines where it runs."""
    where = "Run this line on the machine; a second run there needs a --master-port of its own."
    if launch.nodes > 1:
        where = f"Run this line on each machine. NODE is its number, 0 to {launch.nodes - 1}; HOST is machine 0."
    return f"# {launch.described}. {where}\n{line(launch)}\n"


def line(launch: Launch, ranks: str = "") -> str:
    """The line alone. On several machines it has placeholders: NODE for a machine's number, HOST for machine 0.

    `ranks` replaces the number of ranks. The rendezvous is static. torchrun's other rendezvous, c10d, which
    --standalone uses too, unpickles the values of its store: any program that reaches the port could execute code.
    """
    start = start_words(launch.nodes, ranks or str(launch.ranks))
    return shlex.join([*start, *launch.restarts, "-m", *launch.arguments])


def start_words(nodes: int, ranks: str) -> list[str]:
    """The words of the line that start `ranks` processes on each of `nodes` machines, without what they run."""
    if nodes == 1:
        return ["torchrun", "--nproc-per-node", ranks]
    where = ["--nnodes", str(nodes), "--node-rank", "NODE", "--nproc-per-node", ranks]
    return ["torchrun", *where, "--master-addr", "HOST", "--master-port", str(PORT)]


# ---- Slurm

SCRIPT = """\
#!/bin/bash
# {described}. Options of sbatch replace those below: sbatch --partition P --time 2:00:00 SCRIPT
{directives}
set -euo pipefail

mapfile -t machines < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
# The address of this machine, the first, toward the last one: its own name may lead to its loopback.
address=$(python -c '{toward}' "${{machines[-1]}}")
port=${{MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}}
run=({run})
{again}
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\
  bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' torchrun \\
  --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node {ranks}{restarts} \\
  --rdzv-id "$SLURM_JOB_ID" --master-addr "$address" --master-port "$port" \\
  -m "${{run[@]}}"
"""
"""`srun` does not take over --cpus-per-task from `sbatch` (Slurm 22.05 and later)."""

TOWARD = """\
import socket, sys
for family, kind, _, _, place in sorted(socket.getaddrinfo(sys.argv[1], 9, type=socket.SOCK_DGRAM)):
  with socket.socket(family, kind) as udp:
    if udp.connect_ex(place) == 0:
      print(udp.getsockname()[0])
      break
else:
  sys.exit("this machine cannot reach " + sys.argv[1])"""
"""A program that prints the address of this machine on its way to another, over IPv4 if it can; it sends nothing."""

AGAIN = """\
if [[ ${{SLURM_RESTART_COUNT:-0}} -gt 0 && -e {latest} ]]; then  # Slurm has requeued the job
  run=({run})
fi
"""


def slurm(launch: Launch) -> str:
    """The batch script: one task on each machine runs torchrun for the ranks there.

    A requeued job resumes from its last checkpoint, if the run writes some.
    """
    options = {"job-name": launch.name, "nodes": launch.nodes, "ntasks-per-node": 1, "cpus-per-task": launch.ranks}
    if launch.gpus:
        options["gpus-per-node"] = launch.gpus
    options["output"] = "%x-%j.out"
    return SCRIPT.format(
        described=launch.described,
        directives="\n".join(f"#SBATCH --{name}={value}" for name, value in options.items()),
        toward=TOWARD,
        run=shlex.join(launch.arguments),
        again=_again(launch),
        ranks=launch.ranks,
        restarts="".join(f" {word}" for word in launch.restarts),
    )


def _again(launch: Launch) -> str:
    out = launch.config.out
    if out is None or not launch.config.checkpoint_every:
        return ""
    resumed = ["dure", "train", "--resume", str(out), "--on", "torchrun"]
    return AGAIN.format(latest=shlex.quote(str(out / CHECKPOINTS / LATEST)), run=shlex.join(resumed))


# ---- Kubernetes


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


RUNTIME = "torch-distributed"
"""The runtime that Kubeflow Trainer installs: one pod for each machine, and torchrun's environment variables in it."""


def kubernetes(launch: Launch) -> str:
    """The manifest of a `TrainJob`."""
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


CONTAINER = "pytorch"
"""The name that the operator expects."""


def pytorchjob(launch: Launch) -> str:
    """The manifest of a `PyTorchJob`. The first machine is the pod of the master, the others are pods of workers.

    A failed pod is not replaced: a new pod would join a new rendezvous, at which no other rank waits.
    """
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


# ---- Ray

RAY_VERSION = "2.60.0"
"""The version that a manifest names. KubeRay asks for 2.52 or newer where a cluster has tokens."""


MACHINE = "machine"
"""The container of a pod that has workers."""


def ray(launch: Launch) -> str:
    """The manifest of a `RayJob`: a pod for the driver and a pod for each machine, which end with the run.

    KubeRay makes the token. It submits the command by HTTP: its other ways pass the command through two shells.
    """
    worker = {"groupName": "machines", "replicas": launch.nodes, "minReplicas": launch.nodes}
    cluster = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": _ray_pod(launch, "head")},
        "workerGroupSpecs": [
            {**worker, "maxReplicas": launch.nodes, "rayStartParams": {}, "template": _ray_pod(launch, MACHINE)}
        ],
    }
    spec = {
        "entrypoint": shlex.join(["python", "-m", *launch.arguments]),
        "submissionMode": "HTTPMode",
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": cluster,
    }
    return manifest(launch, "RayJob", "ray.io/v1", spec)


def _ray_pod(launch: Launch, name: str) -> dict[str, Any]:
    container: dict[str, Any] = {"name": name, "image": launch.image}
    if launch.gpus and name == MACHINE:
        container["resources"] = resources_of(launch)
    return {"spec": {"containers": [container]}}


TARGETS: Mapping[Target, Callable[[Launch], str]] = {
    "torchrun": torchrun,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "pytorchjob": pytorchjob,
    "ray": ray,
}
"""Adding a target is its function, a line here, and its name in `emit.Target`."""


def emitted(target: Target, launch: Launch) -> str:
    """The text of `target` that starts `launch`."""
    return TARGETS[target](launch)
