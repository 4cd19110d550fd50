"""The worker, as the author of a method sees it: its gradients, its model, its clock, and its sessions with others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dure.core.node import Ghost
from dure.errors import UsageError
from dure.sync.worker_state import WorkerState, examined_mean

if TYPE_CHECKING:
    import torch

    from dure.core.node import Node
    from dure.topology.collective.topology import GroupSession
    from dure.topology.gossip.topology import Peer
    from dure.topology.parameter_server.session import ServerSession
    from dure.topology.shared_memory.topology import MemorySession


@dataclass(slots=True)
class Worker:
    """One worker of a run: what `work(worker)` of a method uses, in virtual time and on processes alike.

    | member                        |                                                                              |
    |-------------------------------|------------------------------------------------------------------------------|
    | `gradient()`                  | the mean gradient of the next mini-batch, flat; the work may end here        |
    | `mean_gradient()`             | the same, averaged over the group                                            |
    | `begin_step()`                | passes the step boundary before the gradient, for work in between            |
    | `step(gradient)`              | one step of the local optimizer                                              |
    | `params`                      | the flat model; to be read and written, except while a gradient is pending   |
    | `clock`                       | the mini-batches done, those before a newcomer joined included               |
    | `keep(name)`, `kept_plain`    | a vector, and plain values, that a restart restores                          |
    | `server`                      | pulls, pushes and admission (`ps`; `shared` without parameters)              |
    | `group`                       | means over all workers (`collective`)                                        |
    | `peer`                        | averages with neighbors (`gossip`)                                           |
    | `memory`                      | reads and writes of the shared model (`shared`)                              |
    | `session(offer)`              | the session of a topology of a user's own                                    |
    | `over_servers`                | whether the run has servers                                                  |
    | `heartbeat()`                 | tells the servers that this worker is alive, in a long time without a push   |
    | `rank`, `world_size`          | this worker's place among all                                                |
    | `progress`                    | the completed share of the run                                               |
    | `node`                        | where it runs: sleeps, seconds, messages to other nodes                      |
    | `state`                       | all else, which its run, sessions and source keep; seldom needed             |

    A restart restores `params`, `clock`, the optimizer, what `keep` returns and `kept_plain` (values that JSON has),
    but no local variable of the method.
    """

    state: WorkerState

    # ---- gradients and steps

    async def begin_step(self) -> None:
        """Pass the step boundary, where the work may end or be suspended, and begin the next step.

        `gradient` passes the boundary itself. A method that does something before its gradient calls this first.
        """
        state = self.state
        await state.boundary.stop(state)
        state.step_begun = True

    async def gradient(self) -> torch.Tensor:
        """Compute the mean gradient of the next mini-batch at `params`: flat, and the caller may write to it.

        A gradient that holds NaN or infinity is refused: the caller gets zeros.
        """
        state = self.state
        await state.boundary.stop(state)
        started = state.node.now()
        gradient = await state.source.gradient(state)
        if state.source.whole:
            state.meter.add("compute", started, state.node.now())
        return state.finish_step(gradient)

    async def mean_gradient(self) -> torch.Tensor:
        """Compute a gradient as `gradient` does, and average it over the group, weighted by batch sizes."""
        state = self.state
        await state.boundary.stop(state)
        if state.sessions.rows is not None:
            return state.finish_step(await state.sessions.rows.mean_gradient(state.data.next(state)))
        if state.refusals.in_a_row and not state.group.encodes and state.sessions.sharded is None:
            # The last mean was refused. This one says whose gradient is at fault, for one more message.
            mean = await examined_mean(await state.source.gradient(state), state.share, state.group)
        else:
            mean = await state.source.mean_gradient(state)
        return state.finish_step(mean, shared=True)

    def step(self, gradient: torch.Tensor) -> None:
        """Make one step of the local optimizer, in place."""
        state = self.state
        if state.is_skipped(gradient):
            return
        if not isinstance(state.params, Ghost):
            state.optimizer.apply(state.params, gradient, state.params, lr=state.lr)
        if state.sessions.sharded is not None:
            state.sessions.sharded.begin_gather(state.params)

    # ---- its model, and what a restart restores beside it

    @property
    def params(self) -> torch.Tensor:
        """The flat vector of the replica's parameters."""
        return self.state.params

    @params.setter
    def params(self, values: torch.Tensor) -> None:
        self.state.params = values

    @property
    def clock(self) -> int:
        """The mini-batches done. A new worker begins at the clock of the others."""
        return self.state.clock

    def keep(self, name: str) -> torch.Tensor:
        """Return the declared state of that name: a tensor like `params`, zeros at first, which a restart restores."""
        state = self.state
        if name not in state.kept:
            state.kept[name] = state.params.clone().zero_()
        return state.kept[name]

    @property
    def kept_plain(self) -> dict[str, Any]:
        """Declared state of plain values, which JSON has."""
        return self.state.kept_plain

    # ---- its sessions with others

    @property
    def server(self) -> ServerSession:
        """The session with servers or a clock: pulls and pushes. `over_servers`: whether the run has one."""
        return self.state.server

    @property
    def group(self) -> GroupSession:
        """The session with the group of all workers: means."""
        return self.state.group

    @property
    def peer(self) -> Peer:
        """The session with the neighbors in gossip: averagings."""
        return self.state.peer

    @property
    def memory(self) -> MemorySession:
        """The session with the model in shared memory: reads and writes."""
        return self.state.memory

    def session(self, offer: str) -> Any:
        """The session that a topology of a user's own has for an `offer` of its own."""
        return self.state.session(offer)

    @property
    def over_servers(self) -> bool:
        """Whether the run has servers."""
        return self.state.sessions.server is not None

    def heartbeat(self) -> None:
        """Send a heartbeat, so that a long time without a push is not taken for a failure."""
        if self.state.sessions.server is not None:
            self.state.sessions.server.heartbeat()

    # ---- its place in the run

    @property
    def rank(self) -> int:
        """The number of this worker among those that hold the same part of the model."""
        return self.state.rank

    @property
    def world_size(self) -> int:
        """The number of workers that hold the same part of the model."""
        return self.state.world_size

    @property
    def progress(self) -> float:
        """The completed share of the run at this worker, from 0 to 1, by its steps or its seconds."""
        boundary = self.state.boundary
        steps, seconds = boundary.steps, boundary.seconds
        if steps is None and seconds is None:
            raise UsageError(
                "this loop states neither steps nor seconds, so its progress is unknown: leave out parameters that are "
                "a share of the run, such as warm_start."
            )
        return max(boundary.step(self.clock) / steps if steps else 0.0, self.node.now() / seconds if seconds else 0.0)

    @property
    def node(self) -> Node:
        """The node that the worker runs on."""
        return self.state.node
