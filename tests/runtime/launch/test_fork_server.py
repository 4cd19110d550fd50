"""The fork server beside its launcher."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from dure.runtime.launch.fork_server import ForkServer


def test_the_fork_server_shares_the_launcher_s_session_and_not_its_process_group() -> None:
    """In a session of its own, evaluation at the lowest priority took as many cores as all workers together."""
    with ForkServer() as fork_server:
        server = fork_server._process.pid
        assert os.getsid(server) == os.getsid(0)
        assert os.getpgid(server) == server


@pytest.mark.parametrize(("given", "taken"), [(None, "1"), ("0", "0")])
def test_a_job_s_question_for_cuda_leaves_the_fork_server_able_to_fork(
    given: str | None, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    environment: dict[str, str] = {}

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            environment.update(options["env"])
            super().__init__(*arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", Started)
    with ForkServer():
        assert environment[name] == taken
