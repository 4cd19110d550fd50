"""Blockwise model-update filtering, and DiLoCo: the change of the mean model over a block is a gradient too.

Chen, Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block Parallel
Optimization and Blockwise Model-Update Filtering", ICASSP 2016 (BMUF); Douillard et al., "DiLoCo: Distributed
Low-Communication Training of Language Models", 2023, and "Streaming DiLoCo", 2025 (overlap, fragments).

    for block t = 1, 2, 3, ...                        at every worker k
        w_k   <- Wg                                   the model that all begin the block with
        period times:  w_k  <- Opt_k(w_k, gradient of f at w_k)
        G     <- mean of w_k - Wg                     over all workers
        Delta <- momentum Delta + zeta G
        W     <- W + Delta
        Wg    <- W                                    classical block momentum
        Wg    <- W + momentum Delta                   Nesterov's

| in the papers         | here                                                                              |
|-----------------------|-----------------------------------------------------------------------------------|
| eta (momentum), zeta  | `momentum`, `zeta`; a lasting G moves W by zeta G / (1 - momentum) per block      |
| CBM, NBM              | `nesterov`: false, true                                                           |
| DiLoCo's outer SGD    | Wg is where `torch.optim.SGD(lr=zeta, momentum, nesterov)` is on the gradient -G  |
| its inner AdamW       | the optimizer that the run asks for, else AdamW; its state stays with the worker  |
| the final model       | W, without lookahead                                                              |
| streaming: fragments  | the parameters are cut into `fragments`, each sent at a time of its own in the block |
| streaming: overlap    | their means are taken in `overlap` mini-batches later; steps made meanwhile stay  |
| parameter server      | it holds W and Delta; workers push Wg - w_k and look ahead by themselves          |

``momentum=0, zeta=1`` is model averaging; with one worker and ``zeta=0.5`` it is Lookahead.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple, cast

import torch

from dure.core.node import EndOfWork, Ghost, Operation
from dure.core.parameter import parameter
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.sync.worker import Worker


class _Sent(NamedTuple):
    """Fragment `cut` of everybody's model, whose `mean` is to be taken in at clock `due`."""

    due: int
    cut: slice
    mean: Operation[torch.Tensor]


@dataclass(frozen=True, slots=True)
class BMUF:
    """Model averaging every `period` steps, where the mean model moves with momentum."""

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
        topologies=("collective", "ps"),
        lockstep=True,
        delivers="mean",
        agreed="model",
        encodes=("collective", "ps"),
        changes=True,
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
        return replace(
            self.traits,
            streams=True,
            encodes=(),
            uncoded="a codec keeps the rest of a whole block's change; with overlap or fragments parts of it travel",
            objections={
                "ps": "a push holds the whole model and a block ends when it is applied, without overlap and fragments"
            },
        )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("sgd", lr=self.zeta, momentum=self.momentum), Barrier())

    async def work(self, worker: Worker) -> None:
        under_way = self.enter(worker)
        try:
            while True:
                worker.step(await worker.gradient())
                worker.heartbeat()
                if not worker.over_servers:
                    await self.meet(worker, under_way)
                elif worker.clock % self.period == 0:
                    await self.meet_at_servers(worker)
        except EndOfWork:
            if not worker.over_servers:
                await self.finish(worker, under_way)
            elif worker.clock % self.period:
                await self.meet_at_servers(worker)

    def enter(self, worker: Worker) -> deque[_Sent]:
        """Begin, or go on; what was under way is sent again."""
        began = worker.clock - worker.clock % self.period
        if worker.kept_plain.get("began") != began:  # the start, or a server's model that has gone on since
            worker.kept_plain["began"] = began
            for name in ("model", "start"):
                worker.keep(name).copy_(worker.params)
        elif worker.over_servers and worker.clock == began:
            worker.params.copy_(worker.keep("start"))
        times = [(self.last_sent(number, worker.clock), number) for number in range(self.fragments)]
        late = sorted(each for each in times if 0 < each[0] <= worker.clock < each[0] + self.overlap)
        cuts = self.cuts(worker)
        return deque(self.send(worker, cuts[number], at, worker.keep("sent")) for at, number in late)

    # ---- over collectives

    def cuts(self, worker: Worker) -> list[slice]:
        """The fragments of the flat parameters."""
        size, count = worker.params.numel(), self.fragments
        return [slice(number * size // count, (number + 1) * size // count) for number in range(count)]

    def last_sent(self, number: int, clock: int) -> int:
        """The last clock, up to `clock`, at which fragment `number` was due; 0 or less where it has not been yet."""
        offset = (number + 1) * self.period // self.fragments
        return clock - (clock - offset) % self.period

    async def meet(self, worker: Worker, under_way: deque[_Sent]) -> None:
        """Take in what is due, and send what is."""
        clock = worker.clock
        while under_way and under_way[0].due <= clock:
            await self.take_in(worker, under_way.popleft())
        for number, cut in enumerate(self.cuts(worker)):
            if self.last_sent(number, clock) == clock:
                under_way.append(self.send(worker, cut, clock, worker.params))
                if not self.overlap:
                    await self.take_in(worker, under_way.popleft())
        if clock % self.period == 0:
            worker.kept_plain["began"] = clock
            await worker.group.mean_buffers()

    def send(self, worker: Worker, cut: slice, clock: int, values: torch.Tensor) -> _Sent:
        """Start on the mean of a fragment of `values`."""
        if self.overlap:
            part(worker.keep("sent"), cut).copy_(part(values, cut))
        mean = worker.group.mean(part(values, cut), since=part(worker.keep("start"), cut))
        return _Sent(clock + self.overlap, cut, mean)

    async def take_in(self, worker: Worker, sent: _Sent) -> None:
        """The step from mean to mean; then w_k <- Wg and what this worker has done since it sent."""
        started = worker.node.now()
        mean = await sent.mean
        worker.meter.add("communicate", started, worker.node.now(), "all_reduce")
        if isinstance(mean, Ghost):
            return
        model, start, params = (
            vector[sent.cut] for vector in (worker.keep("model"), worker.keep("start"), worker.params)
        )
        before = model.clone()
        delta = worker.keep("delta")[sent.cut]
        model.copy_(start.lerp(mean, self.zeta))
        if not self.nesterov:
            model.add_(delta, alpha=self.momentum)
        delta.copy_(model - before)
        start.copy_(model)
        if self.nesterov:
            start.add_(delta, alpha=self.momentum)
        params.copy_(start + (params - worker.keep("sent")[sent.cut]) if self.overlap else start)

    async def finish(self, worker: Worker, under_way: deque[_Sent]) -> None:
        """Take in all that has been sent, send what has not, and deliver W."""
        while under_way:
            await self.take_in(worker, under_way.popleft())
        for number, cut in enumerate(self.cuts(worker)):
            if self.last_sent(number, worker.clock) != worker.clock:
                await self.take_in(worker, self.send(worker, cut, worker.clock, worker.params))
        if worker.clock % self.period:
            await worker.group.mean_buffers()
        worker.params.copy_(worker.keep("model"))

    # ---- over servers

    async def meet_at_servers(self, worker: Worker) -> None:
        """The servers make W of the mean of Wg - w_k; how far it went shows where to look ahead to."""
        model, start = worker.keep("model"), worker.keep("start")
        await worker.server.push(start - worker.params, stats={"clock": worker.clock})
        await worker.server.next_version()
        if self.nesterov:
            start.copy_(worker.params + (worker.params - model) * self.momentum)
        else:
            start.copy_(worker.params)
        model.copy_(worker.params)
        worker.params.copy_(start)
        worker.kept_plain["began"] = worker.clock


def part(values: torch.Tensor, cut: slice) -> torch.Tensor:
    """A fragment, also of what stands for a tensor where only time counts."""
    if isinstance(values, Ghost):
        return cast(torch.Tensor, Ghost(cut.stop - cut.start, values.nbytes // max(values.numel(), 1)))
    return values[cut]


@dataclass(frozen=True, slots=True)
class DiLoCo:
    """BMUF with AdamW at the workers and Nesterov momentum of the mean model."""

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
        """The same with all its parameters."""
        return BMUF(self.period, self.momentum, self.lr, True, self.overlap, self.fragments)

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return self.outer.server_rule(optimizer)

    async def work(self, worker: Worker) -> None:
        await self.outer.work(worker)
