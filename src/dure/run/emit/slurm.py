"""The batch script of a Slurm job: one task on each machine, which runs torchrun for the ranks there."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dure.core.folder_names import CHECKPOINTS, LATEST

if TYPE_CHECKING:
    from dure.run.emit.launch import Launch

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


def emit(launch: Launch) -> str:
    """The script. A requeued job resumes from its last checkpoint, if the run writes some."""
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
