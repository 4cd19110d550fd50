"""Periodic model averaging: run apart for a while, then meet in the middle.

Su, Chen, "Experiments on Parallel Training of Deep Neural Network using Model Averaging", 2015;
as local SGD in Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019;
its adaptive period in Wang, Joshi, "Adaptive Communication Strategies ... Local-Update SGD" (AdaComm), 2018; rounds of
equal time as in Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"
(FedNova), NeurIPS 2020.

    for t = 1, 2, 3, ...                              at every worker k
        w_k  <- Opt_k(w_k, gradient of f at w_k)
        if t - last meeting = period
            w_k     <- sum of c_k w_k                 over all workers, sum of c_k = 1
            period  <- the schedule's next one

| in the papers          | here                                                                             |
|------------------------|----------------------------------------------------------------------------------|
| tau                    | `period`, in mini-batches                                                        |
| c_k                    | `weights`: of "samples" B_k, "uniform", by "loss", by "fisher"                   |
|                        | "loss": exp(-L_k / `temperature`) / sum, L_k the round's mean loss               |
|                        | "fisher": F_k / sum of F for each parameter, F_k the round's mean squared gradient |
| average at a server    | shards store the weighted mean of what a round pushed                            |
| state of the optimizer | `state`: "keep" momentum and moments as they are, "average" them too, "reset" them |
| AdaComm's tau_l        | `schedule="adaptive"`: ceil(sqrt(F / F_0) `period`) |
|                        | or, where that is no less than the last, `factor` times the last                 |
| its gamma = 1/2, T_0   | `factor`; `interval`, in mini-batches and not seconds, so that a run can be repeated |
| its rate eta_l         | constant, so that eta_0 / eta_l = 1                                               |
| decaying tau           | `schedule="decay"`: `factor` times the last, every `interval`                     |
| every T_0              | at the first meeting at or after each multiple of `interval`; once where it passes two |
| rounding               | `factor` times the last is rounded down, and is 1 at least                        |
| tau of measured times  | `schedule="overhead"`: the least for which meeting takes at most `overhead` of the time |
| FedNova's tau_k        | `pace="time"`: as many steps as fit into the time in which the median worker does `period` |
|                        | w - tau (w - w_k) / tau_k takes the place of w_k, tau = sum of c_k tau_k         |

All workers derive the same period from the same numbers: what each says of its round travels with the round. F is
the mean of all workers' losses in a round. ``period=1`` with plain SGD is BSP.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.node import EndOfWork
from dure.core.parameter import parameter
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import ServerRule, Traits
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dure.job.gradient_source import LocalOptimizer
    from dure.sync.worker import Worker
    from dure.topology.replica import Stats

_CHOICES = {
    "schedule": ("fixed", "decay", "overhead", "adaptive"),
    "weights": ("samples", "uniform", "loss", "fisher"),
    "state": ("keep", "average", "reset"),
    "pace": ("steps", "time"),
}

LEAST_FISHER = 1e-12
"""Added to every squared gradient: where nobody has seen one, the mean is the plain one."""


@dataclass(frozen=True, slots=True)
class _Rhythm:
    """When all meet, as all know it: they last met at clock `began` and will after `period` steps.

    `rounds` have been; the first had the mean loss `first`. A step takes `step` seconds at the slowest worker, a
    meeting `sync`, on average. A round of equal time takes `seconds`, in which workers do `steps` on average.
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
    def of(cls, note: Stats) -> _Rhythm:
        """That of a worker that said `note`."""
        period, began, rounds = (int(note[name]) for name in ("period", "began", "rounds"))
        first, step, sync, seconds, steps = (note[name] for name in ("first", "step", "sync", "seconds", "steps"))
        return cls(period, began, rounds, first, step, sync, seconds, steps)

    @property
    def plain(self) -> dict[str, float]:
        """Its values by name. `asdict` copies each deeply, which is half of what a meeting costs beside its mean."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Averaging:
    """Local SGD: workers train alone and average their models every `period` steps, or when `schedule` says so."""

    paper: ClassVar[str] = (
        "Su and Chen, Experiments on Parallel Training of Deep Neural Network using Model Averaging, 2015"
    )

    period: int = parameter(
        10,
        "steps of each worker between two averages; with a schedule, its first value",
        range=">= 1",
        unit="steps",
        symbol="τ",
    )
    schedule: Literal["fixed", "decay", "overhead", "adaptive"] = parameter(
        "fixed",
        "fixed: a constant period; decay: times `factor`; overhead: by measured times; adaptive: by the loss",
    )
    factor: float = parameter(
        0.5, "schedule=decay or adaptive: factor of the period at a change", range="> 0, <= 1", symbol="γ"
    )
    interval: int = parameter(
        100,
        "schedule=decay or adaptive: steps between two changes of the period",
        range=">= 1",
        unit="steps",
        symbol="T_0",
    )
    overhead: float = parameter(
        0.05, "schedule=overhead: largest share of the time that averaging may take", range="> 0, < 1", unit="fraction"
    )
    weights: Literal["samples", "uniform", "loss", "fisher"] = parameter(
        "samples", "weights of the models: batch sizes, equal, by loss, or per element by Fisher information"
    )
    temperature: float = parameter(
        1.0, "weights=loss: a weight is exp(-loss / temperature); inf: equal weights", range="> 0", unit="loss"
    )
    state: Literal["keep", "average", "reset"] = parameter(
        "keep", "optimizer state of the workers at an average: kept, averaged too, or reset"
    )
    pace: Literal["steps", "time"] = parameter(
        "steps", "steps: `period` steps of each worker; time: as many as fit into the median worker's `period` steps"
    )

    traits: ClassVar[Traits] = Traits(
        topologies=("collective", "ps"),
        delivers="mean",
        changes=True,
    )

    def __post_init__(self) -> None:
        for name, right in _CHOICES.items():
            if getattr(self, name) not in right:
                raise ValueError(f'{name} must be one of {", ".join(right)}, got "{getattr(self, name)}".')
        if self.period < 1:
            raise ValueError(f"period counts mini-batches and must be >= 1, got {self.period}. Use 1 for every step.")
        if self.interval < 1:
            raise ValueError(
                f"interval counts mini-batches and must be >= 1, got {self.interval}. Use 1 for each round."
            )
        if not 0 < self.factor <= 1:
            raise ValueError(
                f"factor shortens the period and must be in (0, 1], got {self.factor}. The paper's is 0.5."
            )
        if not 0 < self.overhead < 1:
            raise ValueError(
                f"overhead is a share of the time, in (0, 1), got {self.overhead}. Use 0.05 for 5 per cent."
            )
        if not self.temperature > 0:
            raise ValueError(
                f"temperature divides a loss and must be > 0, got {self.temperature}. Use inf for equal weights."
            )

        if self.pace == "time" and self.weights not in ("samples", "uniform"):
            raise ValueError(
                f"pace=time goes with weights that are known beforehand, samples or uniform, got {self.weights}."
            )

    @property
    def _lockstep(self) -> bool:
        return self.pace == "steps"

    @property
    def _encodes(self) -> tuple[str, ...]:
        return () if self.weights == "fisher" else ("collective",)

    @property
    def _uncoded(self) -> str:
        if self.weights == "fisher":
            return "a mean with weights of each parameter's own needs two vectors from everybody, as they are"
        return "servers are pushed models, and a codec encodes how far they have gone"

    @property
    def _objections(self) -> dict[str, str]:
        found = {}
        if self.pace == "time":
            found["collective"] = (
                "workers that do different numbers of steps are at different clocks, and a collective needs all at one"
            )
        if self.weights == "fisher":
            found["ps"] = (
                "a mean with weights of each parameter's own needs two vectors from everybody, and a push brings one"
            )
        elif self.state == "average":
            found["ps"] = "servers hold the model and no worker's optimizer state"
        return found

    @property
    def _no_loop(self) -> str:
        if self.schedule == "adaptive" or self.weights == "loss":
            return "the loss stays in the loop, and this method needs it"
        if self.pace == "time":
            return "its steps are counted by the loop, and this method ends when the first worker does; use pace=steps"
        return "" if self.state == "keep" else "the state of the optimizer is the loop's own; use state=keep"

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        return replace(
            self.traits,
            lockstep=self._lockstep,
            objections=self._objections,
            encodes=self._encodes,
            uncoded=self._uncoded,
            no_loop=self._no_loop,
        )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("assign"), Barrier())

    async def work(self, worker: Worker) -> None:
        kept = worker.kept_plain
        self.enter(worker)
        try:
            while not any(note["last"] for note in worker.stats):
                if not kept["pushed"]:
                    await self.step(worker)
                if worker.clock >= kept["due"]:
                    await self.average(worker)
        except EndOfWork:
            if worker.clock != kept["began"]:
                await self.average(worker, last=self.pace == "time")

    def enter(self, worker: Worker) -> None:
        """Fall into the rhythm in which the others are, or in which this worker was before a restart."""
        kept = worker.kept_plain
        rhythm = _Rhythm(**kept.get("rhythm", {"period": self.period}))
        if worker.stats:
            rhythm = self.after(worker.stats)
        if kept.get("rhythm") != rhythm.plain or worker.clock == kept["began"]:
            self.begin(worker, rhythm)
        worker.last_sync = kept["began"]

    def begin(self, worker: Worker, rhythm: _Rhythm) -> None:
        """A new round."""
        kept = worker.kept_plain
        worker.last_sync = worker.clock
        steps = rhythm.period if self.pace == "steps" else fitting(rhythm.seconds, kept.get("step", 0.0))
        kept |= {"rhythm": rhythm.plain, "began": worker.clock, "due": worker.clock + steps}
        kept |= {"loss": 0.0, "seconds": 0.0, "pushed": False}
        if self.pace == "time" or (not worker.over_servers and worker.group.encodes):
            worker.keep("start").copy_(worker.params)
        if self.weights == "fisher":
            worker.keep("fisher").zero_()

    async def step(self, worker: Worker) -> None:
        """A local step, and what this round will be known by."""
        started = worker.node.now()
        gradient = await worker.gradient()
        worker.kept_plain["seconds"] += worker.node.now() - started
        worker.kept_plain["loss"] += worker.loss
        if self.weights == "fisher":
            self.weigh(worker, gradient)
        worker.step(gradient)
        worker.heartbeat()

    def weigh(self, worker: Worker, gradient: torch.Tensor) -> None:
        """Add to the diagonal of the Fisher information, as far as this round has seen it."""
        fisher = worker.keep("fisher")
        fisher += gradient * gradient

    # ---- the meeting

    async def average(self, worker: Worker, *, last: bool = False) -> None:
        """Meet, and begin a new round; not if this is somebody's `last`, and with it everybody's."""
        kept, boundary = worker.kept_plain, worker.boundary
        steps = worker.clock - kept["began"]
        kept["step"] = kept["seconds"] / steps
        ending = self.pace == "time" and boundary.steps is not None and worker.clock >= boundary.steps
        note = {
            **kept["rhythm"],
            "clock": worker.clock,
            "weight": float(worker.source.batch_size) if self.weights == "samples" else 1.0,
            "round loss": kept["loss"] / steps,
            "round step": kept["step"],
            "last sync": kept.get("sync", 0.0),
            "last": float(last or ending),
        }
        await (self.meet(worker, note) if not worker.over_servers else self.meet_at_servers(worker, note))
        if self.state == "reset":
            reset(worker.optimizer)
        self.begin(worker, self.after(worker.stats))

    async def meet(self, worker: Worker, note: Stats) -> None:
        """Over collectives."""
        if self.schedule in ("overhead", "adaptive") or self.weights == "loss":
            await worker.group.gather_stats(note)
        else:
            worker.stats = [note]
        started = worker.node.now()
        if self.weights == "fisher":
            weight = worker.keep("fisher") + LEAST_FISHER
            worker.params.copy_(
                await worker.group.mean(worker.params * weight, 1.0) / await worker.group.mean(weight, 1.0)
            )
        else:
            since = worker.keep("start") if worker.group.encodes else None
            worker.params.copy_(await worker.group.mean(worker.params, self.share(worker, note), since=since))
        if self.state == "average":
            for vector in worker.optimizer.state()[0].values():
                vector.copy_(await worker.group.mean(vector))
        await worker.group.mean_buffers()
        worker.kept_plain["sync"] = worker.node.now() - started
        worker.meter.add("communicate", started, worker.node.now(), "all_reduce")

    def share(self, worker: Worker, note: Stats) -> float:
        """c_k."""
        if self.weights == "loss":
            exponents = [-each["round loss"] / self.temperature for each in worker.stats]
            largest = max(exponents)
            mine = math.exp(-note["round loss"] / self.temperature - largest)
            return mine / sum(math.exp(exponent - largest) for exponent in exponents)
        return worker.share if self.weights == "samples" else 1 / worker.world_size

    async def meet_at_servers(self, worker: Worker, note: Stats) -> None:
        """Over servers, which divide by the sum of the weights."""
        kept, spent = worker.kept_plain, worker.meter.seconds
        started = spent["communicate"]
        if not kept["pushed"]:
            exponent = -note["round loss"] / self.temperature if self.weights == "loss" else 0.0
            await worker.server.push(self.contribution(worker), weight=note["weight"], exponent=exponent, stats=note)
            kept |= {"pushed": True, "sync": spent["communicate"] - started}
        started = spent["communicate"]
        await worker.server.next_version()
        kept["sync"] += spent["communicate"] - started

    def contribution(self, worker: Worker) -> torch.Tensor:
        """w_k, or where it would be if every worker had made as many steps."""
        if self.pace == "steps":
            return worker.params
        kept, start = worker.kept_plain, worker.keep("start")
        longer: float = kept["rhythm"]["steps"] / (worker.clock - kept["began"])
        return start + (worker.params - start) * longer

    # ---- the schedule

    def after(self, notes: Sequence[Stats]) -> _Rhythm:
        """The rhythm after a round in which the workers said `notes`: the same at all of them."""
        last = _Rhythm.of(notes[0])
        clock = int(max(note["clock"] for note in notes))
        loss = math.fsum(note["round loss"] for note in notes) / len(notes)
        step, sync = (max(note[name] for note in notes) for name in ("round step", "last sync"))
        now = replace(
            last,
            began=clock,
            rounds=last.rounds + 1,
            first=last.first if last.rounds else loss,
            step=last.step + (step - last.step) / (last.rounds + 1),
            sync=last.sync + (sync - last.sync) / max(last.rounds, 1),
        )
        due = clock // self.interval > last.began // self.interval
        now = replace(now, period=self.next_period(now, loss, due=due))
        return now if self.pace == "steps" else self.timed(now, notes)

    def timed(self, rhythm: _Rhythm, notes: Sequence[Stats]) -> _Rhythm:
        """With the seconds of the next round, and the mean of the steps that workers will do in it."""
        paces = [note["round step"] for note in notes]
        seconds = rhythm.period * statistics.median(paces)
        total = math.fsum(note["weight"] for note in notes)
        steps = (note["weight"] * fitting(seconds, pace) for note, pace in zip(notes, paces, strict=True))
        return replace(rhythm, seconds=seconds, steps=math.fsum(steps) / total)

    def next_period(self, rhythm: _Rhythm, loss: float, *, due: bool) -> int:
        """The period, given that of the last round. `due`: a multiple of `interval` was passed or reached since."""
        last = rhythm.period
        if self.schedule == "overhead" and rhythm.rounds > 1 and rhythm.step > 0:
            return max(1, math.ceil(rhythm.sync * (1 - self.overhead) / (self.overhead * rhythm.step)))
        if self.schedule not in ("decay", "adaptive") or not due:
            return last
        if self.schedule == "adaptive" and rhythm.first > 0:
            wanted = math.ceil(math.sqrt(loss / rhythm.first) * self.period)
            if wanted < last:
                return max(1, wanted)
        return max(1, math.floor(round(self.factor * last, 9)))  # 0.29 times 100 is 29, not 28.999...


def fitting(seconds: float, pace: float) -> int:
    """How many steps of `pace` seconds fit into `seconds`; one at least, and one where no pace is known."""
    return max(1, round(seconds / pace)) if pace > 0 else 1


def reset(optimizer: LocalOptimizer) -> None:
    """Forget all steps so far."""
    vectors, _ = optimizer.state()
    for vector in vectors.values():
        vector.zero_()
    optimizer.restore(vectors, {"steps": 0})
