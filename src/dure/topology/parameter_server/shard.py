"""A parameter server: shards that hold the model, a clock that admits, and the client that a worker uses.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014; the servers of Dean et
al., "Large Scale Distributed Deep Networks", NeurIPS 2012. The messages of an update that asks for order:

    worker                    shards 0..S-1                     clock
      ask ----------------------------------------------------->  may it start?
      <-------------------------------------------- version v --
      pull v ------------------> its slice at v
      push (seq, base) --------> staged, not applied
      staged (seq) -------------------------------------------->  closes its group, sooner or later
                                 <--- close (group, members) --
                                 applied in the clock's order

Where a method asks for the next step at once, `staged` and `ask` are one call, `next`; with one shard all is one call
(`ClockedShard`). The bytes go to the shards only; the clock's messages are tiny. A worker that fails between its pushes
to two shards has not called `staged`, so its update is in no group, on any shard. Updates without order (Downpour) are
applied where and when they arrive: then shards may disagree about the last updates of a worker that failed.

A shard is made of its versions (`versions`), the updates that arrive (`staging`), the step from updates to the next
version (`apply`) and named vectors for a coordinator (`vectors`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from dure.core.node import Address, Call, CodecWork, Ghost, Node, Reply, TensorSpec, taking
from dure.core.protocol import CLOCK, COUNT, DRIVER, OWN, TEXT, TRUTH, WORKERS, Method, listed, maybe, nullable
from dure.core.state import State
from dure.errors import Refused, WorkOver
from dure.job.optimizer import FlatOptimizer, GroupRange, OptimizerSpec
from dure.topology.fields import CLOSED, COMMAND, HAS, LEFT, LIFE, PUSHED, WORD
from dure.topology.parameter_server.apply import Rule, Updater
from dure.topology.parameter_server.staging import StagingArea
from dure.topology.parameter_server.vectors import Vectors
from dure.topology.parameter_server.versions import GENERATION, Versions

if TYPE_CHECKING:
    import torch

    from dure.codec.base import Vote
    from dure.codec.coder import Coder
    from dure.core.node import Service
    from dure.core.ranges import Ranges
    from dure.topology.parameter_server.admission import Policy
    from dure.topology.parameter_server.clock import ClockService
    from dure.topology.parameter_server.staging import Corrections


class Shard:
    """One server's slice of the model: a service.

    `values` is the slice at version 0 (copied). `ranges` are the ranges of the flat parameters that it holds; a
    tensor travels as one piece per range. `segments` are parameter groups in the slice's own coordinates
    (`optim.restrict`). In a timing-only run `values` is a `Ghost`: the shard moves sizes and versions, and computes
    nothing.
    `log` keeps (worker, incarnation, seq) of everything applied, for `status`. `corrections` change each gradient
    before it is applied (`corrections`). With a `coder`, an update is pushed as its message. With a `vote`, members of
    a group are put to the vote in place of `reduce`: `follow` gives a worker at version `has` the message of the vote
    that leads from there (`verdicts`). An update on arrival whose staleness here is above `max_delay` is refused: it is
    acknowledged, and not applied.

    | method   | fields                                                  | tensors | reply                         |
    |----------|---------------------------------------------------------|---------|-------------------------------|
    | `push`   | worker, incarnation, seq, base, weight, ordered,        | slice   | version; once staged or applied |
    |          | gradients, (lr),                                        |         |                               |
    |          | (exponent: of e, which multiplies the weight), pull: in |         |                               |
    |          | the same call, if not ordered; void: zeros that make no |         | and slice                     |
    |          | step by themselves                                      |         |                               |
    | `close`  | version, group, members, drop, reduce                   |         | version; once applied         |
    | `pull`   | (version), (worker, incarnation: it works on that),     |         | version and slice; once there |
    |          | (counted)                                               |         | (and gradients)               |
    | `held`   | version                                                 |         | gradients in that version     |
    | `follow` | version, has                                            |         | version, lr and message, if any |
    | `optimizer` | version                                              |         | steps and vectors, if newest  |
    | `withdraw` | worker, incarnation, seq                              |         | once no longer staged         |
    | `leave`  | worker, incarnation, keep                               |         | once only `keep` is staged    |
    | `status` |                                                         |         | counters                      |
    | `order`, `stage`, `fetch` | on its named vectors (`vectors.Vectors`) |       |                               |

    `members` are `[[worker, seq], ...]` in rank order, combined in that order by `reduce`: "mean" (weighted by
    `weight`, the batch sizes) or "sum". Groups are applied in the order of their `version`, the one they make.
    A version stays until a `close` names it in `drop`. `lr` is a rate, or one per parameter group. An update is made of
    `gradients` mini-batches; the shard counts those in its values.
    A shard that has lost what it applied since a snapshot goes on from there in a new generation (`start_generation`),
    so that no version ever stands for two things.
    """

    def __init__(
        self,
        node: Node,
        values: torch.Tensor,
        spec: OptimizerSpec,
        *,
        ranges: Ranges | None = None,
        segments: Sequence[GroupRange] = (),
        log: bool = False,
        corrections: Corrections | None = None,
        coder: Coder | None = None,
        vote: Vote | None = None,
        max_delay: int | None = None,
    ) -> None:
        self.node = node
        sizes = [values.numel()] if ranges is None else [stop - start for start, stop in ranges]
        timing_only = isinstance(values, Ghost)
        optimizer = None
        if not timing_only:
            optimizer = FlatOptimizer(spec, values.numel(), values.dtype, segments=segments, device=values.device)
        rule = Rule(optimizer, corrections, coder, vote, max_delay)
        self.versions = Versions(node, values, sizes)
        self.staging = StagingArea(self.versions, corrections, coder)
        self.updater = Updater(rule, self.versions, self.staging, values.nbytes, log=log)
        self.vectors = Vectors(self.versions, self.staging, self.updater, values.nbytes)
        self.corrections = corrections
        self._coder = coder
        dtype = "float32" if timing_only else str(values.dtype).removeprefix("torch.")
        self._specs = tuple(TensorSpec(dtype, elements) for elements in sizes)
        self.methods = self._methods(rule) | self.vectors.methods

    def _methods(self, rule: Rule) -> dict[str, Callable[[Call], Reply | Awaitable[Reply]]]:
        """The handlers of the table above, by the name of the method."""
        return {
            "push": self._push if rule.coder is None else partial(self._push_message, rule.coder),
            "close": self.updater.close,
            "pull": self._pull_to_work if rule.looks_back else self.versions.pull,
            "held": self.versions.held,
            "follow": self.updater.verdicts.follow,
            "optimizer": self.updater.optimizer_state,
            "withdraw": self.staging.withdraw,
            "leave": self.staging.leave,
            "status": self._status,
        }

    protocol: ClassVar[Mapping[str, Method]] = {
        "push": Method(WORKERS, PUSHED),
        "close": Method(CLOCK, CLOSED),
        "pull": Method(
            (*DRIVER, *WORKERS),
            {
                "version": maybe(nullable(COUNT)),
                "counted": maybe(TRUTH),
                "worker": maybe(OWN),
                "incarnation": maybe(COUNT),
            },
        ),
        "held": Method(WORKERS, {"version": COUNT}),
        "follow": Method(WORKERS, {"version": nullable(COUNT), "has": nullable(COUNT)}),
        "optimizer": Method(WORKERS, {"version": COUNT}),
        "withdraw": Method(WORKERS, {**LIFE, "seq": COUNT}),
        "leave": Method(CLOCK, LEFT),
        "status": Method((*DRIVER, *WORKERS)),
        "order": Method(CLOCK, {"commands": listed(COMMAND)}),
        "stage": Method(WORKERS, {**LIFE, "seq": COUNT}),
        "fetch": Method(WORKERS, {"name": TEXT}),
    }

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        method = self.methods.get(call.method)
        if method is None:
            raise Refused(f'a shard has no method "{call.method}"; it has {", ".join(self.methods)}.')
        return method(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        if method == "push" and self._coder is not None:
            return (TensorSpec("uint8", self._coder.most_bytes, at_most=True),)
        return self._specs if method in ("push", "stage") else ()

    # ---- what a run reads

    @property
    def version(self) -> int:
        """Groups (or, without order, updates) applied."""
        return self.versions.current.version

    @property
    def values(self) -> torch.Tensor:
        """The slice at `version`; not to be written to."""
        return self.versions.current.tensor

    @property
    def applied(self) -> int:
        """Updates applied."""
        return self.updater.applied

    @property
    def refused(self) -> int:
        """Updates refused."""
        return self.staging.refused

    @property
    def gradients(self) -> int:
        """Mini-batches in the slice at `version`."""
        return self.updater.gradients

    @property
    def staleness(self) -> Mapping[int, int]:
        """Updates applied, by their staleness."""
        return self.updater.staleness

    # ---- pushes

    async def _push_message(self, coder: Coder, call: Call) -> Reply:
        """As `_push`, with a message in place of the slice. Decoding takes a turn, as all work of a shard."""
        await self.updater.in_turn(taking(CodecWork("decode", coder.numel)))
        answer = self._push(self.staging.decoded(call))
        return answer if isinstance(answer, Reply) else await answer

    def _push(self, call: Call) -> Reply | Awaitable[Reply]:
        if call.fields["ordered"]:
            self.staging.stage(call)
            return Reply({"version": self.versions.current.version})
        if self.staging.is_new(call.fields, call.tensors):
            return self._apply_on_arrival(call)
        return self._acknowledge_in_turn(call)

    async def _apply_on_arrival(self, call: Call) -> Reply:
        fields, corrections, turns = call.fields, self.corrections, self.updater.turns
        copied = None if len(call.tensors) == 1 and corrections is None else self.staging.copy(call.tensors)
        if corrections is not None:
            corrections.pushed(fields["worker"], fields["seq"], fields.get("base"))
        if turns.busy:
            await turns.wait(self.node)
        turns.busy = True
        try:
            gradient = call.tensors[0] if copied is None else copied.tensor
            await self.node.compute(self.updater.on_arrival(fields, gradient))
        finally:
            turns.end()
        if copied is not None:
            copied.release()
        return self._acknowledged(call)

    async def _acknowledge_in_turn(self, call: Call) -> Reply:
        """Acknowledge a repeated update behind those in the queue: it may be among them, and must be applied first."""
        turns = self.updater.turns
        if turns.busy:
            await turns.wait(self.node)
        turns.busy = True
        turns.end()
        return self._acknowledged(call)

    def _acknowledged(self, call: Call) -> Reply:
        """The answer to an applied update: the version, and the newest slice if the call asks for it."""
        current = self.versions.current
        if not call.fields.get("pull"):
            return Reply({"version": current.version})
        answer = current.lease()
        if self.corrections is not None and self.corrections.compares:
            self._remember(self.corrections, call, answer)
        return answer

    # ---- pulls, where corrections look back

    def _pull_to_work(self, call: Call) -> Reply | Awaitable[Reply]:
        """Answer a pull, and remember the version if a worker is to compute its next gradient on it."""
        answer, corrections = self.versions.pull(call), self.corrections
        if "worker" not in call.fields or corrections is None:
            return answer
        if not isinstance(answer, Reply):
            return self._remember_later(corrections, call, answer)
        self._remember(corrections, call, answer)
        return answer

    async def _remember_later(self, corrections: Corrections, call: Call, answer: Awaitable[Reply]) -> Reply:
        reply = await answer
        self._remember(corrections, call, reply)
        return reply

    def _remember(self, corrections: Corrections, call: Call, reply: Reply) -> None:
        buffer = self.versions.find(reply.fields["version"])
        if buffer is not None:
            corrections.pulled(call.fields["worker"], call.fields["incarnation"], buffer)

    def _status(self, call: Call) -> Reply:
        log = self.updater.log
        return Reply(
            {
                "version": self.version % GENERATION,
                "epoch": self.version // GENERATION,
                "applied": self.applied,
                "refused": self.refused,
                "gradients": self.gradients,
                "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
                "last": {str(worker): seq for worker, seq in sorted(self.staging.sequences.last().items())},
                "staged": len(self.staging),
                "buffers": self.versions.pool.made,
                "log": None if log is None else [list(entry) for entry in log],
            }
        )

    # ---- checkpoints

    def state(self, keep: Sequence[int] | None = None) -> State:
        """The state that a checkpoint keeps, while no update is being applied. The tensors are no copies.

        The versions before the newest are those in `keep`, or all.
        """
        kept = self.versions.kept(keep)
        state = self.versions.state(kept) | self.staging.state() | self.updater.state()
        state |= self.vectors.state().under("vector", "vectors")
        if self.corrections is not None:
            state |= self.corrections.state(saved=(self.version, *kept))
        return state

    def restore(self, state: State) -> None:
        """Continue from `state`, on a fresh shard."""
        for part in (self.versions, self.staging, self.updater):
            part.restore(state)
        self.versions.current.gradients = self.gradients
        self.vectors.restore(state.part("vector", "vectors"))
        if self.corrections is not None:
            self.corrections.restore(state, self.versions.holding(state.tensors))

    def start_generation(self, lives: int) -> None:
        """Go on after `restore` while the workers go on too: number versions anew, and forget what workers have read.

        `lives` counts the restarts of this shard in its run.
        """
        self.versions.start_generation(lives)
        if self.corrections is not None:
            self.corrections.forget_readers()


NAME = "clocked shard"
"""That of the service at its node."""


def clocked_at(shards: Sequence[Address], policy: Policy | None) -> Address | None:
    """Where shard and clock can be asked in one call; None where there are several shards, or no order."""
    return Address(shards[0].node, NAME) if len(shards) == 1 and policy is not None and policy.ordered else None


def serve_clock(node: Node, clock: ClockService, shard: Service) -> None:
    """Host the clock on the first server, and with its shard what `clocked_at` tells of."""
    node.serve("clock", clock)
    if isinstance(shard, Shard):
        node.serve(NAME, ClockedShard(shard, clock))


class ClockedShard:
    """The only shard of a model and the clock beside it, as one service: what a step asks of both, it asks in one call.

        worker                        the server
          exchange (seq, base) ------>  staged; its group closes, sooner or later
                                        held until the worker may start its next step, on version v
          <----------- version v --  its slice at v, once applied

    | method     | fields and tensors                      | reply                                               |
    |------------|-----------------------------------------|-----------------------------------------------------|
    | `push`     | a shard's `push` and a clock's `staged` | version; once counted                               |
    | `proceed`  | a clock's `ask`                         | as `ask`; slice at that version, and seconds `held` |
    | `exchange` | `push`                                  | as `proceed`, after a `push`                        |

    Where the fields say which version the worker `has`, the reply's tensor is a shard's reply to `follow`.

    Nothing comes between an update's staging and its word to the clock. Where `ask` says that the work is over,
    `WorkOver` is raised.
    """

    def __init__(self, shard: Shard, clock: ClockService) -> None:
        self._shard = shard
        self._now = clock.node.now
        self._stage = shard.methods["push"]
        self._staged, self._ask = clock.methods["staged"], clock.methods["ask"]
        self._methods: dict[str, Callable[[Call], Awaitable[Reply]]] = {
            "push": self._push,
            "proceed": self._proceed,
            "exchange": self._exchange,
        }

    protocol: ClassVar[Mapping[str, Method]] = {
        "push": Method(WORKERS, {**PUSHED, **WORD}),
        "proceed": Method(WORKERS, {**LIFE, **HAS}),
        "exchange": Method(WORKERS, {**PUSHED, **WORD, **HAS}),
    }

    def handle(self, call: Call) -> Awaitable[Reply]:
        method = self._methods.get(call.method)
        if method is None:
            raise Refused(f'a clocked shard has no method "{call.method}"; it has {", ".join(self._methods)}.')
        return method(call)

    def expects(self, method: str) -> Sequence[TensorSpec]:
        return () if method == "proceed" else self._shard.expects("push")

    async def _push(self, call: Call) -> Reply:
        staging = self._stage(call)
        reply = staging if isinstance(staging, Reply) else await staging
        call.release()
        self._staged(call)
        return reply

    async def _proceed(self, call: Call) -> Reply:
        fields, asked = call.fields, self._now()
        asking = self._ask(call)
        admitted = (asking if isinstance(asking, Reply) else await asking).fields
        if "over" in admitted:
            raise WorkOver(f"no step is left for worker {fields['worker']}: too few workers are left to go on.")
        held = self._now() - asked
        method = "follow" if "has" in fields else "pull"
        asked_for = Call(call.caller, method, {**fields, "version": admitted["version"]}, ())
        pulling = self._shard.methods[method](asked_for)
        pulled = pulling if isinstance(pulling, Reply) else await pulling
        return Reply({**admitted, **pulled.fields, "held": held}, pulled.tensors, pulled.release)

    async def _exchange(self, call: Call) -> Reply:
        await self._push(call)
        return await self._proceed(call)
