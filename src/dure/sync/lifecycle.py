"""The lifecycle of a worker: entry into a run, return after an eviction, leave, and the state in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dure.codec.coder import restore as restore_coders
from dure.codec.coder import states
from dure.core.node import Ghost
from dure.core.state import State, under_prefix, with_prefix
from dure.topology.collective.compressed import CompressedGroup
from dure.topology.replica import Pulled

if TYPE_CHECKING:
    from dure.sync.worker_state import WorkerState


async def join(worker: WorkerState, *, newcomer: bool, period: int = 1, steps: int | None = None) -> None:
    """Enter the servers' clock, each tick of which is `period` mini-batches, and the neighbors of a gossip.

    A newcomer begins at the clock of the last synchronization if the other workers sent it with their figures;
    otherwise at the clock of the slowest worker, and in gossip at the clock of a neighbor. Where no worker waits for
    another, it goes on after the `steps` of the worker that it replaces, if it replaces one.
    """
    sessions = worker.sessions
    if sessions.peer is not None and newcomer:
        clock = await sessions.peer.join() or 0
        worker.clock = worker.joined_at = worker.given = clock if steps is None else steps
    if sessions.server is None:
        return
    joined = await sessions.server.join()
    if not newcomer:
        return  # the workers of the start begin together, at clock 0
    worker.stats = sessions.server.client.stats
    ends_alone = (
        worker.boundary.alone and not worker.stats
    )  # no worker has ended yet, so this one works like the others
    begun = (steps or 0) if ends_alone or joined.clock is None else joined.clock * period
    synchronized = min((stats["clock"] for stats in worker.stats), default=begun)
    worker.clock = worker.joined_at = worker.given = int(synchronized)
    if ends_alone:
        return
    if sessions.memory is None:  # a model in shared memory needs no pull
        await sessions.server.pull()


async def rejoin(worker: WorkerState, period: int = 1) -> None:
    """Join again after an eviction, as a newcomer; the steps so far stay counted."""
    done = worker.clock - worker.joined_at
    worker.asking = False  # the eviction ended the wait for admission
    if worker.boundary.leased is not None:
        worker.boundary.leased.drop()
    await join(worker, newcomer=True, period=period, steps=worker.clock)
    worker.joined_at = worker.clock - done


async def leave(worker: WorkerState, *, finished: bool = True) -> None:
    """Leave the servers' clock and the neighbors, so that no other worker waits for this one.

    `finished`: the work is done.
    """
    if worker.sessions.server is not None:
        await worker.sessions.server.leave(finished=finished)
    if worker.sessions.peer is not None:
        await worker.sessions.peer.leave()


# ---- checkpoints


def state(worker: WorkerState) -> State:
    """Return all declared state of a worker, its optimizer, its source and its sessions."""
    server, peer = worker.sessions.server, worker.sessions.peer
    tensors = {"params": worker.params, **({} if worker.buffers is None else {"buffers": worker.buffers})}
    plain = {
        "clock": worker.clock,
        "entered": worker.joined_at,
        "given": worker.given,
        "refused": [worker.refusals.total, worker.refusals.in_a_row],
        "source": worker.source.state(),
        "versions": worker.versions,
        "lr": worker.lr,
        "client": None if server is None else server.client.state(),
        "peer": None if peer is None else peer.state(),
    }
    whole = State(tensors, plain) | State(worker.kept, worker.kept_plain).under("kept")
    whole |= worker.optimizer.state().under("optimizer") | state_of_codec(worker)
    for offer, session in worker.sessions.own.items():
        whole |= session.state().under(f"own {offer}")
    # A run in which only time counts has no values, and its checkpoint has the plain state alone.
    return State({name: tensor for name, tensor in whole.tensors.items() if not isinstance(tensor, Ghost)}, whole.plain)


def state_of_codec(worker: WorkerState) -> State:
    """Return what the codec of a worker remembers: the errors of its last messages."""
    server, group = worker.sessions.server, worker.sessions.members
    coded = State() if server is None else State(states(server.client.coders))
    if isinstance(group, CompressedGroup):
        coded = group.state()
    return State(with_prefix("coded.", coded.tensors), coded.plain)


def restore(worker: WorkerState, state: State) -> None:
    """Set a worker to the state of a checkpoint."""
    if not isinstance(worker.params, Ghost):
        state = state.to(worker.params.device)
        params = state.tensors["params"]
        if params.shape != worker.params.shape:
            raise ValueError(f"{params.numel()} parameters in place of {worker.params.numel()}")
        worker.params = params.clone()
    tensors, plain = state.tensors, state.plain
    worker.buffers = tensors["buffers"].clone() if "buffers" in tensors else None
    kept = state.part("kept").cloned()
    worker.kept, worker.kept_plain = kept.tensors, kept.plain
    worker.optimizer.restore(state.part("optimizer"))
    worker.source.restore(plain["source"])
    worker.clock, worker.joined_at, worker.given = (int(plain[name]) for name in ("clock", "entered", "given"))
    worker.refusals.total, worker.refusals.in_a_row = plain.get("refused", (0, 0))
    worker.lr = plain.get("lr")  # of gradients that are not pushed yet
    for offer, session in worker.sessions.own.items():
        session.restore(state.part(f"own {offer}"))
    if worker.sessions.server is not None:
        worker.sessions.server.client.restore(plain["client"])
    if worker.sessions.peer is not None:
        worker.sessions.peer.restore(plain["peer"])
    restore_codec(worker, state)
    # The next push names the versions that its gradient was computed on, also where no pull comes before it.
    if plain["versions"] is not None:
        worker.storage.pulled = Pulled(worker.params, list(plain["versions"]))


def restore_codec(worker: WorkerState, state: State) -> None:
    """Set what the codec of a worker remembers to its `state_of_codec`, which may be part of a larger state."""
    server, group = worker.sessions.server, worker.sessions.members
    coded = State(under_prefix("coded.", state.tensors), state.plain)
    if isinstance(group, CompressedGroup):
        group.restore(coded)
    elif server is not None:
        restore_coders(server.client.coders, coded.tensors)
