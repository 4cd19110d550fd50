"""The job `digits-mlp` for the device under test, which a process registers when it loads this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from accelerator import target

from dure import Job
from dure.job.job import load_job

target.prepare()


def digits() -> Job:
    return load_job("digits-mlp")
