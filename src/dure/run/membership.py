"""A worker's part in a group that is formed again: `generations` has the driver's.

    PeerLost or break_up -> leave the generation -> stopped -> connect -> catch up -> formed -> make the step again

The gradients of a step that was not made are gone, with the part of the failed member. The step is made again with the
mini-batches that were drawn for it. Workers that train alone keep their steps, and make their average again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from dure.core.state import State
from dure.errors import PeerLost
from dure.run.generations import GENERATIONS
from dure.runtime.process.formed_group import OPERATION_LIMIT, FormedGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dure.job.data.split import BatchSampler
    from dure.job.gradient import JobSource
    from dure.run.setup import Setup
    from dure.runtime.process.node import ProcessNode
    from dure.sync.worker_state import WorkerState


class Membership:
    """The generations of the group of one worker, which it forms through the engine's store at `place`.

    `fresh`: the worker does not have the model of the others yet.
    """

    def __init__(self, setup: Setup, node: ProcessNode) -> None:
        self.group = FormedGroup(node)
        self.fresh = False
        self.place: Sequence[Any] = ()
        self._setup, self._node = setup, node
        self._ahead = 0
        self._reason: str | None = None

    def begin(self, worker: WorkerState, *, fresh: bool) -> None:
        """Begin with a worker whose samples are those of its next step."""
        self.fresh = fresh
        self._ahead = _sampler_of(worker).number - worker.clock

    def lost(self, error: PeerLost) -> None:
        """Note that a collective has failed: the generation is over."""
        self._reason = str(error)
        self.group.end(self.group.number)

    async def enter(self, worker: WorkerState) -> None:
        """Be in a generation that is not over, with the model of the others."""
        while self.group.is_over:
            await self.group.dissolve()
            common = worker.clock if worker.last_sync is None else worker.last_sync
            said = {"steps": common, "clock": worker.clock, "fresh": self.fresh, "reason": self._reason}
            reply = await self._call("stopped", **said)
            self._reason = None
            try:
                await self.group.form(reply["generation"], reply["ranks"], self.place)
                if reply["source"] is not None:
                    await self._catch_up(worker, reply["source"])
            except PeerLost as error:
                self.lost(error)
                continue
            self._go_on(worker)
            self._node.call(GENERATIONS, "formed", generation=self.group.number)

    async def through(self) -> bool:
        """Wait until all members have come to the end of their work; False if the generation is over before."""
        if (await self._call("through"))["over"]:
            await self.group.dissolve()
            return True
        self.group.end(self.group.number)
        return False

    async def _call(self, method: str, **fields: Any) -> Mapping[str, Any]:
        """Call the driver, which may answer after a step of the slowest worker."""
        limit = OPERATION_LIMIT.total_seconds()
        return (await self._node.call(GENERATIONS, method, timeout=limit, **fields)).fields

    async def _catch_up(self, worker: WorkerState, source: int) -> None:
        """Take over the state of rank `source`, if it is ahead or this worker is fresh; samples stay the worker's own.

        All is received beside the old state: the source may fail before it has sent the last.
        """
        state = await self._broadcast(self._state(worker), source)
        plain, optimizer, kept = state.plain, state.part("optimizer"), state.part("kept")
        if (plain["clock"], plain["last_sync"]) == (worker.clock, worker.last_sync) and not self.fresh:
            return
        worker.params.copy_(state.tensors["params"])
        worker.optimizer.restore(optimizer)
        worker.kept, worker.kept_plain = kept.tensors, kept.plain
        worker.last_sync = plain["last_sync"]
        refused, in_a_row = worker.refusals, plain["refused"]
        if self.fresh:
            worker.set_clock(plain["clock"])
            self._ahead = plain["ahead"]
            worker.buffers = state.tensors.get("buffers")  # one that is behind keeps its own
        else:
            worker.clock = plain["clock"]  # its gradient is in the step of the others
            refused.total += in_a_row > refused.in_a_row
        refused.in_a_row = in_a_row
        worker.pausing = bool(in_a_row)
        self.fresh = False

    def _state(self, worker: WorkerState) -> State:
        """The state of a worker that another takes over."""
        tensors = {"params": worker.params, **({} if worker.buffers is None else {"buffers": worker.buffers})}
        plain = {"clock": worker.clock, "last_sync": worker.last_sync, "ahead": self._ahead}
        plain["refused"] = worker.refusals.in_a_row
        whole = State(tensors, plain) | worker.optimizer.state().under("optimizer")
        return whole | State(worker.kept, worker.kept_plain).under("kept")

    async def _broadcast(self, state: State, source: int) -> State:
        """Send the `state` of rank `source` to all, and return it."""
        mine = self._node.rank == source
        layout = {
            name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in state.tensors.items()
        }
        text = torch.frombuffer(bytearray(json.dumps([state.plain, layout]).encode()), dtype=torch.uint8)
        nbytes = await self.group.broadcast(torch.tensor([text.numel()], device="cpu"), source)
        text = await self.group.broadcast(text if mine else text.new_empty(int(nbytes)), source)
        plain, layout = json.loads(bytes(text.tolist()))
        tensors = {}
        for name, (dtype, shape) in layout.items():
            room = state.tensors[name] if mine else torch.empty(shape, dtype=getattr(torch, dtype))
            tensors[name] = await self.group.broadcast(room, source)
        return State(tensors, plain)

    def _go_on(self, worker: WorkerState) -> None:
        """Let the divisor follow the members, and the samples the worker's steps."""
        sizes, ranks = self._setup.batch_sizes, self.group.ranks
        total = sum(sizes[rank] for rank in ranks)
        worker.total_weight, worker.world_size = float(total), len(ranks)
        source = cast("JobSource", worker.source)
        source.share = source.batch_size / total
        # A step that is made again draws the same mini-batch, and a newcomer goes on at the step of the others.
        _sampler_of(worker).number = worker.clock + self._ahead
        worker.step_begun = False


def _sampler_of(worker: WorkerState) -> BatchSampler:
    source = cast("JobSource", worker.source)  # the only one of a run without stages and companions
    assert source.sampler is not None  # no run on processes is timing-only
    return source.sampler
