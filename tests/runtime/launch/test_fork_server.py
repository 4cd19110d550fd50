"""The fork server beside its launcher."""

from __future__ import annotations

import os

from dure.runtime.launch.fork_server import ForkServer


def test_the_fork_server_shares_the_launcher_s_session_and_not_its_process_group() -> None:
    """In a session of its own, evaluation at the lowest priority took as many cores as all workers together."""
    with ForkServer() as fork_server:
        server = fork_server._process.pid
        assert os.getsid(server) == os.getsid(0)
        assert os.getpgid(server) == server
