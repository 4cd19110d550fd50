"""Runs on Ray: the same results as on this machine alone, and nothing left over. All share a cluster of two nodes."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dure.runtime.launch import ray_guard

pytest.importorskip("ray")

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group("ray")]

SECONDS = 400
"""Time limit of one run."""

OPTIONS = ["--workers", "3", "--steps", "40", "--seed", "1", "--json"]

RAY = Path(sys.executable).with_name("ray")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray of two nodes that asks for a token, and the environment of a driver that has it."""
    folder = tempfile.mkdtemp(prefix="dure-ray-test-")
    token = Path(folder) / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32), encoding="utf-8")
    environ = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    environ |= {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    address = f"127.0.0.1:{free_port()}"
    start = [RAY, "start", "--num-cpus", "1", "--object-store-memory", str(80 << 20), "--disable-usage-stats"]
    head = ["--head", "--port", address.partition(":")[2], "--temp-dir", folder, "--include-dashboard", "false"]
    try:
        with open(Path(folder) / "ray.out", "w", encoding="utf-8") as out:
            for role in ([*head, "--node-ip-address", "127.0.0.1"], ["--address", address]):
                subprocess.run([*start, *role], env=environ, check=True, stdout=out, stderr=out, timeout=SECONDS)
        yield address, environ
    finally:
        ray_guard.clean(folder)


def train(*options, environ=None, check=True):
    command = [sys.executable, "-m", "dure", "train", *options]
    environ = environ or {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=SECONDS)
    assert not check or done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("strategy", ["bsp", "bsp ps:shards=2"])
def test_a_run_on_two_nodes_has_the_model_of_a_local_run(strategy, cluster):
    address, environ = cluster
    options = ["digits-mlp", "--strategy", strategy, *OPTIONS, "--on"]
    local = json.loads(train(*options, "local").stdout)
    found = json.loads(train(*options, f"ray:{address}", environ=environ).stdout)
    assert found["params_sha256"] == local["params_sha256"]
    assert found["on"] == f"ray:{address}"


PROGRAM = Path(__file__).with_name("ray_failures.py")


def test_a_server_of_downpour_restarts_alone_and_the_key_of_the_run_is_in_no_file(cluster, tmp_path):
    """The program looks for the key, and kills a server once there is a checkpoint."""
    address, environ = cluster
    folder = Path(environ["RAY_AUTH_TOKEN_PATH"]).parent
    command = [sys.executable, PROGRAM, f"ray:{address}", tmp_path / "run", folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["deaths"] == {"server 1": "killed by signal 9 (SIGKILL)"}
    assert found["failures_survived"] == 1
    assert found["steps"] == [300, 300]
    assert found["started"] == {"worker 0": 1, "worker 1": 1, "server 0": 1, "server 1": 2}
    assert found["looked_at"] > 20
    assert found["in"] == []


def test_an_address_where_nothing_listens_is_an_error():
    done = train("digits-mlp", "--workers", "2", "--on", f"ray:127.0.0.1:{free_port()}", check=False)
    assert done.returncode == 1
    assert "nothing answers at ray:127.0.0.1:" in done.stderr
    assert "Traceback" not in done.stderr
