"""Every codec works on the device as on the CPU, and lets the host wait at most once per message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator.codec_programs import CODECS, PROGRAMS

from dure.codec import CATALOGUE
from dure.codec.feedback import ErrorFeedback, Momentum

HERE = Path(__file__).parent
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]  # the first test compiles


@pytest.fixture(scope="module")
def outcomes(device):
    """The outcome of each program with each codec, run in a process of its own."""
    path = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "accelerator.codec_programs"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    return {(name, text): found for name, text, found in map(json.loads, ran.stdout.splitlines())}


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_device_does_as_the_cpu_does(outcomes, name, text):
    assert outcomes[name, text] == "right"


def test_every_codec_and_every_wrapper_of_a_codec_is_here():
    parts = [text.partition("+") for text in CODECS]
    assert {codec.partition(":")[0] for codec, _, _ in parts} == set(CATALOGUE)
    joins = {"ef": ErrorFeedback.joins, "momentum": Momentum.joins}
    joined = {(codec.partition(":")[0], wrapper) for codec, _, wrapper in parts if wrapper}
    assert joined == {(codec, wrapper) for wrapper, codecs in joins.items() for codec in codecs}
