"""Failures of runs on Ray. Each run starts a Ray of its own on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]

MARK = "DURE_TEST_MARK"
"""Environment variable by which the processes of a run are found, those of Ray too."""

JOBS = Path(__file__).parents[1] / "support" / "faulty_jobs.py"

SECONDS = 280
"""Time limit of one run."""


@pytest.fixture
def mark():
    """A value of MARK. Processes that a failed test leaves are killed."""
    value = uuid.uuid4().hex
    yield value
    for pid in marked(value):
        os.kill(pid, signal.SIGKILL)


def command(mark, *words):
    environ = {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-m", "dure", "train", *words], env=environ, **pipes)


def marked(mark):
    """The processes with `mark` that run."""
    found, entry = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and entry in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended
    return found


def left_after(mark, seconds):
    """The processes with `mark` that still run after some seconds."""
    deadline = time.monotonic() + seconds
    while (found := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def test_the_others_go_on_after_a_worker_of_ssp_has_crashed(mark, tmp_path):
    options = ["--strategy", "ssp ps:shards=2", "--workers", "3", "--steps", "60", "--data", str(tmp_path), "--json"]
    run = command(mark, f"{JOBS}:one_crashes", *options, "--on", "ray")
    out, said = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, said
    found = json.loads(out)
    (death,) = found["deaths"].items()
    assert "signal 11" in death[1]
    steps = {name: each["steps"] for name, each in found["per_worker"].items()}
    assert all(steps[name] == 60 for name in steps if name != death[0])
    assert left_after(mark, 10) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_no_process_outlives_the_driver(number, status, mark, tmp_path):
    """Each of the two workers writes a file when it trains."""
    options = ["--strategy", "ssp ps", "--workers", "2", "--steps", "1000000", "--data", str(tmp_path)]
    run = command(mark, f"{JOBS}:starts_processes", *options, "--on", "ray")
    deadline = time.monotonic() + SECONDS
    while len([*tmp_path.glob("*.child")]) < 2 and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert run.poll() is None, run.communicate()[1]
    before = marked(mark)
    assert len(before) > 6  # three fork servers and their processes
    run.send_signal(number)
    assert left_after(mark, 40) == []
    run.communicate(timeout=10)
    assert run.returncode == status


def test_an_address_that_does_not_answer_is_an_error_within_seconds(mark):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        address = server.getsockname()
        waiting = [socket.socket() for _ in range(4)]  # fill the queue of the server, which accepts none
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(address)
        run = command(mark, "digits-mlp", "--workers", "2", "--on", f"ray:127.0.0.1:{address[1]}")
        said = run.communicate(timeout=120)[1]
        for each in waiting:
            each.close()
    assert run.returncode == 1
    assert f"nothing answers at ray:127.0.0.1:{address[1]}" in said
