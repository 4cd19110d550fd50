"""Failures of runs on Ray. Each run starts a Ray of its own on this machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path

import pytest

from dure.runtime.launch import ray_guard
from dure_studies import namespaces

pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]

MARK = "DURE_TEST_MARK"
"""Environment variable by which the processes of a run are found, those of Ray too."""

JOBS = Path(__file__).parents[1] / "support" / "faulty_jobs.py"

RAY = Path(sys.executable).with_name("ray")

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
    # A shell starts what it runs in the background with SIGINT ignored, and tests inherit that.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen([sys.executable, "-m", "dure", "train", *words], env=environ, preexec_fn=heard, **pipes)


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
    """The processes with `mark` that still run after some seconds, with their commands."""
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes()[:200]!r}" for pid in marked(mark)]


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


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_a_cluster_of_two_hosts_without_tokens_needs_insecure_and_survives_a_link_that_is_down(tmp_path):
    """The steps take 2 ms. The link is down once the first rows of the history are there."""
    environ = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    job = [f"{JOBS}:waits_now_and_then", "--strategy", "downpour ps", "--workers", "2", "--steps", "3000", "--json"]
    rows, folder = tmp_path / "run" / "history.jsonl", tempfile.mkdtemp(prefix="dure-ray-test-")
    with namespaces.hosts(2, bandwidth=125e6) as hosts:
        address = f"{hosts.addresses[0]}:6379"
        run = [sys.executable, "-m", "dure", "train", *job, "--eval-every", "20", "--on", f"ray:{address}"]
        start = [str(RAY), "start", "--num-cpus", "1", "--object-store-memory", str(80 << 20)]
        roles = [["--head", "--port", "6379", "--temp-dir", folder, "--include-dashboard", "false"]]
        roles.append(["--address", address])
        try:
            for host, role in enumerate(roles):
                words = [*start, *role, "--node-ip-address", hosts.addresses[host]]
                subprocess.run(hosts._command(host, 1, words, environ), check=True, timeout=SECONDS)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            refused = subprocess.run(hosts._command(0, 1, run, environ), **pipes, timeout=SECONDS)
            assert refused.returncode == 2
            assert "the Ray of 2 machines asks for no token on" in refused.stderr
            run += ["--insecure", "--out", str(rows.parent)]
            trained = subprocess.Popen(hosts._command(0, 1, run, environ), **pipes)
            while trained.poll() is None and not (rows.exists() and rows.read_text().count("\n") > 2):
                time.sleep(0.1)
            namespaces._ip(hosts.names[1], "link set eth0 down")
            time.sleep(5)
            namespaces._ip(hosts.names[1], "link set eth0 up")
            out, said = trained.communicate(timeout=SECONDS)
            assert trained.returncode == 0, said
        finally:
            for name in hosts.names:
                namespaces._end_all(name)
            ray_guard.clean(folder)
    found = json.loads(out.splitlines()[-1])
    assert found["updates_applied"] == 6000
    assert found["evicted"] == found["deaths"] == {}
