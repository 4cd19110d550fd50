"""Clock of a parameter server: hosts a policy of admission, and tells the shards which updates to apply.

While a worker waits, the clock evicts workers without progress (`ProgressMonitor`, `Watchdog`).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dure.core.deployment import WORKER, NodeId, rank_of_worker
from dure.core.node import Address, Call, Node, Operation, Reply
from dure.core.protocol import COUNT, DRIVER, OWN, TRUTH, WORKERS, RemoteService, remote
from dure.core.sequence import SequenceTracker
from dure.errors import Evicted, PeerLost, Refused
from dure.topology.fields import LIFE, STAGED
from dure.topology.parameter_server.admission import Abort, Accept, Close, Decision, End, Policy, Start
from dure.topology.parameter_server.versions import Pins

EVICT_SECONDS = 5.0
"""Least time without progress before a worker is late, whatever its pace."""

STEPS = 10
"""The same limit, in steps of the worker's own median length."""

FEW = 3
"""Least number of steps that tell a pace. The first step is untypical: the servers have applied no update yet."""

UNKNOWN = 10
"""Factor of the limit for a worker whose pace is unknown."""

RECENT = 15
"""Number of latest steps in the median."""


class ProgressMonitor:
    """Measures since when each worker is busy, and the duration of its steps. `now` gives seconds.

    A worker is *busy* from when it may start a step until its update is staged. A worker has stopped when it is busy
    for longer than `max(seconds, 10 x its median step)`. A worker in its first steps has no known pace: it may be slow
    or far away, so its limit is ten times as long, and counts steps of the slowest worker. A worker that waits is never
    late.

    A worker is not late either while its machine, or that of a shard, does not answer (`reaches`): a link is down, and
    updates come later. Heartbeats decide how long that may last.
    """

    def __init__(
        self, now: Callable[[], float], seconds: float = EVICT_SECONDS, reaches: Callable[[int], bool] = lambda _: True
    ) -> None:
        self.now = now
        self.seconds = seconds
        self.reaches = reaches
        self._since: dict[int, float] = {}
        self._steps: dict[int, deque[float]] = {}

    @staticmethod
    def at(node: Node, seconds: float, shards: Sequence[Address]) -> ProgressMonitor:
        """A monitor at `node` of workers that call all `shards`."""

        def reaches(worker: int) -> bool:
            return all(map(node.reaches, (str(NodeId(WORKER, worker)), *(shard.node for shard in shards))))

        return ProgressMonitor(node.now, seconds, reaches)

    def begin(self, worker: int) -> None:
        """Note that `worker` may start a step, or has just joined."""
        self._since[worker] = self.now()

    def step(self, worker: int) -> None:
        """Note that the update of `worker` is staged."""
        now = self.now()
        steps = self._steps.get(worker)
        if steps is None:
            steps = self._steps[worker] = deque(maxlen=RECENT)
        steps.append(now - self._since.get(worker, now))
        self._since[worker] = now

    def begin_again(self) -> None:
        """Start all measurements anew. This process itself was stopped: that time counts against no worker."""
        now = self.now()
        for worker in self._since:
            self._since[worker] = now

    def late(self, suspects: Iterable[int]) -> list[int]:
        """The workers among `suspects` that have stopped."""
        now = self.now()
        late = [worker for worker in suspects if now >= self._deadline(worker)]
        return [worker for worker in late if not self._excused(worker)]

    def wait(self, suspects: Iterable[int]) -> float:
        """Seconds until the first of `suspects`, or a worker that begins now, can be late."""
        first = min(map(self._deadline, suspects), default=math.inf)
        return min(max(0.0, first - self.now()), self.seconds)

    def _excused(self, worker: int) -> bool:
        """Whether a late worker cannot be reached; its time then starts anew."""
        if self.reaches(worker):
            return False
        self.begin(worker)
        return True

    def _deadline(self, worker: int) -> float:
        if worker not in self._since:
            return math.inf
        steps = self._steps.get(worker, ())
        if len(steps) >= FEW:
            limit = max(self.seconds, STEPS * statistics.median(steps))
        else:
            slowest = max(map(statistics.median, self._steps.values()), default=math.inf)
            limit = UNKNOWN * max(self.seconds, STEPS * slowest)
        return self._since[worker] + limit


class Watchdog:
    """Evicts workers without progress, as long as another worker waits.

    `someone_waits` tells whether a worker waits, `busy` gives the workers that it may wait for.
    """

    def __init__(
        self,
        node: Node,
        progress: ProgressMonitor,
        someone_waits: Callable[[], bool],
        busy: Callable[[], list[int]],
        evict: Callable[[int], None],
    ) -> None:
        self._node = node
        self._progress = progress
        self._someone_waits = someone_waits
        self._busy = busy
        self._evict = evict
        self._running = False

    def start(self) -> None:
        """Watch the busy workers from now on: a worker begins to wait."""
        if not self._running:
            self._running = True
            self._node.spawn(self._watch(), "the watchdog of the clock")

    async def _watch(self) -> None:
        # In the background, so that virtual time does not go on for its sake: it ends when no worker waits.
        node, progress = self._node, self._progress
        while self._someone_waits():
            for worker in progress.late(self._busy()):
                self._evict(worker)
            due = node.now() + progress.wait(self._busy())
            await node.sleep(due - node.now(), background=True)
            # Woken much too late: this process was stopped or starved, and could not receive progress of any worker.
            if node.now() > due + progress.seconds / 4:
                progress.begin_again()
        self._running = False


class ShardCalls:
    """Sends each call to all `shards` in order, without waiting for the answers.

    Where `shards_return`, a lost shard is no error: it is started again from a snapshot and receives its calls again.
    """

    def __init__(self, node: Node, shards: Sequence[Address]) -> None:
        self.shards_return = False
        self._node = node
        self._shards = shards
        self._outstanding: deque[Operation[Reply]] = deque()

    def send(self, method: str, **fields: Any) -> None:
        """Call `method` of every shard."""
        for shard in self._shards:
            self._outstanding.append(self._node.call(shard, method, **fields))

    def check_answered(self) -> None:
        """Raise the error of a call that has failed, among those answered in order."""
        while self._outstanding and self._outstanding[0].done:
            self._check(self._outstanding.popleft())

    async def settled(self) -> None:
        """Wait until the shards have carried out all calls."""
        while self._outstanding:
            call = self._outstanding.popleft()
            with suppress(PeerLost):
                await call
            self._check(call)

    def _check(self, call: Operation[Reply]) -> None:
        try:
            call.result()
        except PeerLost:
            if not self.shards_return:
                raise


class ClockService(RemoteService):
    """Hosts a `Policy`: a service whose messages are a few numbers each.

    The clock calls the `shards` from its own node and tells them, in order, which updates to apply. `workers` are
    members from the start, under incarnation 0, even before their first call; other workers `join`. Without a policy
    (methods that ask for no order) the clock only hands out incarnations and tells the shards which workers have left.

    While another worker waits, the `watchdog` evicts a worker without progress: the other workers go on, `on_evicted`
    is called, and every later call under the evicted incarnation is refused (`Evicted`).

    `refused` counts the gradients that were computed in vain: refused on their offer, or aborted before it.

    The version that a worker was started on is pinned: the shards keep it until the worker stages an update, asks
    again or leaves.
    """

    called = "the clock"

    def __init__(
        self,
        node: Node,
        policy: Policy | None,
        shards: Sequence[Address],
        *,
        workers: Sequence[int] = (),
        reduce: str = "mean",
        evict_seconds: float = EVICT_SECONDS,
    ) -> None:
        self.node = node
        self.policy = policy
        self.shards = tuple(shards)
        self.shard_calls = ShardCalls(node, self.shards)
        self.reduce = reduce
        self.waits = self.refused = 0
        self.lost_workers: list[int] = []
        self.on_evicted: Callable[[int], None] = lambda worker: None
        self.progress = ProgressMonitor.at(node, evict_seconds, self.shards)
        self._watchdog = Watchdog(node, self.progress, self._someone_waits, self._busy, self.evict)
        self.incarnations: dict[int, int] = dict.fromkeys(workers, 0)
        self.live = set(workers)
        self._expected = set(workers)  # members that have not called yet: their first `join` begins no second life
        self._sequences = SequenceTracker()
        self._asking: dict[int, Operation[Reply]] = {}
        self._offering: dict[int, Operation[Reply]] = {}
        self._watching: dict[int, Operation[Reply]] = {}
        self._aborted: dict[int, int] = {}  # of each worker, the version that its present work is in vain on
        self._open: dict[int, set[int]] = {}  # of each worker, what it has staged and no group has applied
        self._pins = Pins()
        self._said: dict[tuple[int, int], Mapping[str, float]] = {}
        self._notes: list[Mapping[str, float]] = []
        for worker in sorted(self.live):
            self._carry_out(policy.join(worker) if policy is not None else [])

    # ---- calls of workers

    @remote(WORKERS, worker=OWN)
    def _join(self, call: Call) -> Reply:
        """Enter, at the slowest clock and under a new incarnation: version, clock (None if none waits), incarnation."""
        worker = call.fields["worker"]
        if worker in self._expected:
            self._expected.remove(worker)
        else:
            # A worker that is live here and joins was started again before its end was noticed. Its earlier life ends
            # first: what that one staged and never reported must be off the shards before the next one numbers from 1.
            if worker in self.live:
                self._remove(worker)
            self.incarnations[worker] = self.incarnations.get(worker, -1) + 1
            self.live.add(worker)
            if self.policy is not None:
                self._carry_out(self.policy.join(worker))
        self._pins.pin(worker, self._pins.newest)  # it pulls this version next: a group may close before it does
        self.progress.begin(worker)
        clock = None if self.policy is None else self.policy.clocks[worker]
        joined = {"version": self._pins.newest, "clock": clock, "incarnation": self.incarnations[worker]}
        return self._with_notes(Reply(joined))

    @remote(WORKERS, **LIFE)
    def ask(self, call: Call) -> Reply | Awaitable[Reply]:
        """Once the worker may start: the version and the slowest clock; or `over`."""
        worker = self._check(call)
        # A question that is repeated, as its answer was late, joins the first one: the policy must hear of it once.
        waiting = self._asking.get(worker)
        if waiting is None:
            if self._pins.has_started(worker) and not self._ruled().ordered:
                self.progress.step(worker)  # without an order no `staged` reports the step
            # It asks, so it works on no version any more: the shards may drop that one, and an abort has reached it.
            self._pins.unpin(worker)
            self._aborted.pop(worker, None)
            started = self._carry_out(self._ruled().ask(worker), worker)
            if started is not None:
                return started
            self.waits += 1
            self._watchdog.start()
            waiting = self._asking[worker] = self.node.promise(f"the clock to admit worker {worker}")
        return waiting

    @remote(WORKERS, **LIFE, base=COUNT)
    def _offer(self, call: Call) -> Reply | Awaitable[Reply]:
        """The group of an update that is computed on version `base`, or None and the reason."""
        worker = self._check(call)
        waiting = self._offering.get(worker)
        if waiting is None:
            decided = self._carry_out(self._ruled().offer(worker, call.fields["base"]), worker)
            if decided is not None:
                return decided
            self._watchdog.start()
            waiting = self._offering[worker] = self.node.promise(f"the clock to decide on worker {worker}")
        return waiting

    @remote(WORKERS, **LIFE, **STAGED)
    def staged(self, call: Call) -> Reply:
        """Count an update that all shards have staged."""
        worker, fields = self._check(call), call.fields
        seq = fields["seq"]
        if self._sequences.first_time(worker, fields["incarnation"], seq):
            self._pins.unpin(worker)
            self.progress.step(worker)
            # Noted as open before the policy hears of it: the policy may close its group at once, which takes it out.
            self._open.setdefault(worker, set()).add(seq)
            if "note" in fields:
                self._said[worker, seq] = fields["note"]
            self._carry_out(self._ruled().staged(worker, fields.get("group"), seq))
        return Reply()

    @remote(WORKERS, **LIFE, **STAGED)
    def _next(self, call: Call) -> Reply | Awaitable[Reply]:
        """As `ask`, after a `staged`."""
        self.staged(call)
        return self.ask(call)

    @remote(WORKERS, **LIFE)
    def _watch(self, call: Call) -> Reply | Awaitable[Reply]:
        """Once work that the worker started no longer counts: the version that it started on."""
        worker = self._check(call)
        if worker in self._aborted:  # the version was closed before the watch came
            return Reply({"version": self._aborted[worker]})
        if worker not in self._watching:
            self._watching[worker] = self.node.promise(f"the clock to abort the work of worker {worker}")
        return self._watching[worker]

    @remote(WORKERS, **LIFE)
    def _progress(self, call: Call) -> Reply:
        """Take the heartbeat of a worker that seldom pushes."""
        self.progress.begin(self._check(call))
        return Reply()

    def _admit(self, decision: Start) -> Reply:
        self._pins.pin(decision.worker, decision.version)
        self.progress.begin(decision.worker)
        return self._with_notes(Reply({"version": decision.version, "slowest": self._ruled().clocks.minimum}))

    def _with_notes(self, reply: Reply) -> Reply:
        """Add the notes of the last group's members to `reply`, if they sent any."""
        return Reply({**reply.fields, "notes": self._notes}) if self._notes else reply

    @remote(WORKERS, **LIFE, finished=TRUTH)
    def _leave(self, call: Call) -> Reply:
        """Remove the worker; all that waited for it are released before the reply."""
        # Not `_check`: a late `leave` of an earlier life is acknowledged, and must not remove the present one.
        worker = call.fields["worker"]
        if worker in self.live and call.fields["incarnation"] == self.incarnations[worker]:
            self._remove(worker, finished=call.fields["finished"])
        return Reply()

    def lost(self, node: str) -> None:
        """Remove the worker of a lost node."""
        worker = rank_of_worker(node)
        if worker in self.live:
            self.lost_workers.append(worker)
            self._remove(worker)

    async def returned(self, shard: Address) -> None:
        """Tell a shard that runs again from a snapshot which incarnations are over."""
        # The snapshot may be older than some `leave`. Without them the shard would take an update that a past life has
        # sent before its end and that is still on its way.
        for worker, incarnation in sorted(self.incarnations.items()):
            last_over = incarnation - 1 if worker in self.live else incarnation
            await self.node.call(shard, "leave", worker=worker, incarnation=last_over, keep=[])

    def evict(self, worker: int) -> None:
        """Go on without `worker`, which makes no progress. It comes back only by `join`, under a new incarnation."""
        self.lost_workers.append(worker)
        self._remove(worker)
        self.on_evicted(worker)

    def _someone_waits(self) -> bool:
        return bool(self._asking or self._offering)

    def _busy(self) -> list[int]:
        return [worker for worker in sorted(self.live) if worker not in self._asking and worker not in self._offering]

    @remote(DRIVER, WORKERS)
    def _status(self, call: Call) -> Reply:
        """The counters."""
        clocks = {} if self.policy is None else {str(w): self.policy.clocks[w] for w in sorted(self.live)}
        return Reply(
            {
                "version": self._pins.newest,
                "waits": self.waits,
                "refused": self.refused,
                "lost": self.lost_workers,
                "clocks": clocks,
                "pinned": self._pins.held,
            }
        )

    def _check(self, call: Call) -> int:
        """The rank of the calling worker. Raises `Evicted` if its incarnation is no member."""
        worker: int = call.fields["worker"]
        if worker not in self.live or call.fields["incarnation"] != self.incarnations[worker]:
            raise Evicted(f"worker {worker} is no member under incarnation {call.fields['incarnation']}: join first.")
        if self._expected:
            self._expected.discard(worker)
        # A shard that has refused an order holds another model than the others. Nobody awaits its answer, so its error
        # is raised in the next worker that calls.
        self.shard_calls.check_answered()
        return worker

    def _ruled(self) -> Policy:
        if self.policy is None:
            raise Refused("this run's method asks for no order: updates apply on arrival, without admission.")
        return self.policy

    def _remove(self, worker: int, *, finished: bool = False) -> None:
        incarnation = self.incarnations[worker]
        self.live.remove(worker)
        self._expected.discard(worker)
        self._pins.unpin(worker)
        self._aborted.pop(worker, None)
        # Its waits end before the policy decides: a decision must not answer a life that is over.
        for waiting in (self._asking, self._offering, self._watching):
            promise = waiting.pop(worker, None)
            if promise is not None:
                promise.fail(Evicted(f"worker {worker} was taken off the clock: join again."))
        if self.policy is not None:
            self._carry_out(self.policy.finish(worker) if finished else self.policy.leave(worker))
        # The policy may have closed a group with updates of this worker just now. Calls reach a shard in their order,
        # and it has taken those when `leave` comes. What is in a group that is still open stays staged until it closes.
        keep = sorted(self._open.pop(worker, ()))
        self.shard_calls.send("leave", worker=worker, incarnation=incarnation, keep=keep)

    # ---- decisions of the policy

    def _carry_out(self, decisions: Sequence[Decision], caller: int | None = None) -> Reply | None:
        """Carry out `decisions`; the reply to `caller` if one of them decides its call."""
        answer = None
        # In order: a Start behind a Close names the version that this Close makes. The order to make it has left for
        # the shards then, and a pull that overtakes it waits there until the version exists.
        for decision in decisions:
            if isinstance(decision, Close):
                self._close(decision)
                continue
            if isinstance(decision, Start):
                reply, waiting = self._admit(decision), self._asking
            elif isinstance(decision, End):
                reply, waiting = Reply({"over": True}), self._asking
            elif isinstance(decision, Abort):
                self.refused += 1
                self._aborted[decision.worker] = decision.version
                reply, waiting = Reply({"version": decision.version}), self._watching
            elif isinstance(decision, Accept):
                reply, waiting = Reply({"group": decision.group}), self._offering
            else:
                self.refused += decision.worker not in self._aborted
                reply, waiting = Reply({"group": None, "reason": decision.reason}), self._offering
            promise = waiting.pop(decision.worker, None)
            if promise is not None:
                promise.resolve(reply)
            elif decision.worker == caller:
                answer = reply  # decided while its call is being handled: there is no promise yet
        # After the decisions, as a Start among them may have named the old floor and pinned it.
        if self.policy is not None:
            floor = self.policy.floor
            if floor != self._pins.floor:
                self._pins.move_floor(floor)
        return answer

    def _close(self, decision: Close) -> None:
        self._notes = [self._said.pop(member) for member in decision.members if member in self._said]
        for worker, seq in decision.members:
            if worker in self._open:
                self._open[worker].discard(seq)
        # `drop` is taken after the advance, by which the version before may have lost its last pin. Versions let go in
        # between travel with the next `close`: dropping late costs memory, dropping early costs a worker its pull.
        version, drop = self._pins.advance(), self._pins.take_unpinned()
        self.shard_calls.send(
            "close", version=version, group=decision.group, members=decision.members, drop=drop, reduce=self.reduce
        )

    # ---- checkpoints

    async def settled(self) -> None:
        """Wait until the shards have applied all updates that the clock told them to; no worker steps meanwhile."""
        await self.shard_calls.settled()

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values, while no worker is in the middle of a step.

        `floor` is the one version before the newest that may still be pulled after it (`Shard.state`).
        """
        return {
            "version": self._pins.newest,
            "floor": self._pins.floor,
            "versions": self._pins.known(),
            "incarnations": sorted(self.incarnations.items()),
            "live": sorted(self.live),
            "open": [[worker, sorted(seqs)] for worker, seqs in sorted(self._open.items()) if seqs],
            "ledger": self._sequences.state(),
            "said": [[*member, dict(note)] for member, note in sorted(self._said.items())],
            "notes": [dict(note) for note in self._notes],
            "waits": self.waits,
            "refused": self.refused,
            "lost": self.lost_workers,
            "policy": None if self.policy is None else self.policy.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave, on a fresh clock."""
        if self.policy is not None:
            self.policy.restore(state["policy"])
        self._pins.restore(int(state["version"]), state["floor"], state["versions"])
        self.incarnations = {int(worker): int(incarnation) for worker, incarnation in state["incarnations"]}
        self.live, self._expected = set(state["live"]), set()
        for worker in self.live:
            self.progress.begin(worker)
        self._open = {int(worker): set(seqs) for worker, seqs in state["open"]}
        self._sequences.restore(state["ledger"])
        self._said = {(int(worker), int(seq)): note for worker, seq, note in state["said"]}
        self._notes = list(state["notes"])
        self.waits, self.refused, self.lost_workers = state["waits"], state["refused"], list(state["lost"])
