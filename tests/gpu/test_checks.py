"""The checks of `bench/gpu` without a GPU: each skips with a reason, and its code runs on the stand-in.

On the stand-in no figure means anything, and none is looked at, apart from those that are right or wrong.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerator import target

GPU = Path(__file__).parents[2] / "bench" / "gpu"
SCRIPTS = sorted(path for path in GPU.glob("[!_]*.py") if path.stem != "all_checks")
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600), pytest.mark.long]

RUN_ALL = """
import runpy, sys

sys.path.insert(0, sys.argv[1])
more = sys.argv[2:]
for each in more[: more.index("--")]:
    script, *numbers = each.split(",")
    sys.argv = [script, *more[more.index("--") + 1 :], *(["--only", *numbers] if numbers else [])]
    runpy.run_path(script, run_name="__main__")
"""


def in_one_process(scripts, *arguments):
    """The facts that each script prints. A script is its path, and the numbers of its checks after commas."""
    command = [sys.executable, "-c", RUN_ALL, str(GPU), *scripts, "--", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], done.stdout


@pytest.fixture
def standin():
    if target.device_type() != "standin":
        pytest.skip("a rehearsal is on the stand-in")
    if reason := target.absent():
        pytest.skip(reason)


def all_checks():
    spec = importlib.util.spec_from_file_location("all_checks", GPU / "all_checks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_check_is_skipped_with_a_reason_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    facts, output = in_one_process(map(str, SCRIPTS))
    skipped = {int(number): rows for each in facts for number, rows in each["checks"].items()}
    reason = "no CUDA device: torch.cuda.is_available() is False"
    assert skipped == {number: [{"skipped": reason}] for number in range(1, 18)}
    assert output.count("check ") == 17


def test_the_groups_name_each_check_and_its_script():
    module = all_checks()
    groups = module.CORRECTNESS | module.SPEED
    assert sorted(groups) == list(range(1, 18))
    assert {*groups.values()} == {script.stem for script in SCRIPTS}


SPANS = """
import sys
sys.path.insert(0, sys.argv[1])
from copies import Span, overlapped
print(overlapped([Span(0, 10), Span(20, 30)], [Span(2, 4), Span(8, 22), Span(40, 50)]))
"""


def test_the_overlap_of_copies_is_the_share_of_their_time():
    done = subprocess.run([sys.executable, "-c", SPANS, str(GPU)], capture_output=True, text=True)
    assert float(done.stdout) == 6 / 20


QUICK = [f"{GPU / name}" for name in ("encoding.py", "copies.py,7,8", "virtual_workers.py")]


def test_checks_in_one_process_run_on_the_standin(standin):
    facts, output = in_one_process(QUICK, "--device", "standin", "--rehearse")
    rows = {number: rows for each in facts for number, rows in each["checks"].items()}
    assert sorted(map(int, rows)) == [7, 8, 9, 10, 16]
    assert all(row["rehearsed"] for each in rows.values() for row in each)
    assert all(row["met"] for row in rows["8"])
    assert all(row["met"] is not False for row in rows["10"])
    assert output.count(": rehearsed") == sum(map(len, rows.values()))


@pytest.mark.soak
@pytest.mark.parametrize(("group", "count"), [("correctness", 10), ("speed", 6)])
def test_every_check_runs_on_the_standin(standin, group, count):
    command = [sys.executable, str(GPU / "all_checks.py"), group, "--device", "standin", "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.stdout.splitlines()[-1] == f"{count} rehearsed", done.stdout + done.stderr[-4000:]
