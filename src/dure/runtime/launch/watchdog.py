"""Process groups of NCCL without the watchdog of PyTorch.

The watchdog is a thread of each group. A minute after it has found a lost rank, it ends this process, also if the
caller has dealt with the loss. Groups of dure do without it: the loop asks each operation whether it has ended or
failed, and the caller gets `PeerLost`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
"""The setting by which NCCL's backend starts no watchdog. It is read when a group is created."""


@contextmanager
def without_watchdog(device: torch.device) -> Iterator[None]:
    """While open, create groups without a watchdog for a rank on `device`. Groups of the user's own keep theirs."""
    if device.type != "cuda":
        yield
        return
    before = os.environ.get(BLOCKING_WAIT)
    os.environ[BLOCKING_WAIT] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[BLOCKING_WAIT]
        else:
            os.environ[BLOCKING_WAIT] = before
