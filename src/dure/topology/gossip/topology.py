"""Gossip: pairs of neighbors average their models, without a server, a barrier or a deadlock.

    active worker i                                       passive worker j
      meet (number, its x) ---------------------------->  m = (x_i + x_j) / 2;  x_j = m
      x_i += m - x as it was sent   <-- m ---------------
      settle (number) --------------------------------->  it counts
      <-------------------------------------- it stood --

An averaging is atomic: between `meet` and its answer a worker takes part in no other. A worker that is asked meanwhile
lets the caller wait if the caller's rank is below its own, and refuses it otherwise. So every chain of waiting workers
rises in rank and ends at a worker that does not wait, whatever the graph. A refused worker asks another neighbor.

Gradients do not stop for it: changes of a worker's model between `meet` and its answer stay, because the difference is
added. So an averaging leaves the sum of all models as it was, and it counts on both sides or on neither:

| failure                                  | active                     | passive                              |
|------------------------------------------|----------------------------|--------------------------------------|
| the passive fails before it answers      | nothing has changed        |                                      |
| the active fails before it has settled   |                            | takes the difference back            |
| the passive fails before it has settled  | takes the difference back  |                                      |
| no answer for long                       | withdraws the averaging    | takes the difference back, if any    |
| a connection ends, and both run          | asks whether it counted    | takes the difference back            |
| `meet` arrives twice                     |                            | answers the same again               |

If a neighbor is gone, the worker leaves it out and reconnects the graph around it (`graph.reconnect`). A neighbor that
calls again is used again. A worker at its end averages no more, so its delivered model does not change.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from dure.core.deployment import rank_of_worker
from dure.core.node import Address, Call, Cancelled, Ghost, Node, Operation, Reply, TensorSpec
from dure.core.protocol import COUNT, TRUTH, WORKERS, RemoteService, carrying, listed, remote
from dure.errors import Busy, CallTimeout, Refused, RemoteError
from dure.topology.base import RunPlan, Topology, TopologyWorker
from dure.topology.gossip.graph import build, reconnect

if TYPE_CHECKING:
    import networkx as nx

    from dure.core.node import Group
    from dure.topology.gossip.choice import Gossip


GIVE_UP_STEPS = 100
"""Own steps after which a worker gives up an averaging that is not answered."""

LEAVE_SECONDS = 5.0
"""Least time that a worker at its end waits for a neighbor's answer, before the neighbor is taken for frozen."""

LEAVE_STEPS = 10
"""The same limit, in the worker's own longest steps: a neighbor answers between two of its gradients."""

_STREAM = 8  # separates these draws from others of the same seed, worker and step


class Model(Protocol):
    """A worker whose model is averaged. `params` is replaced, never written to: messages may still read the old one."""

    params: torch.Tensor
    clock: int
    joined_at: int


class Turn:
    """Keeps a worker's averagings atomic and free of deadlock: the neighbor that it asks, and its answer to callers."""

    __slots__ = ("asking", "rank")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.asking: int | None = None

    def answer(self, caller: int) -> str:
        """The answer to a caller: "meet", "wait" (until the worker's own question has been answered), or "refuse"."""
        if self.asking is None:
            return "meet"
        return "wait" if caller < self.rank else "refuse"


class _Met(NamedTuple):
    """An averaging that its active side has not settled: `mean` has taken the place of `before`."""

    number: list[int]
    before: torch.Tensor
    mean: torch.Tensor


class _Question(NamedTuple):
    """An averaging that is asked for: the model `sent`, and memory for the `mean`."""

    neighbor: int
    number: list[int]
    sent: torch.Tensor
    mean: torch.Tensor


class Peer(RemoteService):
    """The averagings of a worker with its neighbors: its calls to them, and the service that they call.

    `absent` ranks join later. `incarnation` is this worker's, `seed` decides the order in which it asks its neighbors.
    `averaged` counts the averagings that it has begun or answered, `refused` the refusals of busy neighbors.
    """

    called = "a peer"

    def __init__(
        self,
        node: Node,
        model: Model,
        graph: nx.Graph,
        *,
        seed: int,
        incarnation: int = 0,
        absent: Collection[int] = (),
    ) -> None:
        self.node = node
        self.model = model
        self.graph = graph
        self.rank = node.rank
        self.turn = Turn(node.rank)
        self.averaged = 0
        self.refused = 0
        self._seed = seed
        self._incarnation = incarnation
        self._number = 0
        self._away = set(absent) - {self.rank}  # gone or without an answer, until they call again
        self._through: set[int] = set()  # at their end: their models are delivered
        # A cache for the question in each step: the ranks that were left out last, and the neighbors without them.
        self._reconnected: tuple[set[int], list[int]] = set(), sorted(graph.neighbors(self.rank))
        self._leaving = False
        self._asked = False  # whether a neighbor has averaged with this worker since its last step
        self._begun = 0  # clock at the start of the present averaging
        self._step: tuple[float, float] = node.now(), 0.0  # when the last began, seconds of the longest
        self._averaging: Operation[None] | None = None
        self._meet_call: Operation[Reply] | None = None
        self._calls: dict[Operation[Reply], int] = {}  # under way, to which neighbor
        self._settling: list[Operation[None]] = []
        self._waiting: list[tuple[Call, Operation[Reply]]] = []
        self._met: dict[int, _Met] = {}
        # By neighbor: the number of the last averaging that it began and that has ended, and whether that counted.
        self._last: dict[int, tuple[list[int], bool]] = {}
        self._all_settled: Operation[None] | None = None

    # ---- what the worker does

    def average(self) -> None:
        """Begin to average with a neighbor, in the background.

        Not while the last averaging is under way, nor if a neighbor has averaged with this worker since the last call.
        """
        now = self.node.now()
        self._step = now, max(self._step[1], now - self._step[0])
        asked, self._asked = self._asked, False
        if self._averaging is None or self._averaging.done:
            neighbors = [] if asked else self._neighbors()
            if neighbors:
                # The first question leaves here. The new task gets its first turn only when this one waits, and a
                # gradient may hold up the node until then.
                self._begun = self.model.clock
                work = self._average_with_one_of(neighbors, self._ask(neighbors[0]))
                self._averaging = self.node.spawn(work, f"worker {self.rank} averaging")
        elif self._meet_call is not None and self.model.clock - self._begun >= GIVE_UP_STEPS:
            self._meet_call.cancel()

    def expect(self, names: Collection[str]) -> None:
        """Count workers as there that were absent at the start of the run, and have joined since then."""
        self._away.difference_update(rank_of_worker(name) for name in names)

    async def join(self) -> int | None:
        """Copy the model of a neighbor, and return its clock; None if no neighbor answers."""
        while neighbors := self._neighbors():
            into = _room(self.model.params)
            try:
                reply = await self._call(neighbors[0], "copy", into=_tensors(into))
            except (RemoteError, Cancelled):
                self._away.add(neighbors[0])
                continue
            self.model.params = into
            clock: int = reply.fields["clock"]
            return clock
        return None

    async def settled(self) -> None:
        """Wait until no averaging that this worker has begun is under way."""
        if self._averaging is not None:
            await self._averaging
        for settling in self._settling:
            await settling

    async def leave(self) -> None:
        """Average no more: from now on the model stays as it is.

        A neighbor that gives no answer in time is taken for frozen. An exchange that this worker asked of it is
        withdrawn, an unsettled one does not count, and one that this worker has confirmed counts.
        """
        self._leaving = True
        for _, promise in self._waiting:
            promise.fail(self._refusal())
        self._waiting.clear()
        seconds = max(LEAVE_SECONDS, LEAVE_STEPS * self._step[1])
        settling = self.node.spawn(self.settled(), f"worker {self.rank} leaving")
        if await self.node.first(settling, timeout=seconds) is None and self._meet_call is not None:
            self._meet_call.cancel()
            assert self._averaging is not None
            await self._averaging
        if self._met:
            self._all_settled = self.node.promise(f"neighbors of worker {self.rank} to settle their averagings")
            await self.node.first(self._all_settled, timeout=seconds)
            for rank in list(self._met):
                self._end(rank, stands=False)

    async def look(self) -> tuple[torch.Tensor, int]:
        """The mean of all models within reach, this worker's included, and the number of gradients in them."""
        total, number, gradients = self.model.params.clone(), 1, self.model.clock - self.model.joined_at
        for rank in sorted(set(self.graph) - self._away - {self.rank}):
            into = _room(self.model.params)
            try:
                reply = await self._call(rank, "look", into=_tensors(into))
            except (RemoteError, Cancelled):
                continue
            total += into
            number += 1
            gradients += reply.fields["gradients"]
        total /= number
        return total, gradients

    # ---- the active side

    def _neighbors(self) -> list[int]:
        """The neighbors that are there, in an order that depends on the seed, the worker and its clock."""
        gone = self._away | self._through
        if gone != self._reconnected[0]:
            self._reconnected = gone, sorted(reconnect(self.graph, gone).neighbors(self.rank))
        around = self._reconnected[1]
        order = np.random.default_rng((self._seed, self.rank, self.model.clock, _STREAM)).permutation(len(around))
        return [around[place] for place in order]

    def _ask(self, neighbor: int) -> _Question:
        """Send a question to `neighbor`, and return it."""
        self._number += 1
        number, sent, mean = [self._incarnation, self._number], self.model.params, _room(self.model.params)
        self.turn.asking = neighbor
        self._meet_call = self._call(neighbor, "meet", sent, into=_tensors(mean), number=number)
        return _Question(neighbor, number, sent, mean)

    async def _average_with_one_of(self, neighbors: Sequence[int], first: _Question) -> None:
        if not await self._is_answered(first):
            for neighbor in neighbors[1:]:
                if self._leaving or await self._is_answered(self._ask(neighbor)):
                    return

    async def _is_answered(self, question: _Question) -> bool:
        """Average with the neighbor that was asked; returns False if it does not."""
        neighbor, number, sent, mean = question
        assert self._meet_call is not None
        came = False
        try:
            await self._meet_call
            came = True
        except Busy:
            self.refused += 1
        except (Cancelled, CallTimeout):
            # It may have averaged all the same, so the averaging is withdrawn there. One that is lost or frozen is in
            # `_away` already, and no message would reach it.
            if neighbor not in self._away:
                self._away.add(neighbor)
                self._see_to(self._withdraw(neighbor, number))
        except Refused:  # at its end, where it averages no more
            self._through.add(neighbor)
        except RemoteError:
            self._away.add(neighbor)
        self._meet_call = None
        if came:
            self._replace(sent, mean)
            self.averaged += 1
            self._see_to(self._confirm(neighbor, number, sent, mean))
        # After the replacement: until here no other averaging may change the model.
        self.turn.asking = None
        self._meet_those_who_wait()
        return came

    def _see_to(self, settling: Coroutine[Any, Any, None]) -> None:
        """Settle an averaging in the background, while others begin."""
        self._settling = [each for each in self._settling if not each.done]
        self._settling.append(self.node.spawn(settling, f"worker {self.rank} settling"))

    async def _withdraw(self, neighbor: int, number: list[int]) -> None:
        with suppress(RemoteError, Cancelled):  # where the connection ends, the neighbor takes it back by itself
            await self._tell(neighbor, number, stands=False)

    async def _confirm(self, neighbor: int, number: list[int], sent: torch.Tensor, mean: torch.Tensor) -> None:
        """Have the averaging count on the other side too; if it does not, take it back."""
        stood, attempts = False, 2  # once more, as the connection may have ended and not the neighbor
        while attempts:
            attempts -= 1
            try:
                stood = (await self._tell(neighbor, number, stands=True)).fields["stood"]
                break
            except CallTimeout:
                attempts += 1
            except Cancelled:
                break
            except RemoteError:
                continue
        if not stood:
            self._replace(mean, sent)
            self.averaged -= 1

    def _tell(self, neighbor: int, number: list[int], *, stands: bool) -> Operation[Reply]:
        return self._call(neighbor, "settle", number=list(number), stands=stands)

    def _call(self, neighbor: int, method: str, *tensors: torch.Tensor, **given: Any) -> Operation[Reply]:
        """A call that is cancelled when the neighbor is taken for frozen."""
        self._calls = {call: rank for call, rank in self._calls.items() if not call.done}
        call = self.node.call(_address(neighbor), method, *tensors, **given)
        self._calls[call] = neighbor
        return call

    def _replace(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Add the difference from `old` to `new`; changes of the model since `old` stay."""
        if self.model.params is old:
            self.model.params = new
        else:
            changed = new - old
            changed += self.model.params
            self.model.params = changed

    # ---- the passive side: a service

    @property
    def spec(self) -> TensorSpec:
        """A model as a tensor of a call."""
        return TensorSpec(str(self.model.params.dtype).removeprefix("torch."), self.model.params.numel())

    def lost(self, name: str) -> None:
        """Leave out the worker of a lost node, and take back the averaging that it has not settled."""
        rank = rank_of_worker(name)
        if rank is not None:
            self._away.add(rank)
            self._drop_waiting(lambda call: call.caller == name)
            self._end(rank, stands=False)

    def frozen(self, name: str) -> None:
        """End the calls to a worker that sends no heartbeat, as its loss would. It may come back."""
        self.lost(name)
        for call, rank in list(self._calls.items()):
            if name == f"worker {rank}":
                call.cancel()

    @remote(WORKERS, number=listed(COUNT))
    @carrying(lambda peer: (peer.spec,))
    def _meet(self, call: Call) -> Reply | Awaitable[Reply]:
        """The mean of both models; later, or `Busy`, if this worker is in the middle of another averaging."""
        rank, number = _rank(call.caller), list(call.fields["number"])
        self._away.discard(rank)
        self._through.discard(rank)
        met = self._met.get(rank)
        if met is not None and met.number == number:
            return Reply(tensors=_tensors(met.mean))
        # A question that comes behind its own end: it was withdrawn, or is repeated.
        if rank in self._last and number <= self._last[rank][0]:
            raise Refused(f"averaging {number} of worker {rank} is over.")
        if self._leaving:
            raise self._refusal()
        answer = self.turn.answer(rank)
        if answer == "refuse":
            raise Busy(f"worker {self.rank} is averaging with worker {self.turn.asking}: ask another, or again.")
        if answer == "wait":
            promise: Operation[Reply] = self.node.promise(f"its turn to average with worker {self.rank}")
            self._waiting.append((call, promise))
            return promise
        self._end(rank, stands=False)  # what the caller, or an earlier incarnation of it, has left unsettled
        return self._mean_with(call.tensors, rank, number)

    def _mean_with(self, tensors: Sequence[torch.Tensor], rank: int, number: list[int]) -> Reply:
        before = self.model.params
        mean = before + tensors[0]
        mean *= 0.5
        self.model.params = mean
        self._met[rank] = _Met(number, before, mean)
        self._asked = True
        self.averaged += 1
        return Reply(tensors=_tensors(mean))

    def _meet_those_who_wait(self) -> None:
        waiting, self._waiting = self._waiting, []
        for call, promise in waiting:
            try:
                promise.resolve(self._meet(call))
            except Refused as error:
                promise.fail(error)

    @remote(WORKERS, number=listed(COUNT), stands=TRUTH)
    def _settle(self, call: Call) -> Reply:
        """`stood`: whether the averaging of that number had counted so far."""
        rank, number = _rank(call.caller), list(call.fields["number"])
        self._drop_waiting(lambda c: c.caller == call.caller and list(c.fields["number"]) == number)
        met = self._met.get(rank)
        if met is not None and met.number == number:
            self._end(rank, stands=call.fields["stands"])
        # It was withdrawn before its `meet` came, which is refused from now on.
        elif rank not in self._last or self._last[rank][0] < number:
            self._last[rank] = number, False
        return Reply({"stood": self._last[rank] == (number, True)})

    def _drop_waiting(self, which: Callable[[Call], bool]) -> None:
        """Refuse the waiting callers that have given up their averaging."""
        dropped = [(call, promise) for call, promise in self._waiting if which(call)]
        self._waiting = [(call, promise) for call, promise in self._waiting if not which(call)]
        for _, promise in dropped:
            promise.fail(Busy("the averaging was given up."))

    def _end(self, rank: int, *, stands: bool) -> None:
        """End the averaging with `rank`: it counts if it `stands`, and is taken back if not."""
        met = self._met.pop(rank, None)
        if met is not None:
            self._last[rank] = met.number, stands
            if not stands:
                self._replace(met.mean, met.before)
                self._asked = False
                self.averaged -= 1
        if self._all_settled is not None and not self._met:
            self._all_settled.resolve()

    @remote(WORKERS)
    def _copy(self, call: Call) -> Reply:
        """Clock and model."""
        self._away.discard(_rank(call.caller))
        return Reply({"clock": self.model.clock}, _tensors(self.model.params))

    @remote(WORKERS)
    def _look(self, call: Call) -> Reply:
        """The model, and the number of this worker's gradients in it."""
        self._away.discard(_rank(call.caller))
        return Reply({"gradients": self.model.clock - self.model.joined_at}, _tensors(self.model.params))

    def _refusal(self) -> Refused:
        return Refused(f"worker {self.rank} is at its end: its model is delivered.")

    # ---- checkpoints

    def state(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain values, while no averaging is under way."""
        gone = {"away": sorted(self._away), "through": sorted(self._through)}
        return {**gone, "averaged": self.averaged, "refused": self.refused}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._away, self._through = set(state["away"]), set(state["through"])
        self.averaged, self.refused = state["averaged"], state["refused"]


def _address(rank: int) -> Address:
    return Address(f"worker {rank}", "peer")


def _rank(caller: str) -> int:
    return int(caller.rpartition(" ")[2])


def _room(like: torch.Tensor) -> torch.Tensor:
    return like if isinstance(like, Ghost) else torch.empty_like(like)


def _tensors(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return (values,)


class GossipTopology(Topology):
    """Every worker serves its neighbors in a graph."""

    def __init__(self, choice: Gossip, plan: RunPlan) -> None:
        super().__init__(choice, plan)
        self.graph = build(choice, plan.workers)

    @property
    def worker_vectors(self) -> float:
        return 2.0  # of an averaging under way: the model before it, and the mean

    def connect(self, worker: TopologyWorker, group: Group | None) -> None:
        plan, node = self.plan, worker.node
        peer = Peer(node, worker, self.graph, seed=plan.seed, incarnation=node.incarnation, absent=plan.absent)
        worker.sessions.peer = peer
        node.serve("peer", peer)
