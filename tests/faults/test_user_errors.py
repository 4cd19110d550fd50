"""Code of users that raises in a process of a run: one sentence with file and line, their frames, all in the record."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dure.cli.main import main

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "support" / "raising_jobs.py"
TEXT = JOBS.read_text(encoding="utf-8").splitlines()


def line_of(text):
    return next(number for number, line in enumerate(TEXT, start=1) if text in line)


RAISES = 'raise RuntimeError(f"the'
CASES = {
    "model": [RAISES, 'broken("model")'],
    "shape": ["self.line(x[:, :2])"],
    "loss": [RAISES, 'broken("loss")'],
    "data": [RAISES, 'broken("data")'],
}
"""The lines of the frames of a case; the sentence names the first."""


def train(folder, *words, launch=()):
    command = [sys.executable, "-m", *launch, *(["-m"] if launch else []), "dure", "train", *words]
    command += ["--workers", "2", "--out", "run"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=110)


def frames(lines):
    return [line.split('"')[1] for line in lines if line.lstrip().startswith('File "')]


@pytest.mark.long
@pytest.mark.parametrize("where", CASES)
def test_a_worker_names_file_and_line_and_shows_the_users_frames(where, tmp_path):
    done = train(tmp_path, f"{JOBS}:job:where={where}", "--strategy", "bsp ps", "--on", "local")
    place = f"({JOBS}, line {line_of(CASES[where][0])})."
    said = [line for line in done.stderr.splitlines() if line.startswith("worker ") and line[8:10] == ": "]
    name = said[0][:8]
    own = [line.removeprefix(f"{name}: ") for line in said if line.startswith(f"{name}: ")]
    assert own[0].startswith("RuntimeError: ")
    assert own[0].endswith(place)
    assert set(frames(own)) == {str(JOBS)}
    assert all(any(TEXT[line_of(text) - 1].strip() in line for line in own) for text in CASES[where])
    assert own[-1] == f"  The whole traceback is in run/traceback-{name.replace(' ', '-')}.txt."
    kept = (tmp_path / "run" / f"traceback-{name.replace(' ', '-')}.txt").read_text(encoding="utf-8")
    assert "src/dure/" in kept
    assert kept.splitlines()[-1] == own[0].removesuffix(f" {place}")
    assert own[0].removesuffix(".") in done.stderr.splitlines()[-1], "the last line has the cause"
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_a_server_names_file_and_line_of_a_rule(tmp_path):
    rule = ("--sync", f"{JOBS}:BrokenAtServer", "--topology", "ps")
    done = train(tmp_path, f"{JOBS}:job:where=nowhere", *rule, "--on", "local")
    own = [line.removeprefix("server 0: ") for line in done.stderr.splitlines() if line.startswith("server 0: ")]
    what = f"RuntimeError: the server is broken ({JOBS}, line {line_of(RAISES)})"
    assert own[0].endswith(f"has failed: {what}.")
    assert set(frames(own)) == {str(JOBS)}
    assert "src/dure/" in (tmp_path / "run" / "traceback-server-0.txt").read_text(encoding="utf-8")
    assert done.stderr.splitlines()[-1].endswith(f"{what}.")


@pytest.mark.long
def test_a_rank_of_torchrun_names_file_and_line(tmp_path):
    launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (f"{JOBS}:job:where=model", "--strategy", "bsp ps", "--on", "torchrun")
    done = train(tmp_path, *words, launch=launch)
    lines = done.stderr.splitlines()
    what = f"RuntimeError: the model is broken ({JOBS}, line {line_of(RAISES)})."
    assert f"dure: worker 1: your own code raised {what}" in lines
    assert f"worker 0: {what}" in lines
    ours = [file for file in frames(lines) if "/src/dure/" in file]
    assert ours == []
    for rank in (0, 1):
        assert "src/dure/" in (tmp_path / "run" / f"traceback-worker-{rank}.txt").read_text(encoding="utf-8")


def test_a_virtual_run_names_file_and_line_and_keeps_the_traceback(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"{JOBS}:job:where=loss", "--on", "virtual", "--workers", "2", "--out", "run"]) == 1
    first, *rest = capsys.readouterr().err.splitlines()[-6:]
    what = f"RuntimeError: the loss is broken ({JOBS}, line {line_of(RAISES)})."
    assert first == f"dure: your own code raised {what}"
    assert frames(rest) == [str(JOBS)] * 2
    assert rest[-1] == "  The whole traceback is in run/traceback-driver.txt."
    assert "src/dure/" in (tmp_path / "run" / "traceback-driver.txt").read_text(encoding="utf-8")
