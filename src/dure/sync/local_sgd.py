"""Local SGD, the algorithm of `averaging`: workers step alone, and average their models at the end of each round.

    for t = 1, 2, 3, ...                              at every worker k
        w_k  <- Opt_k(w_k, gradient of f at w_k)
        if t - last average = steps of the round      `pace`
            w_k     <- sum of c_k w_k                 over all workers, sum of c_k = 1: `weights`
            period  <- the schedule's next one        `schedule`

| schedule   | the next period                                                                            |
|------------|--------------------------------------------------------------------------------------------|
| `fixed`    | the last one                                                                               |
| `decay`    | `factor` times the last one, every `interval` steps                                        |
| `adaptive` | every `interval` steps: ceil(sqrt(F / F_0) times the first period), where F is the mean    |
|            | loss of the round and F_0 of the first; if this is no less than the last period, `factor`  |
|            | times the last period                                                                      |
| `overhead` | the least one at which averaging takes at most `overhead` of the time                      |
| `epoch`    | the steps of one pass of all workers over all samples                                      |

All workers compute the same period from the same figures, which travel with each average.

| weights    | c_k, the weight of worker k                                                                |
|------------|--------------------------------------------------------------------------------------------|
| `samples`  | B_k / sum of B, batch sizes                                                                |
| `uniform`  | 1 / K                                                                                      |
| `loss`     | exp(-L_k / temperature) / sum, L_k the mean loss of the round                              |
| `fisher`   | F_k / sum of F for each parameter, F_k the mean squared gradient of the round              |

Collectives need c_k itself. Servers divide by the sum of the weights, so they get `weight` and `exponent`:
c_k = weight_k exp(exponent_k) / sum.

| pace       | the round of worker k                                                                      |
|------------|--------------------------------------------------------------------------------------------|
| `steps`    | `period` steps                                                                             |
| `time`     | as many steps as fit into the median worker's `period` steps (FedNova)                     |
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

from dure.core.node import EndOfWork
from dure.core.state import State
from dure.sync.base import Reasons

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dure.job.gradient import LocalOptimizer
    from dure.sync.worker import Worker
    from dure.topology.replica import Stats


LEAST_FISHER = 1e-12
"""Added to every squared gradient: a parameter without a gradient at any worker gets the plain mean."""

_LOSS_UNKNOWN = "the loss stays in the loop, and this method needs it"
_PUSHES_MODELS = "servers are pushed models, and a codec encodes how far they have gone"


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
            # With pace=time, the worker that ends first ends the work of all: no other would meet it again.
            while not any(stats["last"] for stats in worker.state.stats):
                # A checkpoint may lie between push and admission: the model is at the servers, and gets no more steps.
                # A group that lost a member forms again, and its members come back to the mean that they had begun.
                if not kept["pushed"] and worker.clock < kept["due"]:
                    await self.step(worker)
                if worker.clock >= kept["due"]:
                    await self.average(worker)
        except EndOfWork:
            if worker.clock != kept["began"]:
                await self.average(worker, last=not self.pace.lockstep)

    def enter(self, worker: Worker) -> None:
        """Begin at the round of the other workers, or at the round of this worker before a restart."""
        kept = worker.kept_plain
        sent = worker.state.stats if worker.over_servers else ()
        rounds = self.after(sent) if sent else Rounds(**kept.get("rhythm", {"period": self.period}))
        # A worker that resumes within a round keeps its figures, unless the others have averaged without it.
        if kept.get("rhythm") != rounds.plain or worker.clock == kept["began"]:
            self.begin(worker, rounds)
        worker.state.last_sync = kept["began"]

    def begin(self, worker: Worker, rounds: Rounds) -> None:
        """Begin a round, at the models that are equal at all workers now."""
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
            worker.state.stats = [stats]  # what the choices use of it is equal at all workers, so no message is needed
        started = worker.node.now()
        averaged = [worker.params]
        means = [await self.weights.mean(worker, stats["round loss"])]
        if self.state == "average":
            averaged += worker.state.optimizer.state().tensors.values()
            means += [await worker.group.mean(vector) for vector in averaged[1:]]
        worker.state.buffers = await worker.group.merged_buffers()
        # All at once after the last message: if a member has failed before it, the mean is made again.
        for values, mean in zip(averaged, means, strict=True):
            values.copy_(mean)
        worker.kept_plain["sync"] = worker.node.now() - started
        worker.state.meter.add("communicate", started, worker.node.now(), "all_reduce")

    async def over_servers(self, worker: Worker, stats: Stats) -> None:
        # The wait for the slowest worker is no cost of averaging, so `sync` counts the seconds of communication alone.
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


@dataclass(frozen=True, slots=True)
class Rounds:
    """The state of a schedule, equal at all workers. The last average was at clock `began`; `period` is the next one.

    `rounds` counts the averages so far, and `first` is the mean loss of the first round. `step` is the mean seconds of
    a step at the slowest worker, `sync` those of an average. Where rounds take equal time (`EqualTime`), the next
    one takes `seconds`, in which a worker makes `steps` on average.
    """

    period: int
    began: int = 0
    rounds: int = 0
    first: float = 0.0
    step: float = 0.0
    sync: float = 0.0
    seconds: float = 0.0
    steps: float = 1.0

    @classmethod
    def of(cls, stats: Stats) -> Rounds:
        """The state that a worker sent with its figures."""
        # Figures travel as floating-point numbers.
        period, began, rounds = (int(stats[name]) for name in ("period", "began", "rounds"))
        first, step, sync, seconds, steps = (stats[name] for name in ("first", "step", "sync", "seconds", "steps"))
        return cls(period, began, rounds, first, step, sync, seconds, steps)

    @property
    def plain(self) -> dict[str, float]:
        """The fields by name. `asdict` copies each deeply, which takes half the time of an average beside its mean."""
        return {name: getattr(self, name) for name in self.__slots__}

    def followed_by(self, sent: Sequence[Stats]) -> Rounds:
        """Return the state after a round in which workers `sent` their figures; the period is still the old one."""
        step, sync = (max(stats[name] for stats in sent) for name in ("round step", "last sync"))
        return replace(
            self,
            began=int(max(stats["clock"] for stats in sent)),
            rounds=self.rounds + 1,
            first=self.first if self.rounds else mean_loss(sent),
            step=self.step + (step - self.step) / (self.rounds + 1),
            sync=self.sync + (sync - self.sync) / max(self.rounds, 1),
        )


def mean_loss(sent: Sequence[Stats]) -> float:
    """Return the mean of the losses of all workers in a round."""
    return math.fsum(stats["round loss"] for stats in sent) / len(sent)


class Schedule(Protocol):
    """Gives the period of the next round. `measures`: from figures of all workers, not of one alone."""

    measures: ClassVar[bool] = False
    reasons: ClassVar[Reasons] = Reasons()

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        """Return the period, given the state before and after a round, and the figures that workers `sent`."""
        ...


@dataclass(frozen=True, slots=True)
class FixedPeriod(Schedule):
    """A constant period."""

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        return last.period


@dataclass(frozen=True, slots=True)
class EpochPeriod(FixedPeriod):
    """The steps of an epoch, which the method's period is once the job is known (`base.OfEpochs`)."""

    reasons: ClassVar[Reasons] = Reasons(loop="the loop alone knows its samples; write their steps as `period`")


@dataclass(frozen=True, slots=True)
class DecayingPeriod(Schedule):
    """`factor` times the last period at the first average at or after each multiple of `interval` steps."""

    factor: float
    interval: int

    def __post_init__(self) -> None:
        _check_schedule(self.factor, self.interval)

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        return shortened(last.period, self.factor) if _passed(self.interval, last, now) else last.period


@dataclass(frozen=True, slots=True)
class AdaptivePeriod(Schedule):
    """AdaComm: `start` times the root of the loss as a share of the first, every `interval` steps."""

    start: int
    factor: float
    interval: int

    measures: ClassVar[bool] = True
    reasons: ClassVar[Reasons] = Reasons(
        stages="schedule=adaptive uses the loss, and only the last stage knows it", loop=_LOSS_UNKNOWN
    )

    def __post_init__(self) -> None:
        _check_schedule(self.factor, self.interval)

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        if not _passed(self.interval, last, now):
            return last.period
        if now.first > 0:
            wanted = math.ceil(math.sqrt(mean_loss(sent) / now.first) * self.start)
            if wanted < last.period:
                return max(1, wanted)
        return shortened(last.period, self.factor)


@dataclass(frozen=True, slots=True)
class OverheadPeriod(Schedule):
    """The least period at which averaging takes at most `overhead` of the time, by the seconds measured so far."""

    overhead: float

    measures: ClassVar[bool] = True
    reasons: ClassVar[Reasons] = Reasons(stages="schedule=overhead measures seconds, and stages differ in theirs")

    def __post_init__(self) -> None:
        if not 0 < self.overhead < 1:
            raise ValueError(
                f"overhead is a share of the time, in (0, 1), got {self.overhead}. Use 0.05 for 5 per cent."
            )

    def next_period(self, last: Rounds, now: Rounds, sent: Sequence[Stats]) -> int:
        if now.rounds < 2 or now.step <= 0:  # the seconds of the first average are sent with the second
            return last.period
        return max(1, math.ceil(now.sync * (1 - self.overhead) / (self.overhead * now.step)))


def shortened(period: int, factor: float) -> int:
    """Return `factor` times a period, rounded down, but at least 1.

    >>> shortened(100, 0.29)
    29
    """
    return max(1, math.floor(round(factor * period, 9)))  # 0.29 * 100 is 28.999... in binary


def _check_schedule(factor: float, interval: int) -> None:
    if interval < 1:
        raise ValueError(f"interval counts mini-batches and must be >= 1, got {interval}. Use 1 for each round.")
    if not 0 < factor <= 1:
        raise ValueError(f"factor shortens the period and must be in (0, 1], got {factor}. The paper's is 0.5.")


def _passed(interval: int, last: Rounds, now: Rounds) -> bool:
    """Whether a multiple of `interval` was passed or reached in the last round."""
    return now.began // interval > last.began // interval


class Pace(Protocol):
    """Gives a worker's steps of a round, and what it contributes to the average.

    `lockstep`: all workers are at the same clock when they average. Otherwise the first worker that ends its work ends
    the work of all.
    """

    lockstep: ClassVar[bool] = True
    reasons: ClassVar[Reasons] = Reasons()

    def plan(self, now: Rounds, sent: Sequence[Stats]) -> Rounds:
        """Return the state with the length of the next round, given the figures that workers `sent`."""
        ...

    def steps(self, now: Rounds, seconds: float) -> int:
        """Return the steps of the next round at a worker whose steps take `seconds`."""
        ...

    def contribution(self, worker: Worker) -> torch.Tensor:
        """Return what a worker gives to the mean."""
        ...


@dataclass(frozen=True, slots=True)
class EqualSteps(Pace):
    """Every worker makes `period` steps."""

    def plan(self, now: Rounds, sent: Sequence[Stats]) -> Rounds:
        return now

    def steps(self, now: Rounds, seconds: float) -> int:
        return now.period

    def contribution(self, worker: Worker) -> torch.Tensor:
        return worker.params


@dataclass(frozen=True, slots=True)
class EqualTime(Pace):
    """Every worker makes as many steps as fit into the time in which the median worker makes `period`.

    A worker's change w_k - w is scaled by tau / tau_k, as if every worker had made tau steps: tau_k are its steps, and
    tau is the mean over workers by their weights.
    """

    lockstep: ClassVar[bool] = False
    reasons: ClassVar[Reasons] = Reasons(
        objections={
            "group": "workers that do different numbers of steps are at different clocks, and a collective needs all "
            "at one"
        },
        stages="pace=time counts a worker's steps by its seconds, which differ between stages",
        loop="its steps are counted by the loop, and this method ends when the first worker does; use pace=steps",
    )

    def plan(self, now: Rounds, sent: Sequence[Stats]) -> Rounds:
        paces = [stats["round step"] for stats in sent]
        seconds = now.period * statistics.median(paces)
        total = math.fsum(stats["weight"] for stats in sent)
        steps = (stats["weight"] * fitting(seconds, pace) for stats, pace in zip(sent, paces, strict=True))
        return replace(now, seconds=seconds, steps=math.fsum(steps) / total)

    def steps(self, now: Rounds, seconds: float) -> int:
        return fitting(now.seconds, seconds)

    def contribution(self, worker: Worker) -> torch.Tensor:
        kept, start = worker.kept_plain, worker.keep("start")
        longer: float = kept["rhythm"]["steps"] / (worker.clock - kept["began"])
        return start + (worker.params - start) * longer


def fitting(seconds: float, step: float) -> int:
    """Return how many steps of `step` seconds fit into `seconds`: at least 1, and 1 where `step` is not known (0)."""
    return max(1, round(seconds / step)) if step > 0 else 1


class Weights(Protocol):
    """Weighs the workers' models. `measures`: by figures of all workers, not of one alone.

    `known`: before a round begins. `encodes` are the needs over which a codec may encode.
    """

    measures: ClassVar[bool] = False
    known: ClassVar[bool] = True
    encodes: ClassVar[tuple[str, ...]] = ("group",)
    reasons: ClassVar[Reasons] = Reasons(codec=_PUSHES_MODELS)

    def begin(self, worker: Worker) -> None:
        """Begin a round."""
        return

    def add(self, worker: Worker, gradient: torch.Tensor) -> None:
        """Take account of a gradient of the round."""
        return

    def weight(self, worker: Worker) -> float:
        """Return the factor of the weight over servers that is known before the round."""
        return 1.0

    def exponent(self, loss: float) -> float:
        """Return the exponent of the weight over servers, given the mean loss of the round."""
        return 0.0

    def share(self, worker: Worker, loss: float) -> float:
        """Return c_k over collectives, given the mean loss of the round."""
        return 1 / worker.world_size

    async def mean(self, worker: Worker, loss: float) -> torch.Tensor:
        """Return the weighted mean of all models over collectives."""
        since = worker.keep("start") if worker.group.encodes else None
        return await worker.group.mean(worker.params, self.share(worker, loss), since=since)


@dataclass(frozen=True, slots=True)
class UniformWeights(Weights):
    """Equal weights."""


@dataclass(frozen=True, slots=True)
class SampleWeights(Weights):
    """Weights by batch size."""

    def weight(self, worker: Worker) -> float:
        return float(worker.state.batch_size)

    def share(self, worker: Worker, loss: float) -> float:
        return worker.state.share


@dataclass(frozen=True, slots=True)
class LossWeights(Weights):
    """Weights exp(-loss / `temperature`): the lower the loss of a worker, the more its model counts."""

    temperature: float

    measures: ClassVar[bool] = True
    known: ClassVar[bool] = False
    reasons: ClassVar[Reasons] = Reasons(
        codec=_PUSHES_MODELS,
        stages="weights=loss uses the loss, and only the last stage knows it",
        loop=_LOSS_UNKNOWN,
    )

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature divides a loss and must be > 0, got {self.temperature}. Use inf for equal weights."
            )

    def exponent(self, loss: float) -> float:
        return -loss / self.temperature

    def share(self, worker: Worker, loss: float) -> float:
        exponents = [self.exponent(stats["round loss"]) for stats in worker.state.stats]
        largest = max(exponents)
        return math.exp(self.exponent(loss) - largest) / sum(math.exp(exponent - largest) for exponent in exponents)


@dataclass(frozen=True, slots=True)
class FisherWeights(Weights):
    """Weights of each parameter by the diagonal of the Fisher information, summed over the gradients of the round."""

    known: ClassVar[bool] = False
    encodes: ClassVar[tuple[str, ...]] = ()
    reasons: ClassVar[Reasons] = Reasons(
        objections={
            "servers": "a mean with weights of each parameter's own needs two vectors from everybody, and a push "
            "brings one"
        },
        codec="a mean with weights of each parameter's own needs two vectors from everybody, as they are",
    )

    def begin(self, worker: Worker) -> None:
        worker.keep("fisher").zero_()

    def add(self, worker: Worker, gradient: torch.Tensor) -> None:
        fisher = worker.keep("fisher")
        fisher += gradient * gradient

    async def mean(self, worker: Worker, loss: float) -> torch.Tensor:
        weight = worker.keep("fisher") + LEAST_FISHER
        total = await worker.group.mean(worker.params * weight, 1.0)
        return total / await worker.group.mean(weight, 1.0)
