"""Real runs with replicas on a device equal those on the CPU, bit for bit where the order of updates is fixed."""

from __future__ import annotations

import json
import math

import pytest
from accelerator import target
from accelerator.train_tasks import JOBS, KIND, check_equal, check_same_on_both, outcomes, started, task
from support.shared_layers import pairs

pytestmark = [pytest.mark.xdist_group("accelerator"), pytest.mark.timeout(600), pytest.mark.usefixtures("device")]

RUNS = {
    "dyadic bsp ps": {},
    "dyadic ssp:bound=0 ps:shards=2": {},
    "dyadic bsp collective": {"eval_every": 2},
    "plain averaging:period=2 collective int8": {},
    "plain bsp collective:algorithm=ring": {},
    "dyadic bsp collective:algorithm=tree": {},
    "bags bsp hybrid:servers=all": {"eval_every": 2},
    "dyadic hogwild": {"workers": 1, "eval_every": 2},
    "sparse_bags hogwild": {"workers": 1},
    "dyadic asysvrg:lock=readwrite": {"workers": 1},
    "plain bsp ps top-k:share=0.25": {},
    "plain bsp collective 1bit": {},
    "plain bsp collective gpipe:stages=2,micro=2": {"eval_every": 2},
    "plain bsp collective pipedream:stages=2,remat=true": {"workers": 4},
    f"shared bsp collective {pairs(2)}": {},
}
"""Runs that are equal on the CPU and on the device: parameters bit for bit, and bytes sent."""

ANY_ORDER = {
    "dyadic lbfgs": {},
    "dyadic downpour": {},
    "dyadic ad-psgd": {"workers": 3, "eval_every": 2},
    "dyadic hogwild shared": {"workers": 3},
    "dyadic asysvrg": {"workers": 3},
}
"""Runs whose result depends on the order of messages."""

SPOILED = {"touching ssp ps": {"workers": 1}, "computing ssp ps": {"workers": 1}}
"""Runs of jobs that compute a gradient, or use the device, before their workers are forked. Later runs fail as well."""


MOVES = {
    "plain bsp ps top-k:share=0.25": ["cpu", "auto", "cpu", "auto"],
}
"""Runs that are resumed on other devices."""

LONG = 80 if KIND == "standin" else 1000
"""Steps of a run that a new process joins. A process takes seconds to begin on a GPU."""

KILLED = {
    "server 1": {"job": "slow", "strategy": "bsp ps:shards=2", "steps": 20, "at": 10, "checkpoint_every": 5},
    "worker 1": {"job": "slow", "strategy": "ssp ps", "steps": LONG, "at": 5, "again": True, "workers": 3},
}
"""Runs on the device in which this process is killed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def done(folder):
    """The results of all tasks of this file, which one process has carried out."""
    tasks = {("run", name): task(name, **options) for name, options in {**RUNS, **ANY_ORDER}.items()}
    for name, devices in MOVES.items():
        tasks["moved", name] = task(name, moves=devices, every=3)
        tasks["whole", name] = task(name, moves=["cpu"], every=3 * len(devices))
    for name, options in KILLED.items():
        tasks["killed", name] = {"killed": name, **options}
    tasks["run", "slow bsp ps:shards=2"] = task("slow bsp ps:shards=2", steps=20)
    tasks |= {("command", name): arguments for name, arguments in commands(folder).items()}
    return outcomes(tasks | {("run", name): task(name, **options) for name, options in SPOILED.items()})


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_a_device_equals_that_on_the_cpu(done, name):
    check_same_on_both(name, done["run", name])


@pytest.mark.parametrize("name", ANY_ORDER)
def test_a_run_whose_order_is_open_does_the_same_work(done, name):
    cpu, device = done["run", name]["cpu"], done["run", name]["auto"]
    assert "error" not in device, device["error"]
    assert math.isfinite(device["loss"])
    assert abs(device["loss"] - cpu["loss"]) < 0.02
    if "asysvrg" not in name:
        assert device["updates_applied"] == cpu["updates_applied"]


SPOILS = "A job must not compute gradients or use a device before its workers are forked"


def test_a_gradient_before_the_fork_fails_with_the_reason_on_the_cpu_too(done):
    assert all(SPOILS in done["run", "computing ssp ps"][device]["error"] for device in ("cpu", "auto"))


def test_a_device_that_was_used_before_the_fork_fails_with_the_reason_there(done):
    assert SPOILS in done["run", "touching ssp ps"]["auto"]["error"]
    assert "error" not in done["run", "touching ssp ps"]["cpu"]


# ---- checkpoints and crashes


@pytest.mark.parametrize("name", MOVES)
def test_a_run_goes_on_from_its_checkpoint_on_another_device(done, name):
    moved, whole = done["moved", name], done["whole", name]
    check_equal(name, moved, {**whole, "bytes_sent": moved["bytes_sent"]})
    assert (moved["devices"] is None) == (MOVES[name][-1] == "cpu")


def test_a_killed_server_goes_on_from_its_checkpoint_with_workers_on_a_device(done):
    assert done["killed", "server 1"]["failures_survived"] == 1
    assert done["killed", "server 1"]["params_sha256"] == done["run", "slow bsp ps:shards=2"]["cpu"]["params_sha256"]


def test_a_killed_worker_on_a_device_joins_again(done):
    killed = done["killed", "worker 1"]
    assert killed["failures_survived"] == 1
    assert killed["unfinished"] == []
    assert killed["updates_applied"] >= 2 * LONG


# ---- the command


COMMANDS = {
    "auto": ["--workers", "3", "--strategy", "ssp ps int8", "--device", "auto", "--json"],
    "cpu": ["--on", "virtual", "--workers", "2", "--device", "cpu", "--json"],
    "left out": ["--on", "virtual", "--workers", "2", "--json"],
    "unknown": ["--device", "gpu"],
    "absent": ["--device", f"{KIND}:99"],
    "idle": ["--device", KIND, "--on", "virtual", "--timing-only"],
}


def commands(folder):
    """The arguments of the commands above, and of others on the run of the first."""
    arguments = {name: ["train", f"{JOBS}:dyadic", *options] for name, options in COMMANDS.items()}
    arguments["auto"] += ["--out", str(folder / "run")]
    arguments["elsewhere"] = ["train", f"{JOBS}:elsewhere"]
    arguments["data elsewhere"] = ["train", f"{JOBS}:data_elsewhere"]
    arguments["report"] = ["report", str(folder / "run"), "--out", str(folder / "report.html")]
    several = ["--strategy", "ssp", "--strategy", "bsp", "--on", "virtual", "--report", str(folder / "several.html")]
    arguments["compare"] = ["compare", f"{JOBS}:dyadic", "--workers", "2", *several]
    return arguments


def test_a_run_says_which_devices_it_uses(done, folder):
    auto = done["command", "auto"]
    assert auto["status"] == 0, auto["err"]
    assert f"device=auto found {KIND}: 3 workers on {KIND}:0" in auto["err"]
    assert f"Devices                    {KIND}:0" in auto["err"]
    summary = json.loads(auto["out"])
    devices = summary["devices"]
    assert [device.partition(":")[0] for device in devices] == [KIND] * 3
    assert json.loads((folder / "run" / "summary.json").read_text())["devices"] == devices
    assert summary["payoff"] == {}  # the cost of the codec on the device is not known
    assert done["command", "report"]["status"] == 0
    assert "Devices" in (folder / "report.html").read_text()


IDLE = f"this machine has devices of kind {KIND}: --device auto uses them."


def test_a_run_on_the_cpu_names_the_accelerator_that_it_leaves_idle(done):
    """Once, also where several runs are compared. A run that names the CPU says nothing of devices."""
    assert all(done["command", name]["err"].count(IDLE) == 1 for name in ("left out", "compare"))
    cpu = done["command", "cpu"]
    assert cpu["status"] == 0
    assert "device" not in cpu["err"].lower()
    assert "devices" not in json.loads(cpu["out"])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unknown", f'device="gpu" was asked for, and PyTorch finds devices of kind {KIND} here. Write {KIND}, cpu'),
        ("absent", f'device="{KIND}:99" was asked for, and '),
        ("idle", f'timing_only computes no gradient, and device="{KIND}:0" was asked for'),
        ("elsewhere", f"its model() builds on {KIND}"),
        ("data elsewhere", f"its samples lie on {KIND}"),
    ],
)
def test_a_device_that_a_run_cannot_use_is_refused(done, name, said):
    assert done["command", name]["status"] == 2
    assert said in done["command", name]["err"]


# ---- torchrun


@pytest.mark.soak
def test_each_rank_of_torchrun_takes_the_device_of_its_local_rank(done):
    """Over servers and over collectives, one run after the other; with one device, both ranks share it."""
    if reason := target.absent(ranks=2):
        pytest.skip(reason)
    same = "dyadic bsp ps", "dyadic bsp collective"
    options = ["train", f"{JOBS}:dyadic", "--on", "torchrun", "--device", "auto", "--json", "--strategy"]
    launch = "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"
    ran = started(*launch, tasks=[[*options, name.removeprefix("dyadic ")] for name in same])
    assert ran.returncode == 0, ran.stderr[-4000:]
    summaries = list(map(json.loads, ran.stdout.splitlines()))
    for summary, name in zip(summaries, same, strict=True):
        assert [device.partition(":")[0] for device in summary["devices"]] == [KIND, KIND]
        assert summary["params_sha256"] == done["run", name]["cpu"]["params_sha256"]
    assert ran.stderr.count(f"device=auto found {KIND}: 2 workers on {KIND}:0") == 2
