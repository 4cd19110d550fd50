"""Ranks of a trainer in the tests of `dure.integrations`, and how far two trainings are apart."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def started(program, folder, *names, ranks=2):
    """What each rank gave for the cases `names`, by rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, program, str(folder), *names]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def distance(one, other, *, tail=False, kinds=("losses", "scores", "norms", "state")):
    """The largest difference of logs and states; with `tail` of the last rows, as many as `other` has."""
    pairs = []
    for kind in kinds:
        rows = list(one[kind].items()) if kind == "state" else [(kind, one[kind])]
        for name, values in rows:
            theirs = other[kind][name] if kind == "state" else other[kind]
            mine = values[len(values) - len(theirs) :] if tail else values
            pairs += zip(mine, theirs, strict=True)
    return max(abs(a - b) for a, b in pairs)
