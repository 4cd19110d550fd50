"""Sharded data parallelism on the device, against bsp on the CPU (check 18).

    python bench/gpu/zero.py [--json FILE]

`dure train` runs two workers for 12 steps: `bsp` on the CPU, and each stage on the device. The parameters that the runs
deliver are compared. With one device, both workers are on it and Gloo carries their messages; with two, NCCL does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from _check import ROOT, Finding, Setting, main
from safetensors.torch import load_file

APART = 1e-5
PARTITIONS = ("zero:stage=1", "zero:stage=2", "zero:stage=3")
JOB = f"{Path(__file__).with_name('_digits.py')}:digits"


def sharded(setting: Setting) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        plain = trained("none", "cpu", Path(folder) / "plain")
        for partition in PARTITIONS[:: setting.size(1, 2)]:
            values = trained(partition, setting.device, Path(folder) / partition.replace(":", "-"))
            apart = max(float((values[name] - plain[name]).abs().max()) for name in plain)
            what = f"{partition}: parameters against bsp on the CPU"
            yield Finding(what, f"differ by at most {apart:.2g}", f"at most {APART:g}", apart <= APART)


def trained(partition: str, device: str, out: Path) -> dict[str, torch.Tensor]:
    """The weights that a run delivers, by name."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    train = ["train", JOB, "--partition", partition, "--workers", "2", "--optimizer", "adamw", "--steps", "12"]
    for command in ([*train, "--device", device, "--checkpoint-every", "12", "--out", str(out)], ["export", str(out)]):
        whole = [sys.executable, "-m", "dure", *command]
        done = subprocess.run(whole, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(whole)}\n{done.stderr[-3000:]}")
    return load_file(out / "model.safetensors")


CHECKS = {18: sharded}

if __name__ == "__main__":
    main(__doc__, CHECKS)
