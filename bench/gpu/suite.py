"""The stand-in's test programs on CUDA (check 1), and trainings under PyTorch's CUDA sanitizer (check 2).

    python bench/gpu/suite.py [--only 1 2] [--json FILE]

`DURE_TEST_DEVICE=cuda` has the tests of `tests/accelerator` run on the GPU; those of the stand-in itself are skipped.
The sanitizer (`TORCH_CUDA_SANITIZER=1`) reports accesses of two streams to the same memory that no event orders. It
uses the device in every operation, also in those on the CPU, so that processes under it cannot be forked. Two ranks
train under it that are started afresh, on streams of their own. The sanitizer sees an event that the host waits for,
and not one that the host asks (`query`), as dure does: so each event that has come is waited for too, which takes no
time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import torch
from _check import ROOT, Finding, Setting, main, target
from _ranks import on_ranks
from _training import WithAttach
from torch.cuda._sanitizer import CUDASanitizerErrors, cuda_sanitizer

from dure.errors import PeerLost
from dure.runtime.process.transfers import DeviceMessage

SANITIZER = "TORCH_CUDA_SANITIZER"
STRATEGIES = ("bsp ps", "averaging:period=2 ps", "ssp:bound=3 ps", "bsp collective:algorithm=ring")
PROCESSES = min(11, (os.cpu_count() or 2) // 2)
"""Test files that run at the same time."""


def programs(setting: Setting) -> Iterator[Finding]:
    outcomes = run(setting)
    yield Finding("tests of tests/accelerator on cuda", _shown(outcomes), "none fails, one passes", _good(outcomes))


def run(setting: Setting) -> Counter[str]:
    """How many tests passed, failed and were skipped. A rehearsal only collects the tests."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "tests/accelerator", "-m", "not soak", f"--junit-xml={results}"]
        path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        beside = ["-n", str(PROCESSES), "--dist", "loadfile", "-p", "no:benchmark"]  # pytest-benchmark warns of `-n`
        command += ["--collect-only", "-q"] if setting.rehearse else beside
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
        return Counter(passed=done.stdout.count("::")) if setting.rehearse else outcomes_of(results)


def outcomes_of(results: Path) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcomes[kinds.pop() if kinds else "passed"] += 1
    return outcomes


def sanitized(setting: Setting) -> Iterator[Finding]:
    if not setting.rehearse:  # it needs a build for CUDA
        os.environ[SANITIZER] = "1"  # the ranks read it
    try:
        for strategy in STRATEGIES[:1] if setting.rehearse else STRATEGIES:
            reports = on_ranks(reports_of, setting, strategy, group=False)
            text = "; ".join(filter(None, reports))
            ended = reports.count("") == len(reports)
            measured = text or ("none" if ended else "a training that did not end, without a report")
            yield Finding(f"reports of the CUDA sanitizer, {strategy}", measured, "none", ended)
    finally:
        os.environ.pop(SANITIZER, None)


def reports_of(rank: int, setting: Setting, strategy: str) -> str | None:
    """The reports of a training on a stream of the rank's own; empty if it ends without one, None if the other fails.

    Raises `RuntimeError` without the sanitizer.
    """
    if not setting.rehearse and not cuda_sanitizer.enabled:
        raise RuntimeError(f"the sanitizer is off, though {SANITIZER} is {os.environ.get(SANITIZER)!r}")
    small = replace(setting, rehearse=True)  # the order of operations does not depend on the size of the model
    own = torch.Stream(target.of_rank(rank))
    own.wait_stream(torch.accelerator.current_stream())
    _wait_for_events_that_have_come()
    try:
        with own:
            arm = WithAttach(rank, small, strategy)
            arm.train(10)
            arm.replica.close()
    except CUDASanitizerErrors as error:
        return "; ".join(map(str, error.errors))
    except PeerLost:
        return None  # the other rank has the report
    return ""


def _wait_for_events_that_have_come() -> None:
    """Let the sanitizer know of each copy to pinned memory that the host has seen to be complete."""
    ask = DeviceMessage.may_leave

    def may_leave(message: DeviceMessage) -> bool:
        came = ask(message)
        if came and message.copied is not None:
            message.copied.synchronize()
        return came

    DeviceMessage.may_leave = may_leave  # type: ignore[method-assign]


def _shown(outcomes: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(outcomes.items()))


def _good(outcomes: Counter[str]) -> bool:
    return outcomes["passed"] > 0 and not outcomes["failure"] and not outcomes["error"]


CHECKS = {1: programs, 2: sanitized}

if __name__ == "__main__":
    main(__doc__, CHECKS)
