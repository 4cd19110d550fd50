"""The device that the programs of this folder run on: the stand-in, or the one that `DURE_TEST_DEVICE` names (`cuda`).

A test asks `absent()` and skips with its answer. The process that it starts, and a job file that `dure train` loads,
calls `prepare()` and uses the device type that it returns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerator import standin

ROUNDING = 0.0 if os.environ.get("DURE_TEST_DEVICE", "standin") == "standin" else 1e-5
"""Difference of trained values from the CPU's. The stand-in has the CPU's kernels; others add in another order."""

SYNCHRONIZING = "called a synchronizing CUDA operation"
"""The text of CUDA's report."""


def device_type() -> str:
    return os.environ.get("DURE_TEST_DEVICE", "standin")


def absent(ranks: int = 1) -> str:
    """Why no program for so many ranks can run here; empty if it can. NCCL wants a device for each rank.

    Devices are counted without the driver, so that a process may ask before it forks.
    """
    if device_type() == "standin":
        build = [sys.executable, str(Path(__file__).parent / "build.py")]
        built = subprocess.run(build, capture_output=True, text=True, check=True)
        return built.stdout.strip() if "absent" in built.stdout else ""
    count = torch.get_device_module(device_type()).device_count()
    if count == 0:
        return f"no {device_type().upper()} device: torch.{device_type()}.is_available() is False"
    return f"{ranks} ranks need {ranks} {device_type()} devices, and {count} are here" if count < ranks else ""


def prepare() -> str:
    """Registers the stand-in if it is the target; returns the device type.

    It does not ask whether a CUDA device is there: the question alone initializes the driver, after which the children
    of a fork could not use the device.
    """
    if device_type() == "standin":
        standin.register()
    return device_type()


def results(programs: str, *names: str, ranks: int = 1) -> list[Any]:
    """The values that the `programs` print, a line of JSON each, in a process of their own.

    Skips the test where no program for so many `ranks` can run.
    """
    import pytest  # the programs themselves do without it

    if reason := absent(ranks):
        pytest.skip(reason)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"accelerator.{programs}", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(map(json.loads, done.stdout.splitlines()))


def skip_without_counts() -> None:
    """Skips the test where the device does not count how often the host waits."""
    import pytest

    if device_type() != "standin":
        pytest.skip(f"{device_type()} does not count how often the host waits")


def of_rank(rank: int) -> str:
    """The device of a rank: ranks take the devices in turn. The stand-in is one device."""
    if device_type() == "standin":
        return "standin"
    return f"{device_type()}:{rank % torch.get_device_module(device_type()).device_count()}"


def backend() -> str:
    """Of `init_process_group`: Gloo for tensors on the CPU, the device's own backend for its tensors."""
    return f"cpu:gloo,{device_type()}:{'standin_nccl' if device_type() == 'standin' else 'nccl'}"


@contextmanager
def synchronizations() -> Iterator[Counter[str]]:
    """Counts how often the host waits for the device in the body, by place if it is known.

    CUDA reports operators that wait; waits for an event, a stream or the device are not among them.
    """
    found: Counter[str] = Counter()
    if device_type() == "standin":
        before = torch.standin.synchronizations()
        yield found
        if count := torch.standin.synchronizations() - before:
            found["stand-in"] = count
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.update(f"{each.filename}:{each.lineno}" for each in caught if SYNCHRONIZING in str(each.message))
