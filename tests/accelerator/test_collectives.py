"""`dure.attach` over collectives: two ranks on a device give what two on the CPU give (`collective_programs.py`)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import target
from accelerator.collective_programs import CODECS
from support.soak import soaked

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]

ENGINE = ["bsp", "one-shot", "averaging:period=2", "bmuf:period=2,fragments=2", "diloco:period=2,overlap=1"]
ENGINE += ["eamsgd:period=2 collective"]
ALGORITHMS = ["ring", "tree", "halving-doubling", "hierarchical,per_host=2"]
SENT = [f"bsp collective:algorithm={each}" for each in ALGORITHMS]
MORE = [
    "bmuf:period=2",
    "diloco:period=2",
    "easgd:period=2 collective",
    "bsp collective:algorithm=hierarchical,per_host=1",
]
MORE += [f"{sync} collective:algorithm={each}" for sync in ENGINE[1:5] for each in ALGORITHMS]


def ran(*names):
    """What both ranks gave under each name."""
    if reason := target.absent(2):
        pytest.skip(reason)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerator.collective_programs", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: ranks for name, *ranks in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def trained():
    return ran(*ENGINE, *SENT)


@pytest.fixture(scope="module")
def trained_long():
    return ran(*MORE)


def check_equal(ranks, within=0.0):
    for rank in ranks:
        assert not isinstance(rank, str), rank
        assert rank["difference"] <= within
        assert rank["moved"] > 1e-3
        assert rank["bytes"][0] == rank["bytes"][1] > 0


@pytest.mark.parametrize("strategy", [*ENGINE, *SENT])
def test_two_ranks_on_a_device_equal_two_on_the_cpu(trained, strategy):
    check_equal(trained[strategy])


@pytest.mark.parametrize("strategy", soaked(*MORE))
def test_the_other_methods_on_a_device_equal_those_on_the_cpu(trained_long, strategy):
    check_equal(trained_long[strategy])


@pytest.mark.parametrize("strategy", [*ENGINE, *SENT])
def test_the_host_waits_for_the_device_at_most_twice_in_a_step(trained, strategy):
    """Once to look for NaN in the gradient, and once where buffers are merged."""
    for rank in trained[strategy]:
        merges = [0] * 6 if strategy.startswith(("bsp", "one-shot", "eamsgd")) else [0, 1] * 3
        assert rank["waits"] == [1 + each for each in merges]


@pytest.fixture(scope="module")
def codecs():
    return ran("codecs")["codecs"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_codec_over_a_group_on_a_device_gives_what_it_gives_on_the_cpu(codecs, codec):
    check_equal([rank if isinstance(rank, str) else rank[codec] for rank in codecs])
