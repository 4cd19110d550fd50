"""A group whose mean gradients, and mean changes of a model, a codec encodes; other collectives travel as they are.

    stripes     worker                                   owner of a stripe (each worker has one)
                  give (round, encoded stripe) ----------->  waits for those of all workers
                  <--------------------------------------- their combination, encoded again

    gather        take (round, message) -----------------> every worker, which adds up all messages in rank order

`codec.exchange` says which codecs go which way, and what an owner does. Virtual time charges encoding, decoding and
combining by what the codec costs (`codec.cost`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure.codec.coder import SliceLayout
from dure.codec.exchange import Owner, add_up, memory, remember
from dure.core.node import Address, Apply, Call, CodecWork, Ghost, Operation, Reply, TensorSpec, nothing, taking
from dure.core.protocol import COUNT, FINITE, TRUTH, WORKERS, RemoteService, carrying, maybe, remote
from dure.core.state import State
from dure.core.vectors import ShapedSlice, all_finite, equal_ranges
from dure.errors import DamagedMessage, PeerLost, Refused, RemoteError

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.core.meter import Meter
    from dure.core.node import Group, Node

MESSAGE = {"round": COUNT, "share": FINITE, "faulty": maybe(TRUTH)}

SERVICE = "stripe"
"""Name of the service `ChunkServer` of a node."""


WIDE = (torch.float32, torch.float64)
"""Types of values that every codec encodes. Others travel as float32, and are rounded at the end."""


class ChunkServer(RemoteService):
    """A service that receives the messages of each round. Rounds are numbered; no member is more than one ahead.

    A member whose gradient is not finite sends zeros, and `faulty`: the answer to `give` has the places of all these.
    """

    def __init__(self, node: Node, members: Sequence[str], owner: Owner, most_bytes: int) -> None:
        self._node = node
        self._members = tuple(members)
        self._owner = owner
        self.message = (TensorSpec("uint8", most_bytes, at_most=True),)
        self._rounds: dict[int, dict[int, tuple[torch.Tensor, float]]] = {}
        self._complete: dict[int, Operation[Any]] = {}
        self._faulty: dict[int, list[int]] = {}
        self._gone = ""

    @remote(WORKERS, **MESSAGE)
    @carrying(lambda server: server.message)
    def _give(self, call: Call) -> Awaitable[Reply]:
        """Take a member's part of this stripe: the combination of all parts and its `nbytes`, once all are here."""
        number = call.fields["round"]
        complete = self._took(call)
        if len(self._rounds[number]) == len(self._members):
            self._node.spawn(self._combine(number), f"round {number} of the stripe at {self._node.name}")
        return self._combined(complete)

    @remote(WORKERS, **MESSAGE)
    @carrying(lambda server: server.message)
    def _take(self, call: Call) -> Reply:
        """Take a whole message."""
        complete = self._took(call)
        if len(self._rounds[call.fields["round"]]) == len(self._members):
            complete.resolve()
        return Reply()

    def _took(self, call: Call) -> Operation[Any]:
        """Keep a member's message; returns the operation that ends once all messages of its round are here."""
        number, place = call.fields["round"], self._members.index(call.caller)
        # A copy: `take` is answered at once, and then the memory of the request is used for others.
        self._rounds.setdefault(number, {})[place] = (call.tensors[0].clone(), call.fields["share"])
        if call.fields.get("faulty"):
            self._faulty.setdefault(number, []).append(place)
        return self.complete(number)

    def admit(self, call: Call) -> None:
        if call.caller not in self._members:
            raise Refused(self.unknown(call))

    def unknown(self, call: Call) -> str:
        members = ", ".join(self._members)
        return f"{call.caller} may not {call.method} a message here: the group is {members}."

    def lost(self, node: str) -> None:
        """Fail all rounds after the loss of a member: none can end without it."""
        if node in self._members and not self._gone:
            self._gone = node
            for complete in self._complete.values():
                complete.fail(self._error())

    def complete(self, number: int) -> Operation[Any]:
        """An operation that ends once all messages of a round are here; with `give`, its value is their combination."""
        if number not in self._complete:
            complete = self._complete[number] = self._node.promise(f"all parts of round {number}")
            complete.when_done(nothing)  # its error is raised where it is awaited
            if self._gone:
                complete.fail(self._error())
        return self._complete[number]

    def messages(self, number: int) -> list[torch.Tensor]:
        """Take the messages of a complete round, in rank order, and forget the round."""
        came = self._rounds.pop(number)
        del self._complete[number]
        return [came[place][0] for place in range(len(self._members))]

    def faulty(self, number: int) -> list[int]:
        """Places of the members whose gradient in this round is not finite; asked for once."""
        return sorted(self._faulty.pop(number, ()))

    async def _combine(self, number: int) -> None:
        came = self._rounds.pop(number)
        complete = self._complete.pop(number)
        messages = {place: message for place, (message, _) in came.items()}
        shares = {place: share for place, (_, share) in came.items()}
        nbytes = 4 * self._owner.numel * len(came)
        work = Apply(lambda: self._owner.combine(messages, shares), nbytes, self._owner.codec_works(len(came)))
        try:
            complete.resolve((await self._node.compute(work), self.faulty(number)))
        except DamagedMessage as error:  # members wait for this combination, which never comes
            complete.fail(Refused(f"round {number} of {self._node.name}'s stripe cannot be combined: {error}"))

    async def _combined(self, complete: Operation[Any]) -> Reply:
        message, faulty = await complete
        return Reply({"nbytes": message.numel()} | ({"faulty": faulty} if faulty else {}), [message])

    def _error(self) -> PeerLost:
        return PeerLost(
            f"{self._gone} is gone, and a collective needs every rank. Use a method over a parameter server (ps), or "
            "resume from the last checkpoint."
        )


class CompressedGroup:
    """A `group` with encoded messages for `mean_gradient` and `mean_change`."""

    def __init__(self, node: Node, group: Group, codec: Codec, layers: Sequence[ShapedSlice], meter: Meter) -> None:
        self._node, self._group, self._meter = node, group, meter
        self.ranks = group.ranks
        self._members = [f"worker {rank}" for rank in self.ranks]
        self._gathers = codec.exchange == "all_gather"
        numel = layers[-1].stop
        here = list(self.ranks).index(node.rank)
        self._ranges = [(0, numel)] if self._gathers else equal_ranges(numel, len(self.ranks))
        layouts = [SliceLayout.of(layers, [part]) for part in self._ranges]
        self._coders = [codec.coder(layout, seed=node.rank) for layout in layouts]
        mine = 0 if self._gathers else here
        self._owner = Owner(codec, layouts[mine])
        self._desk = ChunkServer(node, self._members, self._owner, self._coders[mine].most_bytes)
        self._into: list[torch.Tensor] = []
        self._round = 0
        node.serve(SERVICE, self._desk)

    def mean_gradient(self, work: Any, share: float) -> Operation[Any]:
        """Compute a gradient, then encode and exchange it."""
        started = self._node.now()
        computing = self._node.compute(work)
        self._round += 1
        operation = self._node.spawn(self._exchange(computing, started, share, self._round), "the mean gradient")
        operation.when_done(nothing)  # its error is raised where it is awaited
        return operation

    def mean_values(self, values: torch.Tensor, share: float, *, faulty: bool = False) -> Operation[Sequence[int]]:
        """Replace `values` by the sum over members of `share * values`, encoded; the shares add up to 1.

        A member whose values are `faulty`, not finite, gives zeros in their place. Returns the places of these members.
        """
        self._round += 1
        more: dict[str, Any] = {"faulty": True} if faulty else {}
        return self._node.spawn(self._mean(values, share, self._round, **more), "the mean of values")

    @property
    def remembers(self) -> bool:
        """Whether the codec adds the error of a message to the next."""
        return bool(self.state().tensors)

    def mean_change(self, values: torch.Tensor, since: torch.Tensor, share: float) -> Operation[torch.Tensor]:
        """The sum over members of `share * values`, the shares adding up to 1; both stay as they are.

        The difference of `values` and `since`, which is equal at all members, travels encoded. So the codec's error is
        added to the next change, and the results are equal at all members too.
        """
        self._round += 1
        return self._node.spawn(self._mean_change(values - since, since, share, self._round), "the mean change")

    async def _mean_change(self, change: torch.Tensor, since: torch.Tensor, share: float, number: int) -> torch.Tensor:
        await self._mean(change, share, number)
        return change.add_(since)

    async def _exchange(self, computing: Operation[Any], started: float, share: float, number: int) -> Any:
        gradient = await computing
        computed = self._node.now()
        self._meter.add("compute", started, computed)
        more: dict[str, Any] = {} if all_finite(gradient.values) else {"faulty": True}
        if more:
            gradient.values.zero_()  # a codec cannot encode NaN
        faulty = await self._mean(gradient.values, share, number, **more)
        gradient.checked, gradient.faulty = True, [self.ranks[place] for place in faulty]
        self._meter.add("communicate", computed, self._node.now(), "all_reduce")
        return gradient

    async def _mean(self, values: torch.Tensor, share: float, number: int, **more: Any) -> Sequence[int]:
        """Replace `values` by the mean over all members; returns the places of the members that were `faulty`."""
        wide = values if isinstance(values, Ghost) or values.dtype in WIDE else values.float()
        faulty = await (self._gather if self._gathers else self._stripes)(wide, share, number, **more)
        if wide is not values:
            values.copy_(wide)
        return faulty

    async def _stripes(self, values: torch.Tensor, share: float, number: int, **more: Any) -> Sequence[int]:
        compute, calls = self._node.compute, []
        faulty: Sequence[int] = ()
        parts = [values[start:stop] for start, stop in self._ranges]
        replies = self._room(values)
        await compute(taking(*(CodecWork("encode", coder.numel) for coder in self._coders)))
        for owner, coder, part, into in zip(self._members, self._coders, parts, replies, strict=True):
            message, given = coder.encode(part), {"round": number, "share": share, **more}
            calls.append(self._node.call(Address(owner, SERVICE), "give", message, into=[into], at_most=True, **given))
        for owner, call, coder, part, into in zip(self._members, calls, self._coders, parts, replies, strict=True):
            reply = await self._answer(owner, call)
            await compute(taking(CodecWork("decode", coder.numel)))
            coder.decode(into[: reply.fields["nbytes"]], part)
            faulty = reply.fields.get("faulty", faulty)
        return faulty

    def _room(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Memory for the combined messages of all stripes, on the device of `like`; the same in all rounds."""
        if not self._into:
            self._into = [like.new_empty(coder.most_bytes, dtype=torch.uint8) for coder in self._coders]
        return self._into

    async def _gather(self, values: torch.Tensor, share: float, number: int, **more: Any) -> Sequence[int]:
        coder, count = self._coders[0], len(self._members)
        await self._node.compute(taking(CodecWork("encode", coder.numel)))
        message = coder.encode(values * (share * count))
        calls = [
            self._node.call(Address(member, SERVICE), "take", message, round=number, share=share, **more)
            for member in self._members
        ]
        for member, call in zip(self._members, calls, strict=True):
            await self._answer(member, call)
        await self._desk.complete(number)
        await self._node.compute(taking(CodecWork("combine", coder.numel, count)))
        add_up(coder, self._desk.messages(number), values)
        return self._desk.faulty(number)

    async def _answer(self, member: str, call: Operation[Reply]) -> Reply:
        try:
            return await call
        except RemoteError as error:
            self._desk.lost(member)  # members that wait here for the same round end with this error too
            raise PeerLost(str(error)) from error

    # ---- what survives a restart

    def state(self) -> State:
        """The tensors of the coders and of the owner, and the number of rounds."""
        return State(memory(self._coders, self._owner), {"rounds": self._round})

    def restore(self, state: State) -> None:
        """Continue from `state`."""
        self._round = state.plain["rounds"]
        remember(self._coders, self._owner, state.tensors)

    # ---- as without a codec

    def all_reduce(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._group.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor) -> Operation[list[torch.Tensor]]:
        return self._group.all_gather(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> Operation[torch.Tensor]:
        return self._group.reduce_scatter(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Operation[torch.Tensor]:
        return self._group.broadcast(tensor, root)

    def barrier(self) -> Operation[None]:
        return self._group.barrier()
