"""Entry of a worker into a run, its return after an eviction, and its leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.sync.worker import Worker


async def join(worker: Worker, *, newcomer: bool, period: int = 1) -> None:
    """Enter the servers' clock, each tick of which is `period` mini-batches, and the neighbors of a gossip.

    A newcomer begins at the clock of the last synchronization if the other workers sent it with their figures;
    otherwise at the clock of the slowest worker, and in gossip at the clock of a neighbor.
    """
    sessions = worker.sessions
    if sessions.peer is not None and newcomer:
        worker.clock = worker.joined_at = worker.given = await sessions.peer.join() or 0
    if sessions.server is None:
        return
    joined = await sessions.server.join()
    if not newcomer:
        return
    worker.stats = sessions.server.client.clock.stats
    if worker.boundary.alone and not worker.stats:
        return  # no worker has ended yet, so this one works like the others, from its own clock
    synchronized = min((stats["clock"] for stats in worker.stats), default=joined.clock * period)
    worker.clock = worker.joined_at = worker.given = int(synchronized)
    if sessions.memory is None:
        await sessions.server.pull()


async def rejoin(worker: Worker, period: int = 1) -> None:
    """Join again after an eviction, as a newcomer; the steps so far stay counted."""
    done = worker.clock - worker.joined_at
    worker.asking = False
    await join(worker, newcomer=True, period=period)
    worker.joined_at = worker.clock - done


async def leave(worker: Worker) -> None:
    """Leave the servers' clock and the neighbors, so that no other worker waits for this one."""
    if worker.sessions.server is not None:
        await worker.sessions.server.leave()
    if worker.sessions.peer is not None:
        await worker.sessions.peer.leave()
