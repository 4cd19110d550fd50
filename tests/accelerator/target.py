"""The device that the programs of this folder run on: the stand-in, or the one that `DURE_TEST_DEVICE` names (`cuda`).

A test asks `absent()` and skips with its answer. The process that it starts, and a job file that `dure train` loads,
calls `prepare()` and uses the device type that it returns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from accelerator import standin


def device_type() -> str:
    return os.environ.get("DURE_TEST_DEVICE", "standin")


def absent(ranks: int = 1) -> str:
    """Why no program for so many ranks can run here; empty if it can. NCCL wants a device for each rank."""
    if device_type() == "standin":
        build = [sys.executable, str(Path(__file__).parent / "build.py")]
        built = subprocess.run(build, capture_output=True, text=True, check=True)
        return built.stdout.strip() if "absent" in built.stdout else ""
    module = torch.get_device_module(device_type())
    if not module.is_available():
        return f"no {device_type().upper()} device: torch.{device_type()}.is_available() is False"
    count = module.device_count()
    return f"{ranks} ranks need {ranks} {device_type()} devices, and {count} are here" if count < ranks else ""


def prepare() -> str:
    """Registers the stand-in if it is the target; returns the device type.

    It does not ask whether a CUDA device is there: the question alone initializes the driver, after which the children
    of a fork could not use the device.
    """
    if device_type() == "standin":
        standin.register()
    return device_type()


def of_rank(rank: int) -> str:
    """The device of a rank: ranks take the devices in turn. The stand-in is one device."""
    if device_type() == "standin":
        return "standin"
    return f"{device_type()}:{rank % torch.get_device_module(device_type()).device_count()}"


def backend() -> str:
    """Of `init_process_group`: Gloo for tensors on the CPU, the device's own backend for its tensors."""
    return f"cpu:gloo,{device_type()}:{'standin_nccl' if device_type() == 'standin' else 'nccl'}"
