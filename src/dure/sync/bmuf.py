"""Blockwise model-update filtering: the mean model steps, with momentum, by its mean change over a block of steps.

Chen, Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block Parallel
Optimization and Blockwise Model-Update Filtering", ICASSP 2016; overlap and fragments as in Douillard et al.,
"Streaming DiLoCo", 2025.

    for block t = 1, 2, 3, ...                        at every worker k
        w_k   <- Wg                                   the model at the start of the block, equal at all workers
        period times:  w_k  <- Opt_k(w_k, gradient of f at w_k)
        G     <- mean of w_k - Wg                     over all workers
        Delta <- momentum Delta + zeta G
        W     <- W + Delta
        Wg    <- W                                    classical block momentum
        Wg    <- W + momentum Delta                   Nesterov's

| in the papers         | here                                                                              |
|-----------------------|-----------------------------------------------------------------------------------|
| eta (momentum), zeta  | `momentum`, `zeta`; a constant G moves W by zeta G / (1 - momentum) per block     |
| CBM, NBM              | `nesterov`: false, true                                                           |
| the final model       | W, without lookahead                                                              |
| streaming: fragments  | the parameters are cut into `fragments`, each sent at its own time (`_Fragments`) |
| streaming: overlap    | a mean is applied `overlap` steps later; the steps made meanwhile stay            |
| parameter server      | it holds W and Delta; workers push Wg - w_k and compute the look-ahead themselves |

``momentum=0, zeta=1`` is model averaging; with one worker and ``zeta=0.5`` it is Lookahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from dure.core.catalogue import parameter
from dure.core.node import EndOfWork, Ghost, Operation
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.sync.worker import Worker


class _Sent(NamedTuple):
    """A fragment under way: the `mean` of the range `cut` of all models, applied at clock `due`."""

    due: int
    cut: slice
    mean: Operation[Tensor]


@dataclass(frozen=True, slots=True)
class BMUF:
    """Model averaging every `period` steps, in which the mean model moves with momentum."""

    paper: ClassVar[str] = (
        "Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with "
        "Intra-Block Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016"
    )

    period: int = parameter(10, "steps of each worker in a block, between two averages", range=">= 1", unit="steps")
    momentum: float = parameter(0.9, "momentum of the mean model from block to block", range=">= 0, < 1", symbol="η")
    zeta: float = parameter(
        1.0, "rate of the block step: factor of the mean change of a block", range=">= 0", symbol="ζ"
    )
    nesterov: bool = parameter(
        True, "Nesterov block momentum, where a block begins with a look-ahead; false: classical"
    )
    overlap: int = parameter(
        0,
        "steps that workers make while an average is under way; 0: they wait",
        range=">= 0, <= period",
        unit="steps",
    )
    fragments: int = parameter(
        1, "parts of the model, each averaged at a time of its own in the block", range=">= 1, <= period", unit="parts"
    )

    traits: ClassVar[Traits] = Traits(
        needs=("group", "servers"),
        messages=Messages(over=("group", "servers"), changes=True),
        lockstep=True,
        delivers="mean",
        agreed="model",
        staged=True,
        regroups=True,
        keeps={"group": ("model", "start", "delta"), "servers": ("model", "start")},
    )

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ValueError(f"period counts mini-batches and must be >= 1, got {self.period}. Use 1 for every step.")
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum must be at least 0 and below 1, got {self.momentum}. Use 1 - 1/K for K workers."
            )
        if not self.zeta >= 0:
            raise ValueError(f"zeta scales the mean change of a block and must be >= 0, got {self.zeta}. Use 1.")
        if not 0 <= self.overlap <= self.period:
            raise ValueError(f"overlap must be between 0 and the period ({self.period}), got {self.overlap}.")
        if not 1 <= self.fragments <= self.period:
            raise ValueError(f"fragments must be between 1 and the period ({self.period}), got {self.fragments}.")

    def adapted(self) -> Traits:
        """The traits under these parameters: with overlap or fragments, parts of the model are sent on their own."""
        if not self.overlap and self.fragments == 1:
            return self.traits
        reasons = Reasons(
            objections={
                "servers": "a push holds the whole model and a block ends when it is applied, without overlap and "
                "fragments"
            },
            codec="a codec keeps the rest of a whole block's change; with overlap or fragments parts of it travel",
            stages="fragments cut the vector of the whole model" if self.fragments > 1 else "",
        )
        keeps = {"group": ("model", "start", "delta", *(["sent"] if self.overlap else ()))}
        messages = Messages(changes=True)
        return replace(self.traits, reasons=reasons, messages=messages, agreed=None, regroups=False, keeps=keeps)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("sgd", lr=self.zeta, momentum=self.momentum), Barrier())

    async def work(self, worker: Worker) -> None:
        self.enter(worker)
        if worker.over_servers:
            await self.over_servers(worker)
        else:
            await self.over_collective(worker)

    def enter(self, worker: Worker) -> None:
        """Begin a block, or continue the block of a checkpoint."""
        began = worker.clock - worker.clock % self.period
        if self.is_unaveraged(worker):
            return
        if worker.kept_plain.get("began") != began:  # the start, or a server's model that has changed since
            worker.kept_plain["began"] = began
            for name in ("model", "start"):
                worker.keep(name).copy_(worker.params)
        elif worker.over_servers and worker.clock == began:
            worker.params.copy_(worker.keep("start"))

    def is_unaveraged(self, worker: Worker) -> bool:
        """Whether a member of the group has failed in the average of this block, which is made again."""
        return not worker.over_servers and worker.kept_plain.get("began") == worker.clock - self.period

    # ---- over servers

    async def over_servers(self, worker: Worker) -> None:
        try:
            while True:
                worker.step(await worker.gradient())
                worker.heartbeat()
                if worker.clock % self.period == 0:
                    await self.block_at_servers(worker)
        except EndOfWork:
            if worker.clock % self.period:
                await self.block_at_servers(worker)

    async def block_at_servers(self, worker: Worker) -> None:
        """Push Wg - w_k; the servers step to the next W by the mean. The change of W gives the look-ahead."""
        model, start = worker.keep("model"), worker.keep("start")
        # The servers hold W without look-ahead. Their SGD subtracts, so the change is pushed with its sign reversed.
        await worker.server.push(start - worker.params, stats={"clock": worker.clock})
        await worker.server.next_version()
        if self.nesterov:
            start.copy_(worker.params + (worker.params - model) * self.momentum)
        else:
            start.copy_(worker.params)
        model.copy_(worker.params)
        worker.params.copy_(start)
        worker.kept_plain["began"] = worker.clock

    # ---- over collectives

    @property
    def streams(self) -> _Fragments:
        """The fragments and their times."""
        return _Fragments(self.fragments, self.period, self.overlap)

    async def over_collective(self, worker: Worker) -> None:
        streams, cuts, kept = self.streams, self.streams.cuts(worker.params.numel()), worker.kept_plain
        worker.state.last_sync = kept["began"]
        # Means that were under way at a checkpoint are started again, from the vectors as they were sent.
        under_way = deque(
            self.send(worker, cuts[number], sent, worker.keep("sent"))
            for sent, number in streams.under_way(worker.clock)
        )
        try:
            while True:
                if not self.is_unaveraged(worker):
                    worker.step(await worker.gradient())
                await self.exchange(worker, [cuts[number] for number in streams.sent_at(worker.clock)], under_way)
        except EndOfWork:
            if kept.get("ended") != worker.clock:
                unsent = [cuts[number] for number in streams.unsent(worker.clock)]
                await self.finish(worker, unsent, under_way)

    async def exchange(self, worker: Worker, cuts: list[slice], under_way: deque[_Sent]) -> None:
        """Apply the means that are due, and send the fragments that are due."""
        ends = worker.clock % self.period == 0
        # Before the model changes: if a member fails until then, the average is made again.
        buffers = await worker.group.merged_buffers() if ends else None
        while under_way and under_way[0].due <= worker.clock:
            await self.take_in(worker, under_way.popleft())
        for cut in cuts:
            under_way.append(self.send(worker, cut, worker.clock, worker.params))
            if not self.overlap:
                await self.take_in(worker, under_way.popleft())
        if ends:
            worker.state.buffers = buffers
            worker.state.last_sync = worker.kept_plain["began"] = worker.clock

    def send(self, worker: Worker, cut: slice, clock: int, values: Tensor) -> _Sent:
        """Start the mean of a fragment of `values`."""
        if self.overlap:  # the steps until the mean is there are the difference from this copy
            _part(worker.keep("sent"), cut).copy_(_part(values, cut))
        mean = worker.group.mean(_part(values, cut), since=_part(worker.keep("start"), cut))
        return _Sent(clock + self.overlap, cut, mean)

    async def take_in(self, worker: Worker, sent: _Sent) -> None:
        """Make the block step of a fragment; then set w_k to Wg plus the change of w_k since the fragment was sent."""
        started = worker.node.now()
        mean = await sent.mean
        worker.state.meter.add("communicate", started, worker.node.now(), "all_reduce")
        if isinstance(mean, Ghost):
            return  # only time counts
        start, params = worker.keep("start")[sent.cut], worker.params[sent.cut]
        self.block_step(worker.keep("model")[sent.cut], start, worker.keep("delta")[sent.cut], mean)
        params.copy_(start + (params - worker.keep("sent")[sent.cut]) if self.overlap else start)

    def block_step(self, model: Tensor, start: Tensor, delta: Tensor, mean: Tensor) -> None:
        """Step from W (`model`) and Wg (`start`) to their next values, by the `mean` of all w_k."""
        before = model.clone()
        model.copy_(start.lerp(mean, self.zeta))
        if not self.nesterov:
            model.add_(delta, alpha=self.momentum)
        delta.copy_(model - before)
        start.copy_(model)
        if self.nesterov:
            start.add_(delta, alpha=self.momentum)

    async def finish(self, worker: Worker, unsent: list[slice], under_way: deque[_Sent]) -> None:
        """Apply the means under way, average the fragments that are not sent yet, and deliver W."""
        buffers = worker.state.buffers if worker.clock % self.period == 0 else await worker.group.merged_buffers()
        while under_way:
            await self.take_in(worker, under_way.popleft())
        for cut in unsent:
            await self.take_in(worker, self.send(worker, cut, worker.clock, worker.params))
        worker.params.copy_(worker.keep("model"))
        worker.state.buffers = buffers
        worker.state.last_sync = worker.kept_plain["ended"] = worker.clock


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """BMUF with AdamW at the workers and Nesterov momentum of the mean model.

    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, and "Streaming DiLoCo",
    2025 (overlap, fragments).

        for round t = 1, 2, 3, ...                        at every worker k
            w_k    <- w
            period times:  w_k  <- AdamW(w_k, gradient of f at w_k)        the inner steps
            Delta  <- mean of w - w_k                     over all workers
            w      <- SGD(w, Delta, lr, momentum, Nesterov)                the outer step

    | in the paper      | here                                                                             |
    |-------------------|----------------------------------------------------------------------------------|
    | H                 | `period`                                                                         |
    | outer optimizer   | BMUF with zeta = `lr`: Wg is where `torch.optim.SGD(lr, momentum, nesterov=True)` is |
    | inner optimizer   | the optimizer of the run if it names one, else AdamW; its state stays at the worker |
    """

    paper: ClassVar[str] = "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023"

    period: int = parameter(30, "steps of each worker between two averages", range=">= 1", unit="steps", symbol="H")
    lr: float = parameter(0.7, "learning rate of the outer step, from mean model to mean model", range=">= 0")
    momentum: float = parameter(0.9, "Nesterov momentum of the outer step", range=">= 0, < 1")
    overlap: int = parameter(
        0,
        "steps that workers make while an average is under way; 0: they wait",
        range=">= 0, <= period",
        unit="steps",
    )
    fragments: int = parameter(
        1, "parts of the model, each averaged at a time of its own in the block", range=">= 1, <= period", unit="parts"
    )

    traits: ClassVar[Traits] = BMUF.traits

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr is the outer learning rate and must be >= 0, got {self.lr}. The paper's is 0.7.")
        _ = self.outer

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(self.outer.adapted(), local_optimizer=OptimizerSpec("adamw", lr=0.001, weight_decay=0.1))

    @property
    def outer(self) -> BMUF:
        """BMUF with these parameters."""
        return BMUF(self.period, self.momentum, self.lr, True, self.overlap, self.fragments)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return self.outer.server_rule(optimizer)

    async def work(self, worker: Worker) -> None:
        await self.outer.work(worker)


@dataclass(frozen=True, slots=True)
class _Fragments:
    """The times and the places of `count` fragments in blocks of `period` steps.

    The mean of a fragment is taken in `overlap` steps after the fragment was sent.

    >>> two = _Fragments(2, period=6, overlap=1)
    >>> [(clock, two.sent_at(clock)) for clock in range(1, 7) if two.sent_at(clock)]
    [(3, [0]), (6, [1])]
    >>> two.under_way(3), two.under_way(4), two.unsent(4)
    ([(3, 0)], [], [0, 1])
    """

    count: int
    period: int
    overlap: int

    def cuts(self, numel: int) -> list[slice]:
        """Return the range of each fragment in a flat vector."""
        return [slice(i * numel // self.count, (i + 1) * numel // self.count) for i in range(self.count)]

    def last_sent(self, number: int, clock: int) -> int:
        """Return the last clock, up to `clock`, at which a fragment was sent; 0 or less before the first time."""
        offset = (number + 1) * self.period // self.count
        return clock - (clock - offset) % self.period

    def sent_at(self, clock: int) -> list[int]:
        """Return the numbers of the fragments that are sent at `clock`."""
        return [number for number in range(self.count) if self.last_sent(number, clock) == clock]

    def unsent(self, clock: int) -> list[int]:
        """Return the numbers of the fragments that are not sent at `clock`."""
        return [number for number in range(self.count) if self.last_sent(number, clock) != clock]

    def under_way(self, clock: int) -> list[tuple[int, int]]:
        """Return the fragments whose means are not yet taken in at `clock`: when each was sent, and its number."""
        times = ((self.last_sent(number, clock), number) for number in range(self.count))
        return sorted((sent, number) for sent, number in times if 0 < sent <= clock < sent + self.overlap)


def _part(values: torch.Tensor, cut: slice) -> torch.Tensor:
    """Return a fragment of a vector, or of the placeholder for one where only time counts."""
    if isinstance(values, Ghost):
        return cast(torch.Tensor, Ghost(cut.stop - cut.start, values.nbytes // max(values.numel(), 1)))
    return values[cut]
