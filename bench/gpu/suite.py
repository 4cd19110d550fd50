"""The stand-in's test programs on CUDA (check 1), and again under PyTorch's CUDA sanitizer (check 2).

    python bench/gpu/suite.py [--only 1 2] [--json FILE]

`DURE_TEST_DEVICE=cuda` has the tests of `tests/accelerator` run on the GPU; those of the stand-in itself are skipped.
The sanitizer (`TORCH_CUDA_SANITIZER=1`) reports accesses of two streams to the same memory that no event orders.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from _check import ROOT, Finding, Setting, main

SANITIZER = "TORCH_CUDA_SANITIZER"
REPORT = "CSAN detected"
"""Text in each message of the sanitizer."""


def programs(setting: Setting) -> Iterator[Finding]:
    outcomes, _ = run({}, setting)
    yield Finding("tests of tests/accelerator on cuda", _shown(outcomes), "none fails, one passes", _good(outcomes))


def sanitized(setting: Setting) -> Iterator[Finding]:
    outcomes, output = run({} if setting.rehearse else {SANITIZER: "1"}, setting)  # it needs a build for CUDA
    reports = output.count(REPORT)
    measured = f"{reports} reports; {_shown(outcomes)}"
    met = reports == 0 and _good(outcomes)
    yield Finding("the same tests under the CUDA sanitizer", measured, "no report, none fails", met)


def run(environment: dict[str, str], setting: Setting) -> tuple[Counter[str], str]:
    """How many tests passed, failed and were skipped, and all output. A rehearsal only collects the tests."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "tests/accelerator", "-rA", f"--junit-xml={results}"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **environment}
        command += ["--collect-only", "-q"] if setting.rehearse else []
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        output = done.stdout + done.stderr
        return Counter(passed=output.count("::")) if setting.rehearse else outcomes_of(results), output


def outcomes_of(results: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[kinds.pop() if kinds else "passed"] += 1
    return outcomes


def _shown(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))


def _good(outcomes: Counter[str]) -> bool:
    return outcomes["passed"] > 0 and not outcomes["failure"] and not outcomes["error"]


CHECKS = {1: programs, 2: sanitized}

if __name__ == "__main__":
    main(__doc__, CHECKS)
