"""Output of user code in every process of a run: descriptors 0, 1 and 2 belong to user code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure.runtime.launch.relay import LONGEST, Prefixed, relayed

ROOT = Path(__file__).parents[3]

JOB = """
import os, sys
import torch
from dure import Data, Job, sync

class Talking(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 1)
        print("a model")
        os.write(1, b"from below\\n")
        print("a warning", file=sys.stderr)
        assert sys.stdin.read() == os.environ.get("SAID", ""), "standard input is not empty"

def loss(outputs, targets):
    return (outputs - targets).square().mean()

def talks():
    print("a job")
    return Job(Talking, loss, Data(torch.ones(9, 8), torch.ones(9, 1)), batch_size=4)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "jobs.py").write_text(JOB)
    return tmp_path


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A command that gets nothing on standard input; what it says on the two other streams."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("DURE_")}
    environment = {**kept, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
    )


def the_only_line(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    found: dict[str, object] = json.loads(line)
    return found


@pytest.mark.long
def test_a_job_that_prints_trains_on_processes(folder: Path) -> None:
    done = started(
        *(folder, "-m", "dure", "train", "jobs.py:talks", "--sync", "ssp", "--on", "local"),
        *("--workers", "2", "--steps", "3", "--json"),
    )
    assert the_only_line(done)["steps"] == 3
    said = done.stderr.splitlines()
    for name in ("worker 0", "worker 1"):
        assert said.count(f"{name}: a model") == said.count(f"{name}: from below") == said.count(f"{name}: a warning")
        assert f"{name}: a model" in said
    assert "fork server: a job" in said


@pytest.mark.long
def test_a_job_that_prints_trains_under_torchrun(folder: Path) -> None:
    done = started(
        *(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *("-m", "dure", "train", "jobs.py:talks", "--sync", "ssp", "--topology", "ps:shards=2"),
        *("--on", "torchrun", "--steps", "3", "--json"),
    )
    assert the_only_line(done)["steps"] == 3
    said = done.stderr.splitlines()
    for name in ("launcher", "worker 0", "worker 1"):
        assert f"{name}: a model" in said
        assert f"{name}: from below" in said
    assert "worker 1: a job" in said
    assert "fork server: a job" in said


def test_every_line_goes_after_its_name(tmp_path: Path) -> None:
    with (tmp_path / "shown").open("w+b") as file:
        lines = Prefixed("worker 3", file.fileno())
        for piece in (b"on", b"e\ntwo\r\n\n10 %\r20 %\nthr", b"ee"):
            lines.feed(piece)
        assert lines.last == "20 %"
        lines.end()
        assert lines.last == "three"
        lines.feed(b"what (file.py, line 3)\n  the frame\n    the code\n")
        assert lines.last == "what (file.py, line 3)"
        lines.end()
        lines.feed(b"x" * (LONGEST + 1))
        file.seek(0)
        shown = file.read().decode().splitlines()
    assert shown[:5] == ["worker 3: one", "worker 3: two", "worker 3: ", "worker 3: 20 %", "worker 3: three"]
    assert shown[8:] == [f"worker 3: {'x' * (LONGEST + 1)}"]


def test_standard_output_is_given_back(capfd: pytest.CaptureFixture[str]) -> None:
    print("before")
    with relayed("worker 1"):
        print("meanwhile")
        os.write(1, b"from below\n")
    print("after")
    shown = capfd.readouterr()
    assert shown.out == "before\nafter\n"
    assert shown.err == "worker 1: meanwhile\nworker 1: from below\n"


@pytest.mark.skipif(not Path(os.devnull).is_char_device(), reason="/dev/null is no device on this machine")
def test_a_helper_that_prints_answers(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch) -> None:
    from dure.runtime.launch.shard_process import ShardProcess

    (tmp_path / "chatty.py").write_text(
        "import os\n"
        "def main(starter):\n"
        "    print('hello')\n"
        "    os.write(1, os.read(0, 9) + b'from below\\n')\n"
        "    starter.answer(twice=2 * starter.request()['number'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    helper = ShardProcess("chatty", "server 5", {"number": 4})
    assert helper.answer() == {"twice": 8}
    helper.until_gone()
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "server 5: hello\nserver 5: from below\n")
