"""Tasks of the tests of `dure train --device` for a process with the device (`train_programs`), and their judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from accelerator import target

HERE = Path(__file__).parent
JOBS = HERE / "train_jobs.py"
KIND = target.device_type()
EXACT = ("dyadic", "bags", "sparse_bags", "slow")
"""Jobs whose sums are exact, so that their results are equal on every device. Others are so on the stand-in alone."""

K = TypeVar("K", bound=Hashable)


def started(*arguments: str, tasks: list[Any]) -> subprocess.CompletedProcess[str]:
    """A process that carries out `tasks`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments, "accelerator.train_programs", json.dumps(tasks)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def outcomes(tasks: Mapping[K, Any]) -> dict[K, Any]:
    """What became of tasks, by name."""
    ran = started(tasks=list(tasks.values()))
    assert ran.returncode == 0, ran.stderr[-4000:]
    return dict(zip(tasks, map(json.loads, ran.stdout.splitlines()), strict=True))


def task(name: str, **options: Any) -> dict[str, Any]:
    """The task of a run whose `name` is a job and a strategy."""
    job, _, strategy = name.partition(" ")
    return {"job": job, "strategy": strategy, **options}


def check_equal(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The run `name` has delivered what was expected, wherever both were computed."""
    assert "error" not in found, found["error"]
    assert "error" not in expected, expected["error"]
    if KIND == "standin" or name.startswith(EXACT):
        assert found["params_sha256"] == expected["params_sha256"]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["bytes_sent"] == expected["bytes_sent"]
    assert found["updates_applied"] == expected["updates_applied"]


def check_same_on_both(name: str, both: Mapping[str, Any]) -> None:
    """The run `name` has delivered the same on the CPU and on the device."""
    check_equal(name, both["auto"], both["cpu"])
    assert both["auto"]["devices"][0].startswith(KIND)
    assert both["cpu"]["devices"] is None
