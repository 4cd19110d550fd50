"""Local SGD, the algorithm of `averaging`: workers step alone, and average their models at the end of each round.

for t = 1, 2, 3, ...                              at every worker k
    w_k  <- Opt_k(w_k, gradient of f at w_k)
    if t - last average = steps of the round      `pace`
        w_k     <- sum of c_k w_k                 over all workers, sum of c_k = 1: `weights`
        period  <- the schedule's next one        `schedule`
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dure.core.node import EndOfWork
from dure.core.state import State
from dure.sync.period import Rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dure.job.gradient_source import LocalOptimizer
    from dure.sync.pace import Pace
    from dure.sync.period import Schedule
    from dure.sync.weights import Weights
    from dure.sync.worker import Worker
    from dure.topology.replica import Stats


@dataclass(frozen=True, slots=True)
class LocalSGD:
    """The algorithm on values: `period` is the first one; `state` is "keep", "average" or "reset" (the optimizer's)."""

    period: int
    schedule: Schedule
    weights: Weights
    pace: Pace
    state: str

    async def work(self, worker: Worker) -> None:
        kept = worker.kept_plain
        self.enter(worker)
        try:
            while not any(stats["last"] for stats in worker.state.stats):
                if not kept["pushed"]:
                    await self.step(worker)
                if worker.clock >= kept["due"]:
                    await self.average(worker)
        except EndOfWork:
            if worker.clock != kept["began"]:
                await self.average(worker, last=not self.pace.lockstep)

    def enter(self, worker: Worker) -> None:
        """Begin at the round of the other workers, or at the round of this worker before a restart."""
        kept = worker.kept_plain
        sent = worker.state.stats
        rounds = self.after(sent) if sent else Rounds(**kept.get("rhythm", {"period": self.period}))
        if kept.get("rhythm") != rounds.plain or worker.clock == kept["began"]:
            self.begin(worker, rounds)
        worker.state.last_sync = kept["began"]

    def begin(self, worker: Worker, rounds: Rounds) -> None:
        """Begin a round."""
        kept = worker.kept_plain
        worker.state.last_sync = worker.clock
        steps = self.pace.steps(rounds, kept.get("step", 0.0))
        kept |= {"rhythm": rounds.plain, "began": worker.clock, "due": worker.clock + steps}
        kept |= {"loss": 0.0, "seconds": 0.0, "pushed": False}
        if not self.pace.lockstep or (not worker.over_servers and worker.group.encodes):
            worker.keep("start").copy_(worker.params)
        self.weights.begin(worker)

    async def step(self, worker: Worker) -> None:
        """Make a local step, and add up the figures of the round."""
        started = worker.node.now()
        gradient = await worker.gradient()
        worker.kept_plain["seconds"] += worker.node.now() - started
        worker.kept_plain["loss"] += worker.state.loss
        self.weights.add(worker, gradient)
        worker.step(gradient)
        worker.heartbeat()

    async def average(self, worker: Worker, *, last: bool = False) -> None:
        """Average the models, and begin a new round. `last`: this worker ends, and all others end with it."""
        kept, boundary = worker.kept_plain, worker.state.boundary
        steps = worker.clock - kept["began"]
        kept["step"] = kept["seconds"] / steps
        ending = not self.pace.lockstep and boundary.steps is not None and worker.clock >= boundary.steps
        stats = {
            **kept["rhythm"],
            "clock": worker.clock,
            "weight": self.weights.weight(worker),
            "round loss": kept["loss"] / steps,
            "round step": kept["step"],
            "last sync": kept.get("sync", 0.0),
            "last": float(last or ending),
        }
        await (self.over_servers(worker, stats) if worker.over_servers else self.over_collective(worker, stats))
        if self.state == "reset":
            reset(worker.state.optimizer)
        self.begin(worker, self.after(worker.state.stats))

    async def over_collective(self, worker: Worker, stats: Stats) -> None:
        if self.schedule.measures or self.weights.measures:
            await worker.group.gather_stats(stats)
        else:
            worker.state.stats = [stats]
        started = worker.node.now()
        worker.params.copy_(await self.weights.mean(worker, stats["round loss"]))
        if self.state == "average":
            for vector in worker.state.optimizer.state().tensors.values():
                vector.copy_(await worker.group.mean(vector))
        await worker.group.mean_buffers()
        worker.kept_plain["sync"] = worker.node.now() - started
        worker.state.meter.add("communicate", started, worker.node.now(), "all_reduce")

    async def over_servers(self, worker: Worker, stats: Stats) -> None:
        kept, spent = worker.kept_plain, worker.state.meter.seconds
        started = spent["communicate"]
        if not kept["pushed"]:
            exponent = self.weights.exponent(stats["round loss"])
            model = self.pace.contribution(worker)
            await worker.server.push(model, weight=stats["weight"], exponent=exponent, stats=stats)
            kept |= {"pushed": True, "sync": spent["communicate"] - started}
        started = spent["communicate"]
        await worker.server.next_version()
        kept["sync"] += spent["communicate"] - started

    def after(self, sent: Sequence[Stats]) -> Rounds:
        """Return the state after a round in which workers `sent` these figures: equal at all of them."""
        last = Rounds.of(sent[0])
        now = last.followed_by(sent)
        now = replace(now, period=self.schedule.next_period(last, now, sent))
        return self.pace.plan(now, sent)


def reset(optimizer: LocalOptimizer) -> None:
    """Set an optimizer to its state before the first step."""
    vectors = optimizer.state().tensors
    for vector in vectors.values():
        vector.zero_()
    optimizer.restore(State(vectors, {"steps": 0}))
