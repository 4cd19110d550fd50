"""Every codec works on the device as on the CPU, and lets the host wait at most once per message."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator.codec_programs import CODECS, PROGRAMS, VOTERS

from dure.codec import CATALOGUE
from dure.codec.feedback import ErrorFeedback, Momentum

HERE = Path(__file__).parent
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600)]  # the first test compiles


def lines_of(module):
    """What a module of this folder prints, run in a process of its own."""
    path = os.pathsep.join([str(HERE.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.fixture(scope="module")
def outcomes(device):
    return {(name, text): found for name, text, found in map(json.loads, lines_of("accelerator.codec_programs"))}


@pytest.fixture(scope="module")
def waits(device):
    """How often the host waited, by codec: encode, decode, combine."""
    if device != "standin":
        pytest.skip(f"{device} does not count how often the host waits")
    rows = [line.strip("| ").split(" | ") for line in lines_of("accelerator.synchronizations")[2:]]
    return {text: [int(number) for number in numbers] for text, *numbers in rows}


@pytest.mark.parametrize("text", CODECS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_device_does_as_the_cpu_does(outcomes, name, text):
    assert outcomes[name, text] == "right"


@pytest.mark.parametrize("text", CODECS)
def test_the_host_waits_at_most_once_per_message(waits, text):
    encode, decode, combine = waits[text]
    once = 2 if text.startswith("strom") else 1  # the number of its elements, and the positions
    assert encode <= once
    assert decode <= 1
    learns = text.startswith("it-sign")  # from the elements whose decision changed
    assert combine <= VOTERS + once + learns


def test_every_codec_and_every_wrapper_of_a_codec_is_here():
    parts = [text.partition("+") for text in CODECS]
    assert {codec.partition(":")[0] for codec, _, _ in parts} == set(CATALOGUE)
    joins = {"ef": ErrorFeedback.joins, "momentum": Momentum.joins}
    joined = {(codec.partition(":")[0], wrapper) for codec, _, wrapper in parts if wrapper}
    assert joined == {(codec, wrapper) for wrapper, codecs in joins.items() for codec in codecs}
