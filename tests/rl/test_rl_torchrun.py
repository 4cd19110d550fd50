"""Bundles of actor, replay and learner at the ranks of a real torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import faulty_environments

FILE = Path(faulty_environments.__file__)


def torchrun(settings, *options):
    job = f"gorila:env={FILE}@walk,actors=2,min_size=50,send=10{settings}"
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "dure", "train", job, "--on", "torchrun", "--strategy", "downpour ps", "--steps", "40", "--json"),
            *options,
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


@pytest.mark.soak
def test_each_rank_hosts_its_actor_and_its_replay(tmp_path):
    done = torchrun("", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates_applied"] == 80
    assert summary["experience"]["replay"]["inserts"] >= 2 * 50
    assert summary["experience"]["replay"]["samples"] >= 80 * 32


@pytest.mark.soak
def test_actors_that_join_late_are_refused():
    done = torchrun(",late=1,late_seconds=1")
    assert done.returncode
    assert "actor 1 would join late, and torchrun starts all processes at once" in done.stderr
