"""Shared by the checks on a GPU: the device, the lines they print, and ratios of alternating pairs.

A check is a function of a `Setting` that yields findings. A script hands its checks to `main`. Without a CUDA device
each check is skipped with the reason. `--device standin --rehearse` runs the same code on the stand-in of
`tests/accelerator`: sizes are small and no figure is printed, since there they mean nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests")]

from _script import median_interval, told  # noqa: E402
from accelerator import target  # noqa: E402

PAIRS = 15


class Unavailable(Exception):
    """A check cannot be made on this machine; the text is the reason."""


@dataclass(frozen=True)
class Setting:
    """Where and how a check is made."""

    device: str
    rehearse: bool
    pairs: int = PAIRS

    def size(self, measured: int, rehearsed: int) -> int:
        """A number that a rehearsal makes small."""
        return rehearsed if self.rehearse else measured


@dataclass(frozen=True)
class Finding:
    """A measured figure, the bar, and whether it was met. Without a bar (`met` is None) it is a report alone."""

    what: str
    measured: str
    bar: str
    met: bool | None


Check = Callable[[Setting], Iterable[Finding]]


# ---- ratios


@dataclass(frozen=True)
class Ratio:
    """The median of the pairs' ratios, with its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} (95 % interval {self.low:.3f} to {self.high:.3f})"

    @classmethod
    def of(cls, over: Iterable[float], under: Iterable[float]) -> Ratio:
        ratios = [one / other for one, other in zip(over, under, strict=True)]
        return cls(statistics.median(ratios), *median_interval(ratios))


def in_pairs(one: Callable[[], object], other: Callable[[], object], setting: Setting) -> Ratio:
    """Seconds of `one` over those of `other`; the order changes from pair to pair. Both are warmed up."""
    seconds: dict[Callable[[], object], list[float]] = {one: [], other: []}
    for work in (one, other, one, other):
        seconds_of(work)
    for pair in range(setting.pairs):
        for work in (one, other) if pair % 2 else (other, one):
            seconds[work].append(seconds_of(work))
    return Ratio.of(seconds[one], seconds[other])


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    torch.accelerator.synchronize()
    began = time.perf_counter()
    work()
    torch.accelerator.synchronize()
    return time.perf_counter() - began


# ---- devices and strict arithmetic


def need_devices(ranks: int) -> None:
    """Raise `Unavailable` where NCCL has no device for each rank."""
    if reason := target.absent(ranks):
        raise Unavailable(reason)


def exact_arithmetic() -> None:
    """TF32 off, and deterministic algorithms where there are some, because results are compared.

    Of the kernels of attention only the plain one ("math") has a backward that adds in a fixed order.
    """
    for precise in (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
        precise.fp32_precision = "ieee"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # it is read before the first product
    torch.backends.cudnn.benchmark = False
    for enable in (
        torch.backends.cuda.enable_flash_sdp,
        torch.backends.cuda.enable_mem_efficient_sdp,
        torch.backends.cuda.enable_cudnn_sdp,
    ):
        enable(False)
    torch.use_deterministic_algorithms(True, warn_only=True)


# ---- the command line


def main(
    description: str | None, checks: Mapping[int, Check], table: Callable[[Setting], Iterable[str]] | None = None
) -> None:
    """Make the checks that the command line names. `table` gives the lines of a table of counts.

    Counts, unlike seconds, mean something on the stand-in, too.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", choices=tuple(checks), default=tuple(checks))
    parser.add_argument("--pairs", type=int, default=PAIRS, help="alternating pairs of a ratio")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--rehearse", action="store_true", help=argparse.SUPPRESS)
    if table is not None:
        parser.add_argument("--table", action="store_true", help="print the counts as a table and nothing else")
    given = parser.parse_args()
    if given.device == "standin" and not given.rehearse and table is None:
        parser.error("figures of the stand-in mean nothing: give --rehearse as well")
    os.environ["DURE_TEST_DEVICE"] = given.device  # processes that a check starts read it
    setting = Setting(given.device, given.rehearse, 2 if given.rehearse else given.pairs)
    if table is not None and given.table:
        if reason := target.absent():
            raise SystemExit(reason)
        target.prepare()
        print("\n".join(table(setting)))
        return
    with told(Path(sys.argv[0]).stem, given) as facts:
        facts["device"] = _name(given.device)
        facts["checks"] = {number: made(number, checks[number], setting) for number in given.only}
    if not given.rehearse and any(row.get("met") is False for rows in facts["checks"].values() for row in rows):
        raise SystemExit(1)


def made(number: int, check: Check, setting: Setting) -> list[dict[str, object]]:
    """Make a check and print a line for each finding; the findings as plain values."""
    rows: list[dict[str, object]] = []
    try:
        need_devices(1)
        target.prepare()
        for finding in check(setting):
            if setting.rehearse:
                rows.append({"what": finding.what, "rehearsed": True, "met": finding.met})
                print(f"check {number}, {finding.what}: rehearsed", flush=True)
                continue
            rows.append(vars(finding))
            ending = "" if finding.met is None else f": {'met' if finding.met else 'missed'}"
            print(f"check {number}, {finding.what}: {finding.measured}; {finding.bar}{ending}", flush=True)
    except Unavailable as reason:
        rows.append({"skipped": str(reason)})
        print(f"check {number}: skipped, {reason}", flush=True)
    return rows


def _name(device: str) -> str:
    """The hardware, for the record of a result."""
    if device != "cuda" or not torch.cuda.is_available():
        return device
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}, NCCL {torch.cuda.nccl.version()}"
