"""A method's use of parameter servers: `worker.server`."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

from dure.core.node import Operation, nothing
from dure.errors import CallTimeout, Evicted, Superseded
from dure.topology.parameter_server.versions import skew

if TYPE_CHECKING:
    import torch

    from dure.core.node import Reply
    from dure.job.gradient import Gradient
    from dure.topology.parameter_server.client import Joined, ServerClient
    from dure.topology.replica import Pulled, Stats, WorkerReplica


class ServerSession:
    """Pushes and pulls of one worker, with the seconds that they take on its meter.

    `client` makes the calls. A `pull` without `lend` gives parameters that the method may write to; with `lend` they
    may be the server's own, not copied, and are for reading only.
    """

    def __init__(self, worker: WorkerReplica, client: ServerClient) -> None:
        self.client = client
        self._worker = worker
        self._admitted: int | None = None
        self._watch: Operation[Reply] | None = None
        self._beside: dict[str, Operation[Any]] = {}

    @property
    def slowest(self) -> int:
        """The slowest clock at the last admission: all updates of earlier clocks are in the version that it named."""
        return self.client.slowest

    # ---- joining and leaving

    async def join(self) -> Joined:
        """Enter the servers' clock under a new incarnation; operations under way are dropped."""
        self._admitted = self._watch = None
        self._beside.clear()
        return await self.client.join()

    async def leave(self, *, finished: bool = True) -> None:
        """Leave the servers' clock, so that no worker waits for this one. `finished`: its work is done."""
        await self.client.leave(finished=finished)

    async def settled(self) -> None:
        """Wait until no pull or push is under way."""
        while self._beside:
            await self._beside.popitem()[1]

    def heartbeat(self) -> None:
        """Send a heartbeat, so that a long time without a push is not taken for a failure."""
        self.client.heartbeat()

    # ---- admission

    async def admission(self) -> int:
        """Wait until the clock lets this worker start its next step; the version that it starts on."""
        worker = self._worker
        worker.wait_for_admission()
        started = worker.node.now()
        try:
            version = await self.client.ask()
        finally:
            worker.asking = False
        self._admitted = version if self.client.servers.ordered else None
        worker.stats = self.client.stats
        worker.meter.add("wait", started, worker.node.now())
        return version

    async def next_version(self, *, lend: bool = False) -> int:
        """`admission` and then `pull(lend=lend)`, in one call where one server has the clock too; the version."""
        if self.client.servers.clocked is None:
            version = await self.admission()
            await self.pull(lend=lend)
            return version
        worker = self._worker
        worker.wait_for_admission()
        started = worker.node.now()
        room = self._room_unless_lent() if lend else worker.room()
        try:
            pulled = await self.client.next_version(room)
        finally:
            worker.asking = False
        admitted = started + self.client.held
        worker.meter.add("wait", started, admitted)
        worker.meter.add("communicate", admitted, worker.node.now(), "pull")
        return self._go_on_from(pulled)

    def _go_on_from(self, pulled: Pulled) -> int:
        """Adopt the parameters that came with an admission; their version."""
        self._worker.stats = self.client.stats
        version = pulled.versions[0]  # all shards have the one that was asked for
        self._admitted = version
        self._worker.adopt(pulled)
        return version

    async def announce(self) -> None:
        """Tell the clock that this worker has done what the others wait for."""
        await self.client.offer()

    async def arrive(self) -> None:
        """Tell the clock that this worker's part of a phase is done, which was no update of the servers'."""
        await self.client.arrive({"clock": float(self._worker.clock)})

    async def aborted(self, computing: Operation[Gradient]) -> bool:
        """Wait for `computing`; True if the clock closes the version that it is computed on first, which cancels it."""
        while not computing.done:
            watch = self._watch = self._watch or self.client.watch()
            await self._worker.node.first(computing, watch)
            if watch.done and not computing.done:
                self._watch = None
                if _version_in(watch) in (self._admitted, None):
                    computing.cancel()
                    watch.result()  # raises `Evicted` if that is why
                    return True
        return False

    # ---- parameters

    async def pull(self, *, lend: bool = False) -> None:
        """Go on from the servers' parameters: the version of the last admission, or the newest without one."""
        worker = self._worker
        started = worker.node.now()
        if lend and self.client.lends:
            pulled = await self.client.borrow(self._admitted, to_work=True)
        else:
            pulled = await self._receive()
        worker.meter.add("communicate", started, worker.node.now(), "pull")
        worker.adopt(pulled)

    async def fetch(self) -> Pulled:
        """The servers' parameters, as `pull` receives them, without adopting them."""
        worker = self._worker
        started = worker.node.now()
        pulled = await self._receive()
        worker.meter.add("communicate", started, worker.node.now(), "pull")
        return pulled

    async def _receive(self) -> Pulled:
        return self._counted(await self.client.pull(self._worker.room(), version=self._admitted, to_work=True))

    def _counted(self, pulled: Pulled) -> Pulled:
        """Count a pull from several shards by its version skew. Shards that hold no parameters do not matter."""
        held = self.client.servers.ranges
        if len(held) > 1:
            self._worker.meter.skew[skew(compress(pulled.versions, held))] += 1
        return pulled

    def _room_unless_lent(self) -> torch.Tensor | None:
        """Memory for parameters to receive; None where the server lends its own."""
        return None if self.client.lends else self._worker.room()

    def gradients_held(self) -> list[Operation[Reply]]:
        """Ask the servers how many gradients are in the version that this worker works on, if it has pulled any."""
        versions = self._worker.versions
        return [] if versions is None else self.client.gradients_at(versions)

    # ---- updates

    async def push(
        self,
        update: torch.Tensor,
        *,
        weight: float | None = None,
        exponent: float = 0.0,
        stats: Stats | None = None,
        base: Sequence[int] | None = None,
    ) -> bool:
        """Push `update`, and return once it is acknowledged; False if it comes too late to count.

        `weight`, times e to the `exponent`, is its share in a weighted mean, the batch size if left out. All workers
        that are admitted on what the group of this update makes get `stats` (`WorkerState.stats`), which name this
        worker's `clock`. `base` are the versions that `update` was computed on, those adopted last if left out.
        """
        worker = self._worker
        started = worker.node.now()
        share = worker.batch_size if weight is None else weight
        stamp = worker.stamp(update, base)
        try:
            await self.client.push(update, weight=share, exponent=exponent, note=stats, **stamp)
            return True
        except Superseded:
            return False
        finally:
            worker.meter.add("communicate", started, worker.node.now(), "push")

    async def push_pull(self, update: torch.Tensor) -> None:
        """Push `update`, and go on from the servers' parameters once this worker may start its next step.

        As `push` and then `next_version(lend=True)` or, where no order is asked for, `pull(lend=True)`, in fewer calls
        (`ServerClient.push_pull`).
        """
        worker, servers = self._worker, self.client.servers
        if servers.ordered and worker.stops_waiting:  # a checkpoint must not cut off a push
            await self.push(update)
            await self.next_version(lend=True)
            return
        started = worker.node.now()
        room = self._room_unless_lent()
        pulled = await self.client.push_pull(update, room, weight=worker.batch_size, **worker.stamp(update))
        self._meter_push_pull(started)
        self._counted(pulled)
        if servers.ordered:
            self._go_on_from(pulled)
        else:
            worker.adopt(pulled)

    def _meter_push_pull(self, started: float) -> None:
        """Share the seconds between the ways there and back; only the seconds that the server `held` are known."""
        meter, ended, held = self._worker.meter, self._worker.node.now(), self.client.held
        there = started + (ended - started - held) / 2
        meter.add("communicate", started, there, "push")
        meter.add("wait", there, there + held)
        meter.add("communicate", there + held, ended, "pull")

    # ---- beside the gradients

    async def pull_async(self) -> None:
        """Start a pull and go on; `fetched` has it."""
        await self._begin("pull", self._receive())

    async def fetched(self) -> Pulled:
        """The parameters of the pull that is under way; without one, `fetch`."""
        return await self._finished("pull") or await self.fetch()

    async def push_async(self, update: torch.Tensor) -> None:
        """As `push`, but go on at once. One is on its way at a time; `update` is lent until the next."""
        await self.pushed()
        worker = self._worker
        await self._begin("push", self.client.push(update, weight=worker.batch_size, **worker.stamp(update)))

    async def pushed(self) -> None:
        """Wait for the push that is under way, if there is one."""
        await self._finished("push")

    async def _begin(self, what: str, work: Coroutine[Operation[Any], None, Any]) -> None:
        """Have `work` go on beside the method, until a checkpoint at the latest."""
        node = self._worker.node
        task = self._beside[what] = node.spawn(work, f"{what} of {node.name}")
        task.when_done(nothing)  # its error is raised where its end is awaited
        await node.sleep(0.0)  # the task gets its first turn now, before a gradient holds up the node

    async def _finished(self, what: str) -> Any:
        operation = self._beside.pop(what, None)
        if operation is None:
            return None
        worker = self._worker
        started = worker.node.now()
        value = await operation
        worker.meter.add("communicate", started, worker.node.now(), what)
        return value


def _version_in(watch: Operation[Reply]) -> int | None:
    """The version that a watch says is over; None for all of them, -1 for none."""
    try:
        version: int = watch.result().fields["version"]
    except CallTimeout:
        return -1
    except Evicted:
        return None
    return version
