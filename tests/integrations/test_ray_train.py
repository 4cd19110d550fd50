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
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ray"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of worker 0; the Ray of the trainings writes its token to the home of the user."""
    folder = tmp_path_factory.mktemp("ray")
    paths = f"{ROOT / 'src'}:{ROOT / 'tests'}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HOME": str(folder)}
    command = [sys.executable, cases.__file__, str(folder)]
    environment |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "120"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", ["fp64", "fp32"])
def test_bsp_equals_rays_ddp(found, kind):
    ddp, bsp = found[kind]
    assert len(ddp["losses"]) == cases.EPOCHS * cases.STEPS
    assert ddp["losses"][0] != ddp["losses"][-1]
    assert ddp == bsp


def test_bsp_of_three_workers_differs_in_the_last_bits(found):
    ddp, bsp = found["three"]
    assert ddp["losses"][0] != ddp["losses"][-1]
    for each in ("losses", "state"):
        assert bsp[each] == pytest.approx(ddp[each], rel=0, abs=1e-12)


@pytest.mark.parametrize("way", ["averaging", "diloco", "int8"])
def test_methods_end_near_bsp(found, way):
    assert found["near"][way] == pytest.approx(found["near"]["bsp"], rel=0.05)
    assert found["near"][way] != found["near"]["bsp"] < 1


@pytest.mark.parametrize("sync", cases.FAILING)
def test_a_restarted_training_equals_an_uninterrupted_one(found, sync):
    """The last start begins in the middle of a period, after the first epoch: the second has no checkpoint."""
    whole, rest = found[sync]
    assert rest["starts"] == 1 + len(cases.FAILING[sync])
    assert rest["losses"] == whole["losses"][cases.STEPS :]
    assert rest["state"] == whole["state"]


def test_fewer_workers_than_states_are_refused(found):
    sentence = (
        "UsageError: this state is of a training with 3 ranks, and 2 are attached: each has a replica of its own. "
        "Start 3 ranks, or load the model alone and leave the state."
    )
    assert found["fewer"] == [sentence] * 2


def test_workers_that_wait_in_a_report_and_in_a_step_end(found):
    assert len(found["uneven"]) == 1  # Ray ends the others
    for part in (
        "PeerLost: the ranks wait for each other since 5 s, rank 1 in ray.train.report",
        "rank 0 in dure (ray_",
    ):
        assert part in found["uneven"][0]
