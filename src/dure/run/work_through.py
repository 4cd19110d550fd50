"""Runs a method at one worker, from its first step to its last."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.core.node import EndOfWork
from dure.errors import Evicted
from dure.sync import membership
from dure.sync.worker import Worker

if TYPE_CHECKING:
    from dure.sync.base import Sync


async def work_through(sync: Sync, worker: Worker, period: int = 1) -> None:
    """Run the method to the end of its work. A worker that was evicted joins the others again."""
    while True:
        try:
            await sync.work(worker)
        except EndOfWork:
            return
        except Evicted:
            await membership.rejoin(worker, period)
        else:
            return
