"""`dure.integrations.ray_train` in the workers of a `TorchTrainer`, beside Ray's own DDP."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("pandas")

from support import ray_train_cases as cases

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of worker 0; the Ray of the trainings writes its token to the home of the user."""
    folder = tmp_path_factory.mktemp("ray")
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    command = [sys.executable, cases.__file__, str(folder)]
    environment["RAY_USAGE_STATS_ENABLED"] = "0"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", ["fp64", "fp32"])
def test_bsp_equals_rays_ddp(found, kind):
    ddp, bsp = found[kind]
    assert len(ddp["losses"]) == cases.EPOCHS * cases.STEPS
    assert ddp["losses"][0] != ddp["losses"][-1]
    assert ddp == bsp


@pytest.mark.parametrize("sync", cases.FAILING)
def test_a_restarted_training_equals_an_uninterrupted_one(found, sync):
    """A run that is restarted begins after the second checkpoint, or the first if that was not yet kept."""
    whole, rest = found[sync]
    assert len(rest["losses"]) in (2 * cases.STEPS, 3 * cases.STEPS)
    assert rest["losses"] == whole["losses"][-len(rest["losses"]) :]
    assert rest["state"] == whole["state"]
