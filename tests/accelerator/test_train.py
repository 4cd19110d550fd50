"""Real runs with replicas on a device equal those on the CPU, bit for bit where the order of updates is fixed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerator import target

HERE = Path(__file__).parent
JOBS = HERE / "train_jobs.py"
KIND = target.device_type()
pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600), pytest.mark.usefixtures("device")]

RUNS = {
    "dyadic bsp ps": {},
    "dyadic ssp:bound=0 ps:shards=2": {},
    "dyadic averaging:period=2 ps": {"eval_every": 2},
    "dyadic bsp collective": {"eval_every": 2},
    "plain averaging:period=2 collective": {},
    "plain bsp collective:algorithm=ring": {},
    "dyadic bsp collective:algorithm=tree": {},
    "dyadic bsp collective:algorithm=halving-doubling": {},
    "dyadic bsp collective:algorithm=hierarchical,per_host=1": {},
    "bags bsp hybrid:servers=all": {"eval_every": 2},
    "dyadic hogwild": {"workers": 1, "eval_every": 2},
    "dyadic hogbatch:batch=2 shared:mode=atomic": {"workers": 1},
    "dyadic asysvrg:lock=readwrite": {"workers": 1},
    "dyadic k-async:k=2": {},
    "plain bsp ps top-k:share=0.25": {},
}
"""Runs that are equal on the CPU and on the device: parameters bit for bit, and bytes sent."""

ANY_ORDER = {
    "dyadic lbfgs": {},
    "dyadic downpour": {},
    "dyadic ad-psgd": {"workers": 3, "eval_every": 2},
    "dyadic hogwild": {"workers": 3},
    "dyadic asysvrg": {"workers": 3},
}
"""Runs whose result depends on the order of messages."""

SPOILED = {"touching ssp ps": {"workers": 1}, "computing ssp ps": {"workers": 1}}
"""Runs of jobs that compute a gradient, or use the device, before their workers are forked. Later runs fail as well."""


def started(*arguments, tasks):
    """A process that carries out `tasks` (`train_programs`)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(HERE.parent), *sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *arguments, "accelerator.train_programs", json.dumps(tasks)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def lines(tasks):
    """What became of each task."""
    ran = started(tasks=tasks)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return list(map(json.loads, ran.stdout.splitlines()))


def outcomes(runs):
    """What runs have delivered, by name: on the CPU and on the device."""
    tasks = []
    for name, options in runs.items():
        job, _, strategy = name.partition(" ")
        tasks.append({"job": job, "strategy": strategy, **options})
    return dict(zip(runs, lines(tasks), strict=True))


@pytest.fixture(scope="module")
def delivered():
    return outcomes({**RUNS, **{f"{name} ": options for name, options in ANY_ORDER.items()}, **SPOILED})


def check_equal(both):
    cpu, device = both["cpu"], both["auto"]
    assert "error" not in device, device["error"]
    assert device["devices"][0].startswith(KIND)
    assert cpu["devices"] is None
    assert {**device, "devices": None} == cpu


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_device_equals_that_on_the_cpu(delivered, name):
    check_equal(delivered[name])


@pytest.mark.parametrize("name", ANY_ORDER)
def test_a_run_whose_order_is_open_does_the_same_work(delivered, name):
    cpu, device = delivered[f"{name} "]["cpu"], delivered[f"{name} "]["auto"]
    assert "error" not in device, device["error"]
    assert math.isfinite(device["loss"])
    assert abs(device["loss"] - cpu["loss"]) < 0.02
    if "asysvrg" not in name:
        assert device["updates_applied"] == cpu["updates_applied"]


SPOILS = "A job must not compute gradients or use a device before its workers are forked"


def test_a_gradient_before_the_fork_fails_with_the_reason_on_the_cpu_too(delivered):
    assert all(SPOILS in delivered["computing ssp ps"][device]["error"] for device in ("cpu", "auto"))


def test_a_device_that_was_used_before_the_fork_fails_with_the_reason_there(delivered):
    assert SPOILS in delivered["touching ssp ps"]["auto"]["error"]
    assert "error" not in delivered["touching ssp ps"]["cpu"]


# ---- the command


COMMANDS = {
    "auto": ["--workers", "3", "--strategy", "ssp ps", "--device", "auto", "--json"],
    "cpu": ["--on", "virtual", "--workers", "2", "--device", "cpu", "--json"],
    "left out": ["--on", "virtual", "--workers", "2", "--json"],
    "unknown": ["--device", "gpu"],
    "absent": ["--device", f"{KIND}:99"],
    "idle": ["--device", KIND, "--on", "virtual", "--timing-only"],
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """What became of each command, and of others on the run of the first."""
    folder = tmp_path_factory.mktemp("runs")
    tasks = {name: ["train", f"{JOBS}:dyadic", *options] for name, options in COMMANDS.items()}
    tasks["auto"] += ["--out", str(folder / "run")]
    tasks["elsewhere"] = ["train", f"{JOBS}:elsewhere"]
    tasks["report"] = ["report", str(folder / "run"), "--out", str(folder / "report.html")]
    several = ["--strategy", "ssp", "--strategy", "bsp", "--on", "virtual", "--report", str(folder / "several.html")]
    tasks["compare"] = ["compare", f"{JOBS}:dyadic", "--workers", "2", *several]
    return folder, dict(zip(tasks, lines(list(tasks.values())), strict=True))


def test_a_run_says_which_devices_it_uses(commands):
    folder, done = commands
    assert done["auto"]["status"] == 0, done["auto"]["err"]
    assert f"device=auto found {KIND}: 3 workers on {KIND}:0" in done["auto"]["err"]
    assert f"Devices                    {KIND}:0" in done["auto"]["err"]
    devices = json.loads(done["auto"]["out"])["devices"]
    assert [device.partition(":")[0] for device in devices] == [KIND] * 3
    assert json.loads((folder / "run" / "summary.json").read_text())["devices"] == devices
    assert done["report"]["status"] == 0
    assert "Devices" in (folder / "report.html").read_text()


IDLE = f"this machine has devices of kind {KIND}: --device auto uses them."


def test_a_run_on_the_cpu_names_the_accelerator_that_it_leaves_idle(commands):
    """Once, also where several runs are compared. A run that names the CPU says nothing of devices."""
    _, done = commands
    assert done["left out"]["err"].count(IDLE) == done["compare"]["err"].count(IDLE) == 1
    assert done["cpu"]["status"] == 0
    assert "device" not in done["cpu"]["err"].lower()
    assert "devices" not in json.loads(done["cpu"]["out"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown", f'device="gpu" was asked for, and PyTorch finds devices of kind {KIND} here. Write {KIND}, cpu'),
        ("absent", f'device="{KIND}:99" was asked for, and '),
        ("idle", f'timing_only computes no gradient, and device="{KIND}:0" was asked for'),
        ("elsewhere", f"its model() builds on {KIND}"),
    ],
)
def test_a_device_that_a_run_cannot_use_is_refused(commands, name, said):
    _, done = commands
    assert done[name]["status"] == 2
    assert said in done[name]["err"]


# ---- torchrun


def test_each_rank_of_torchrun_takes_the_device_of_its_local_rank(delivered):
    """Over servers and over collectives, one run after the other; with one device, both ranks share it."""
    if reason := target.absent(ranks=2):
        pytest.skip(reason)
    same = "dyadic bsp ps", "dyadic bsp collective"
    options = ["train", f"{JOBS}:dyadic", "--on", "torchrun", "--device", "auto", "--json", "--strategy"]
    launch = "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"
    done = started(*launch, tasks=[[*options, name.removeprefix("dyadic ")] for name in same])
    assert done.returncode == 0, done.stderr[-4000:]
    summaries = list(map(json.loads, done.stdout.splitlines()))
    for summary, name in zip(summaries, same, strict=True):
        assert [device.partition(":")[0] for device in summary["devices"]] == [KIND, KIND]
        assert summary["params_sha256"] == delivered[name]["cpu"]["params_sha256"]
    assert done.stderr.count(f"device=auto found {KIND}: 2 workers on {KIND}:0") == 2
