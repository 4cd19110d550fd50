"""Pinned memory does not grow during training (check 11).

    python bench/gpu/pinned_memory.py [--json FILE]

One rank trains with a server. The pinned bytes of the process after 10 steps and after 1,000 more must be equal.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from _check import Finding, Setting, main
from _ranks import on_ranks
from _training import WithAttach

RATE = 0.01
"""By a rate of 0.1 some trainings diverge, in plain PyTorch too."""


def pinned_memory(setting: Setting) -> Iterator[Finding]:
    steps = setting.size(1000, 5)
    [(before, after)] = on_ranks(train, setting, steps, ranks=1, group=False)
    what = f"pinned bytes of a rank after 10 steps, and after {steps} more"
    yield Finding(what, f"{before}, {after}", "must be equal, and above 0", before == after > 0)


def train(rank: int, setting: Setting, steps: int) -> tuple[int, int]:
    arm = WithAttach(rank, setting, "ssp:bound=3 ps", lr=RATE)
    arm.train(10)
    before = pinned_bytes(setting)
    arm.train(steps)
    after = pinned_bytes(setting)
    arm.replica.close()
    return before, after


def pinned_bytes(setting: Setting) -> int:
    if setting.device == "standin":
        return int(torch.standin.pinned_bytes())
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"])


CHECKS = {11: pinned_memory}

if __name__ == "__main__":
    main(__doc__, CHECKS)
