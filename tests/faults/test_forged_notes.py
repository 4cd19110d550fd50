"""A process that reaches the store of a run with a key file, and writes what it likes there while the run goes on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

FORGED = json.dumps("rank 1 failed with OSError: forged")
RECORD = json.dumps({"history": [], "summary": {"forged": True}})


class Forger:
    """Writes `notes` into every meeting of the run at `port`, over and over, until `stop`."""

    def __init__(self, port: int, notes: dict[str, str]) -> None:
        self.written = 0
        self._port = port
        self._notes = notes
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._forge)
        self._thread.start()

    def stop(self) -> None:
        self._ends.set()
        self._thread.join()

    def _forge(self) -> None:
        store: Any = None
        while not self._ends.wait(0.02):
            with suppress(RuntimeError):  # the run has not begun, or has ended
                store = store or dist.TCPStore("127.0.0.1", self._port, 2, False, timedelta(seconds=1))
                for meeting in {name.rpartition("/")[0] for name in store.list_keys() if "/meeting " in name}:
                    for name, note in self._notes.items():
                        store.set(f"{meeting}/{name}", note)
                        self.written += 1


def run_against(notes: dict[str, str], folder: Path) -> tuple[int, list[tuple[int, str]], Path]:
    """The number of forged notes, the statuses and errors of two ranks, and the folder of their run."""
    key = folder / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = folder / "run"
    command = [sys.executable, "-m", "dure", "train", "digits-mlp", "--strategy", "ssp:bound=3 ps", "--on", "torchrun"]
    command += ["--steps", "40", "--out", str(out), "--key-file", str(key)]
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    output: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    forger = Forger(port, notes)
    ranks = [
        subprocess.Popen(command, env={**os.environ, **paths, **place, "RANK": str(rank)}, **output) for rank in (0, 1)
    ]
    try:
        done = []
        for each in ranks:
            _, errors = each.communicate(timeout=150)
            done.append((each.returncode, errors))
    finally:
        forger.stop()
        for each in ranks:
            each.kill()
            each.wait()
    return forger.written, done, out


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_forged_failures_do_not_end_a_run(tmp_path: Path) -> None:
    written, done, out = run_against({"failure": FORGED}, tmp_path)
    assert written > 10
    assert [status for status, _ in done] == [0, 0], done
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["steps"] == 40
    assert any("ignores a note: the note 'failure' in the store" in errors for _, errors in done)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["start worker 1", "record"])
def test_a_run_whose_notes_are_overwritten_ends_right_or_names_the_note(name: str, tmp_path: Path) -> None:
    """Rank 1 may read its note before the forger has overwritten it."""
    written, done, out = run_against({name: RECORD, "failure": FORGED}, tmp_path)
    assert written > 10
    for status, errors in done:
        assert "Traceback" not in errors
        assert "OSError" not in errors
        assert "forged" not in errors
        assert status == 0 or "in the store where the ranks meet was altered" in errors or "worker 1" in errors
    if done[1][0]:
        assert f"the note '{name}' in the store where the ranks meet was altered" in done[1][1]
    else:
        assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["steps"] == 40
