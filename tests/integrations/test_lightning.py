"""`DureStrategy` inside Lightning's `Trainer`, beside Lightning's own DDP, at ranks of a real torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from support import lightning_cases as cases

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.long, pytest.mark.xdist_group("lightning"), pytest.mark.timeout(400)]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
EQUAL = ("fp64", "fp32", "sgd", "accumulation", "bf16", "fp16", "norm", "unused")
OTHERS = (
    "methods",
    "resume",
    "several_checkpoints",
    "refusals",
    "servers",
    "from_ddp",
    "twice",
    "overflow",
    "validation",
)


def started(folder, *names, ranks=2, own=False):
    """The results of the ranks, by rank; started by torchrun, or by Lightning's `own` launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *([] if own else launcher), cases.__file__, str(folder), *names]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def ranks(folder):
    return started(folder, *EQUAL, *OTHERS, "two_ranks_write", "raises")


def distance(one, other):
    """The largest difference of losses, scores and states."""
    pairs = [*zip(one["losses"], other["losses"], strict=True), *zip(one["scores"], other["scores"], strict=True)]
    for name, values in one["state"].items():
        pairs += zip(values, other["state"][name], strict=True)
    return max(abs(a - b) for a, b in pairs)


@pytest.mark.parametrize("case", EQUAL)
def test_bsp_equals_lightnings_ddp_at_two_ranks(ranks, case):
    for rank in ranks:
        ddp, bsp = rank[case]
        assert len(ddp["losses"]) >= 12
        assert ddp["losses"][0] != ddp["losses"][-1]
        assert distance(ddp, bsp) == 0


def test_bsp_differs_in_the_last_bits_at_three_ranks(folder, ranks):
    below = folder / "three"
    below.mkdir()
    (folder / "two").rename(below / "two")
    for rank in started(below, "fp64", "three_ranks_read", ranks=3):
        assert distance(*rank["fp64"]) < 1e-12
        assert rank["three_ranks_read"]["steps"] == 4
        assert "this state is of a training with 2 ranks, and 3 are attached" in rank["three_ranks_read"]["refused"]


def test_methods_end_near_bsp(ranks):
    def score(way):
        return sum(sum(rank["methods"][way]["scores"][-10:]) for rank in ranks)

    for way in ("averaging", "diloco", "int8"):
        assert score(way) == pytest.approx(score("bsp"), rel=0.05)
        assert score(way) != score("bsp")
        assert ranks[0]["methods"][way]["state"] == ranks[1]["methods"][way]["state"]


@pytest.mark.parametrize("sync", ["bsp", "averaging:period=8", "diloco:period=8", "bsp 1bit"])
def test_a_resumed_training_equals_an_uninterrupted_one(ranks, sync):
    for rank in ranks:
        whole, rest, same_files, last = rank["resume"][sync]
        assert len(whole["losses"]) == 24
        assert len(rest["losses"]) == 12
        assert whole["losses"][12:] == rest["losses"]
        assert whole["state"] == rest["state"]
        assert same_files
        assert last == whole["state"]  # the last checkpoint is the final model


def test_validation_is_of_what_the_method_would_deliver(ranks):
    one, other = (rank["validation"] for rank in ranks)
    assert one["losses"] != other["losses"]
    assert one["scores"] == other["scores"]


def test_an_error_at_one_rank_ends_all(ranks):
    assert ranks[1]["raises"] == "RuntimeError: an error of the user's"
    assert ranks[0]["raises"].startswith("PeerLost: rank 1 failed with RuntimeError: an error of the user's.")


def test_ranks_with_loaders_of_different_lengths_learn_what_they_wait_for(folder):
    below = folder / "uneven"
    below.mkdir()
    for rank in started(below, "uneven"):
        assert "the ranks wait for each other since 3 s, rank 0 in torch.distributed.broadcast" in rank["uneven"]


def test_states_of_ranks_are_removed_with_their_checkpoint(ranks):
    for rank in ranks:
        assert rank["several_checkpoints"] == {
            "left": [
                "epoch=2.ckpt",
                "epoch=2.ckpt.dure",
                "epoch=2.ckpt.dure/rank0.pt",
                "epoch=2.ckpt.dure/rank1.pt",
                "last.ckpt",
            ],
            "steps": [18, 6],
        }


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("manual", "DureStrategy needs automatic optimization, and Net has automatic_optimization=False."),
        ("hook", "ddp_comm_hook=<built-in function len> is an option of DistributedDataParallel, which DureStrategy"),
        ("unused", "find_unused_parameters=True is an option of DistributedDataParallel, which DureStrategy"),
        ("shared", "hogwild:decay=1 does not run in a loop of one's own"),
        ("other strategy", "with strategy averaging:period=4 collective fp32 none, and this rank has bsp"),
        ("moved alone", "rank0.pt is missing: the checkpoint was written without dure, or copied without the folder"),
        ("interrupted", "old.ckpt was saved at step 2, and the states in FOLDER/refusals/old.ckpt.dure at step 6: a"),
    ],
)
def test_what_is_refused_is_told_in_a_sentence(ranks, what, says):
    assert says in ranks[0]["refusals"][what]


def test_servers_keep_their_state_and_checkpoints_the_model(ranks):
    for rank in ranks:
        assert rank["servers"]["left"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
        assert rank["servers"]["steps"] == [12, 6]
        assert rank["servers"]["state"] == ranks[0]["servers"]["state"]


def test_a_training_of_ddp_goes_on_with_dure(ranks):
    for rank in ranks:
        ddp, bsp, averaging = rank["from_ddp"]
        assert ddp["losses"][12:] == bsp["losses"]
        assert ddp["state"] == bsp["state"]
        assert averaging["losses"][0] == bsp["losses"][0]
        assert averaging["losses"] != bsp["losses"]


def test_a_trainer_fits_twice(ranks):
    for rank in ranks:
        assert rank["twice"]["steps"] == 12
        assert rank["twice"]["resumed"] == 6
        assert rank["twice"]["score"] == ranks[0]["twice"]["score"]


def test_all_ranks_skip_the_steps_that_overflow(ranks):
    for rank in ranks:
        ddp, bsp, mean = (rank["overflow"][way] for way in ("ddp", "bsp", "mean"))
        assert distance(ddp, bsp) == 0
        assert ddp["scale"] == bsp["scale"] == mean["scale"] < 2.0**24
        assert mean["state"] == ranks[0]["overflow"]["mean"]["state"]


def test_lightnings_own_launcher_starts_the_ranks(folder):
    own = folder / "own"
    own.mkdir()
    for rank in started(own, "fp64", "several_checkpoints", own=True):
        assert distance(*rank["fp64"]) == 0
        assert rank["several_checkpoints"]["steps"] == [18, 6]
