"""The Ray of a run: the one that this process has, the one at an address, or one on this machine for this run alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from dure.core.address import FOUND, host_and_port
from dure.core.text import log, sentence
from dure.errors import DureError, UsageError
from dure.runtime.launch import ray_guard

CLOSE_SECONDS = 10.0
"""Time limit for the guard of a local Ray to end what remains of it."""

PROBE_SECONDS = 5.0
"""Time limit for a connection to the address of Ray; Ray itself would try for minutes."""

STORE_NBYTES = 80 << 20
"""Ray's own store on this machine, of the smallest size: no tensor goes there."""

OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Permissions of other users."""

TOKEN = token_hex(32)
"""The token of a local Ray. Ray reads the first token of a process only, so all Rays of this process have the same."""


@contextmanager
def connected(ray: Any, address: str) -> Iterator[None]:
    """Connect this process to the Ray at `address`. Without one: the Ray that it has, or RAY_ADDRESS, or a new one."""
    if ray.util.client.ray.is_connected():
        raise UsageError(CLIENT)
    if ray.is_initialized():
        own = ray.get_runtime_context().gcs_address
        if address not in ("", FOUND, own):
            raise UsageError(
                f"this process is connected to the Ray at {own}, and ray:{address} was asked for: write ray."
            )
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS", "")
    with ExitStack() as stack:
        if address:
            _reach(ray, address)
        else:
            stack.enter_context(_local_ray(ray))
        stack.callback(ray.shutdown)
        yield


CLIENT = (
    "this process is connected to Ray by ray://, Ray's client, through which the processes of a run cannot reach it. "
    f"Run dure on a machine of the cluster with --on ray:{FOUND}, or by ray job submit."
)


def _reach(ray: Any, address: str) -> None:
    """Connect to a running Ray. Raises `DureError` if there is none."""
    found = host_and_port(address)
    if found is None and address != FOUND:
        raise UsageError(f"RAY_ADDRESS is {address!r}. Set it to {FOUND} or HOST:PORT, as ray start --head prints it.")
    if found is not None:
        try:
            socket.create_connection(found, PROBE_SECONDS).close()
        except OSError as error:
            raise DureError(
                f"nothing answers at ray:{address} ({error.strerror or error}). Give the address that ray start --head "
                "prints, or leave the address out for a Ray of this run's own."
            ) from None
    try:
        _init(ray, address=address)
    except Exception as error:
        raise DureError(f"Ray at {address} refused: {sentence(str(error))}") from error


def _init(ray: Any, **options: Any) -> None:
    """Connect this process to Ray. The handlers of signals stay as they are: Ray installs its own for SIGTERM."""
    logger = logging.getLogger("ray")
    level, handler = logger.level, signal.getsignal(signal.SIGTERM)
    logger.setLevel(logging.ERROR)
    try:
        ray.init(log_to_driver=False, configure_logging=False, **options)
    finally:
        logger.setLevel(level)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _local_ray(ray: Any) -> Iterator[None]:
    """A Ray on this machine, with a token of its own, until the end. A guard ends it after a kill of this process."""
    folder = tempfile.mkdtemp(prefix="dure-ray-")
    guard = subprocess.Popen(
        [sys.executable, "-I", ray_guard.__file__, folder], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    token = Path(folder) / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN, encoding="utf-8")
    # Ray reads RAY_AUTH_MODE when it is imported. Where the mode is left out, a new Ray asks for tokens.
    given = {"RAY_AUTH_MODE": None, "RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(token)}
    try:
        with _environment({**given, "RAY_USAGE_STATS_ENABLED": "0"}):
            _init(
                ray,
                address="local",
                num_cpus=1,  # Ray starts a process for each of them before it is needed
                object_store_memory=STORE_NBYTES,
                include_dashboard=False,
                _temp_dir=folder,
                _node_ip_address="127.0.0.1",
            )
        yield
    finally:
        guard.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            guard.wait(CLOSE_SECONDS)


@contextmanager
def _environment(given: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of the environment while open; None removes one."""
    before = {name: os.environ.get(name) for name in given}
    try:
        _set(given)
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def check_hosts(ray: Any, places: Sequence[Mapping[str, Any]], *, insecure: bool) -> None:
    """Raise `UsageError` where others could read the key of the run in Ray; say where they could read Ray's token."""
    alive = sum(node["Alive"] for node in ray.nodes())
    open_hosts = sorted({place["host"] for place in places if not place["authenticates"]})
    if alive > 1 and open_hosts and not insecure:
        raise UsageError(
            f"the Ray of {alive} machines asks for no token on {', '.join(open_hosts)}: everyone who reaches a port of "
            "it can execute code there. Start all of its machines with RAY_AUTH_MODE=token and the same "
            "~/.ray/auth_token, of mode 0600 (ray get-auth-token --generate), or give --insecure."
        )
    token = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not open_hosts and "RAY_AUTH_TOKEN" not in os.environ and token.exists() and token.stat().st_mode & OTHERS:
        log.warning("others can read the token of Ray: chmod 600 %s", token)
