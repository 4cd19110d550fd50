"""Compares parameter sharding by layer and by memory in real time: a small model between hosts with slow links.

In VGG-16 one layer holds three quarters of the parameters. A model of 2 MiB has the same shape here, sleep stands for
compute, and links of 50 Mbit/s make communication dominate as links of 10 Gbit/s do with 528 MiB. Servers run on the
machines of workers, as under torchrun.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dure.planner.probe.short_runs import job_file
from dure_studies import namespaces
from dure_studies.sharding_virtual import SYNCS

MODEL = 1 << 19
LAYERS = (MODEL // 16, MODEL // 16, MODEL // 8, MODEL * 3 // 4)
"""Parameters of each layer."""

COMPUTE = 0.3
BANDWIDTH = 6.25e6
STEPS = 6
RUN_SECONDS = 200.0


def measured(sync: str) -> Callable[[int, int, str], float]:
    """Gives real seconds of a step with updates by `sync`, for a number of workers, a number of servers, and a cut."""
    return partial(step_seconds, SYNCS[sync])


def step_seconds(sync: str, workers: int, servers: int, by: str) -> float:
    """Real seconds of a step under the method `sync` on `workers` hosts."""
    with tempfile.TemporaryDirectory() as folder, namespaces.hosts(workers, bandwidth=BANDWIDTH) as hosts:
        job = Path(folder) / "uneven.py"
        job.write_text(job_file(LAYERS, COMPUTE), encoding="utf-8")
        strategy = f"{sync} ps:shards={servers},split={by},colocated=true"
        options = ["--strategy", strategy, "--steps", str(STEPS), "--eval-every", "1000000", "--json"]
        command = [sys.executable, "-m", "dure", "train", f"{job}:job", "--on", "torchrun", *options]
        done = hosts.run(command, seconds=RUN_SECONDS, environ={"OMP_NUM_THREADS": "1"})
    summary: dict[str, Any] = json.loads(done[0].out.splitlines()[-1])
    return float(summary["seconds"]) / STEPS
