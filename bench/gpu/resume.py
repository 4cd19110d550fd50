"""A run is resumed on the device from a checkpoint of the CPU, and on the CPU from one of the device (check 15).

    python bench/gpu/resume.py [--json FILE]

`dure train` runs 30 steps on the CPU. A second run ends after 10 steps on the CPU, 20 on the device and 30 on
the CPU; each part is resumed from the last checkpoint of the one before. The parameters in the last checkpoints are
compared, under methods and codecs with state.
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
STRATEGIES = ("bsp ps 1bit", "bsp collective:algorithm=ring top-k:share=0.1", "bmuf:period=5")
JOB = f"{Path(__file__).with_name('_digits.py')}:digits"


def resume(setting: Setting) -> Iterator[Finding]:
    for strategy in STRATEGIES[:1] if setting.rehearse else STRATEGIES:
        with tempfile.TemporaryDirectory() as folder:
            whole, parts = Path(folder) / "whole", Path(folder) / "parts"
            train(strategy, "cpu", 30, "--out", str(whole))
            train(strategy, "cpu", 10, "--out", str(parts))
            train("", setting.device, 20, "--resume", str(parts))
            train("", "cpu", 30, "--resume", str(parts))
            apart = float((params(whole) - params(parts)).abs().max())
        what = f"{strategy}: parameters after CPU, device, CPU against the CPU alone"
        yield Finding(what, f"differ by at most {apart:.2g}", f"at most {APART:g}", apart <= APART)


def train(strategy: str, device: str, steps: int, *more: str) -> None:
    given = [JOB, "--strategy", strategy, "--workers", "2", "--optimizer", "momentum"] if strategy else []
    command = [sys.executable, "-m", "dure", "train", *given, "--device", device, "--steps", str(steps), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--checkpoint-every", "4"], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-3000:]}")


def params(run: Path) -> torch.Tensor:
    """The parameters of worker 0 in the last checkpoint."""
    last = max((run / "checkpoints").glob("*/worker-0.safetensors"), key=lambda path: path.stat().st_mtime)
    return load_file(last)["params"]


CHECKS = {15: resume}

if __name__ == "__main__":
    main(__doc__, CHECKS)
