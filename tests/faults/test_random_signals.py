"""One of the trials that `make soak` makes three hundred of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "soak" / "random_signals.py"


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc")
@pytest.mark.timeout(600)
def test_a_random_signal_leaves_nothing_behind_and_the_run_says_why_it_ended(tmp_path):
    command = [sys.executable, SCRIPT, "--quick", "--count", "1", "--seed", "2", "--log", tmp_path / "log"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=590, check=False)
    trials = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [each for each in trials if each["problems"]] == []
    assert done.returncode == 0, done.stderr
    assert len(trials) == 1
