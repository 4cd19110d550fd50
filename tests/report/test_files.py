import json
import subprocess
import sys
from pathlib import Path

import pytest

import dure
from dure.report import JsonLines

ROW = {"seconds": 1.5, "step": 20, "samples": 640, "loss": 0.25, "accuracy": None, "bytes": 8192}


def test_json_lines_go_on_where_they_ended(tmp_path):
    for step in (1, 2):
        sink = JsonLines(tmp_path / "rows.jsonl")
        sink.write({**ROW, "step": step})
        sink.close()
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


SCRIPT = """
import sys, warnings
warnings.simplefilter("ignore")
from dure.report import TensorBoard
sink = TensorBoard(sys.argv[1])
sink.write({"seconds": 1.5, "step": 20, "samples": 640, "loss": 0.25, "accuracy": None, "bytes": 8192})
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1]).Reload()
for tag in sorted(events.Tags()["scalars"]):
    [event] = events.Scalars(tag)
    print(tag, event.step, event.wall_time, event.value)
sink.close()
"""


def run(code, *arguments):
    source = Path(dure.__file__).parents[1]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(source)}, check=False)


def test_tensorboard_shows_the_runs_own_seconds(tmp_path):
    pytest.importorskip("tensorboard")
    done = run(SCRIPT, tmp_path)
    assert done.stdout.split("\n")[:-1] == ["bytes 20 1.5 8192.0", "loss 20 1.5 0.25", "samples 20 1.5 640.0"], done


def test_without_tensorboard_the_error_says_what_to_install(tmp_path):
    block = "import sys; sys.modules['tensorboard'] = None\nfrom dure.report import TensorBoard\n"
    done = run(f"{block}TensorBoard(sys.argv[1])", tmp_path / "events")
    assert "UsageError" in done.stderr
    assert 'pip install "dure[tensorboard]"' in done.stderr
