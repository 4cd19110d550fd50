"""A rank that is killed or stopped is reported by the other one within the time limit (check 14).

    python bench/gpu/lost_rank.py [--json FILE]

Two ranks train with `frozen_after=6`. After a few steps rank 1 sends itself SIGKILL or SIGSTOP; rank 0 must raise
`PeerLost` within these seconds and three more, also while the device executes a collective. Rank 0 must then live for
longer than the minute after which NCCL's watchdog would end it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _check import Finding, Setting, main
from _ranks import on_ranks
from _training import WithAttach

from dure.errors import PeerLost

FROZEN_AFTER, REACTION = 6.0, 3.0
WATCHDOG = 75.0
"""Seconds after which a watchdog would have ended the process."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def lost_rank(setting: Setting) -> Iterator[Finding]:
    yield from _told("bsp collective:algorithm=ring", setting)
    yield from _told("bsp", setting)  # by NCCL; by Gloo if both ranks are on one device


def _told(strategy: str, setting: Setting) -> Iterator[Finding]:
    limit = FROZEN_AFTER + REACTION
    for each in SIGNALS[:1] if setting.rehearse else SIGNALS:
        with tempfile.TemporaryDirectory() as folder:
            seconds = on_ranks(train, setting, strategy, each, Path(folder) / "sent", group=False, lost=(1,))[0]
        what = f"seconds from {each.name} at rank 1 to PeerLost at rank 0, {strategy}"
        yield Finding(what, f"{seconds:.1f}", f"at most {limit:g}", seconds <= limit)


def train(rank: int, setting: Setting, strategy: str, number: signal.Signals, sent: Path) -> float:
    arm = WithAttach(rank, setting, strategy, frozen_after=FROZEN_AFTER)
    arm.train(3)
    if rank == 1:
        sent.write_text(str(time.time()))
        os.kill(os.getpid(), number)
    try:
        arm.train(10**6)
    except PeerLost:
        seconds = time.time() - float(sent.read_text())
        time.sleep(0 if setting.rehearse else WATCHDOG)
        return seconds
    raise AssertionError("rank 0 went on alone")


CHECKS = {14: lost_rank}

if __name__ == "__main__":
    main(__doc__, CHECKS)
