"""`dure watch`: a run that goes on, that is over, and that was killed, on a terminal and elsewhere."""

import io
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

import dure
from dure.cli.main import main
from dure.cli.watch import watch
from dure.report import read_run
from dure.runtime.launch.interruption import Interrupted, Interruption

WRITER = """
import sys
from pathlib import Path
from dure.report import RunFolder

with RunFolder.create(sys.argv[1]) as folder:
    config = {"job": "digits-mlp", "strategy": "bsp", "on": "local", "workers": 3}
    folder.write_config(config, seed=0, steps=40)
    print("begun", flush=True)
    for line in sys.stdin:
        step = int(line)
        folder.append({"seconds": step / 10, "step": step, "loss": 1 / step, "accuracy": 0.5, "bytes": 1000 * step})
        print("written", flush=True)
    folder.write_summary({"job": "digits-mlp", "workers": 3, "loss": 0.5})
"""


@pytest.fixture
def writer(tmp_path):
    """A process that writes the record of a run: a row for each step that it is told."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout.readline() == "begun\n"
        yield process
        process.kill()


class Told(Interruption):
    """Lets the writer go on, a row at each wait; after `steps` closes or kills it, or comes as Ctrl-C itself."""

    def __init__(self, writer, steps, then):
        super().__init__()
        self.writer, self.left, self.then = writer, list(steps), then

    def until(self, condition, seconds):
        if self.left:
            self.writer.stdin.write(f"{self.left.pop(0)}\n")
            self.writer.stdin.flush()
            assert self.writer.stdout.readline() == "written\n"
            assert condition(), "a row is noticed at once"
        elif self.then == "close":
            self.writer.stdin.close()
            self.writer.wait(20)
        elif self.then == "kill":
            self.writer.send_signal(signal.SIGKILL)
            self.writer.wait(20)
        else:
            self.number = signal.SIGINT
        return super().until(condition, 0.01)


def test_a_run_that_goes_on_is_a_line_per_row_until_it_is_over(writer, tmp_path):
    out = io.StringIO()
    run = watch(tmp_path / "run", Told(writer, [10, 20, 40], "close"), Console(file=out, width=60))
    assert out.getvalue().splitlines() == [
        "step 10 of 40 (25%), loss 0.1000, accuracy 50.0%, workers 3, sent 10.0 kB, real time 1.00 s",
        "step 20 of 40 (50%), loss 0.0500, accuracy 50.0%, workers 3, sent 20.0 kB, real time 2.00 s",
        "step 40 of 40 (100%), loss 0.0250, accuracy 50.0%, workers 3, sent 40.0 kB, real time 4.00 s",
    ]
    assert run.figures["loss"] == 0.5


@pytest.mark.parametrize(("then", "state"), [("close", "finished"), ("kill", "ended without a result")])
def test_on_a_terminal_a_table_is_drawn_again_and_ends_with_the_run(then, state, writer, tmp_path):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    watch(tmp_path / "run", Told(writer, [10, 20], then), console)
    shown = out.getvalue()
    for text in ("goes on", "10 of 40 (25%)", "20 of 40 (50%)", "Real time", "2.00 s", "20.0 kB", "bsp"):
        assert text in shown
    assert state in shown.rpartition("Strategy")[2]


def test_ctrl_c_ends_the_watch_and_not_the_run(writer, tmp_path):
    with pytest.raises(Interrupted):
        watch(tmp_path / "run", Told(writer, [10], "ctrl-c"), Console(file=io.StringIO()))
    assert writer.poll() is None


def test_the_command_shows_a_finished_run(tmp_path, capsys):
    run = dure.train("quadratic", on="virtual", workers=2, steps=20, seed=0, out=tmp_path / "run")
    assert main(["watch", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(run.history)
    assert lines[-1].startswith("step 20 of 20 (100%), loss ")
    assert "virtual time" in lines[-1]
    assert read_run(tmp_path / "run").steps == 20


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
