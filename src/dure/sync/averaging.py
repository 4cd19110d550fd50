"""Model averaging: workers train alone, and average their models every `period` steps, or once, at the end.

Su, Chen, "Experiments on Parallel Training of Deep Neural Network using Model Averaging", 2015;
as local SGD in Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019;
its adaptive period in Wang, Joshi, "Adaptive Communication Strategies ... Local-Update SGD" (AdaComm), 2018; rounds of
equal time as in Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"
(FedNova), NeurIPS 2020.

    for t = 1, 2, 3, ...                              at every worker k
        w_k  <- Opt_k(w_k, gradient of f at w_k)
        if t - last average = period
            w_k     <- sum of c_k w_k                 over all workers, sum of c_k = 1
            period  <- the schedule's next one

| in the papers          | here                                                                             |
|------------------------|----------------------------------------------------------------------------------|
| tau, and its schedule  | `period`, in steps, and `schedule`                                               |
| c_k                    | `weights`                                                                        |
| average at a server    | shards store the weighted mean of the models that workers push                   |
| state of the optimizer | `state`: "keep" momentum and moments as they are, "average" them too, "reset" them |
| AdaComm's gamma = 1/2, T_0 | `factor`; `interval`, in steps and not seconds, so that a run can be repeated |
| its rate eta_l         | constant, so that eta_0 / eta_l = 1                                              |
| FedNova's tau_k        | `pace="time"`                                                                    |

This file has the parameters; `sync/local_sgd.py` has the algorithm, its schedules, weights and paces. ``period=1`` with
plain SGD is BSP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from dure.core.catalogue import parameter
from dure.core.node import EndOfWork
from dure.job.optimizer import OptimizerSpec
from dure.sync.base import Messages, Reasons, ServerRule, Traits
from dure.sync.local_sgd import (
    AdaptivePeriod,
    DecayingPeriod,
    EpochPeriod,
    EqualSteps,
    EqualTime,
    FisherWeights,
    FixedPeriod,
    LocalSGD,
    LossWeights,
    OverheadPeriod,
    Pace,
    SampleWeights,
    Schedule,
    UniformWeights,
    Weights,
)
from dure.topology.parameter_server.policies import Barrier

if TYPE_CHECKING:
    from dure.sync.worker import Worker


_CHOICES = {
    "schedule": ("fixed", "decay", "overhead", "adaptive", "epoch"),
    "weights": ("samples", "uniform", "loss", "fisher"),
    "state": ("keep", "average", "reset"),
    "pace": ("steps", "time"),
}


@dataclass(frozen=True, slots=True)
class Averaging:
    """Local SGD: workers train alone and average their models every `period` steps; `schedule` changes the period."""

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
    schedule: Literal["fixed", "decay", "overhead", "adaptive", "epoch"] = parameter(
        "fixed",
        "fixed: a constant period; decay: times `factor`; overhead: by measured times; adaptive: by the loss; "
        "epoch: the steps of one pass of all workers over the samples; `period` is ignored",
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
        needs=("group", "servers"),
        messages=Messages(changes=True),
        delivers="mean",
        staged=True,
        regroups=True,
        keeps={},
    )

    def __post_init__(self) -> None:
        for name, right in _CHOICES.items():
            if getattr(self, name) not in right:
                raise ValueError(f'{name} must be one of {", ".join(right)}, got "{getattr(self, name)}".')
        if self.period < 1:
            raise ValueError(f"period counts mini-batches and must be >= 1, got {self.period}. Use 1 for every step.")
        chosen = self.algorithm
        if not (chosen.pace.lockstep or chosen.weights.known):
            raise ValueError(
                f"pace=time goes with weights that are known beforehand, samples or uniform, got {self.weights}."
            )

    @property
    def algorithm(self) -> LocalSGD:
        """The algorithm with these parameters. Values that are not chosen check their parameters too."""
        schedules: dict[str, Schedule] = {
            "fixed": FixedPeriod(),
            "decay": DecayingPeriod(self.factor, self.interval),
            "overhead": OverheadPeriod(self.overhead),
            "adaptive": AdaptivePeriod(self.period, self.factor, self.interval),
            "epoch": EpochPeriod(),
        }
        weights: dict[str, Weights] = {
            "samples": SampleWeights(),
            "uniform": UniformWeights(),
            "loss": LossWeights(self.temperature),
            "fisher": FisherWeights(),
        }
        paces: dict[str, Pace] = {"steps": EqualSteps(), "time": EqualTime()}
        return LocalSGD(self.period, schedules[self.schedule], weights[self.weights], paces[self.pace], self.state)

    def with_epoch(self, steps: int) -> Averaging:
        """The method for a job whose epoch has so many steps of each worker."""
        return replace(self, period=max(1, steps)) if self.schedule == "epoch" else self

    def adapted(self) -> Traits:
        """The traits under these parameters."""
        chosen = self.algorithm
        schedule, weights, pace = (part.reasons for part in (chosen.schedule, chosen.weights, chosen.pace))
        state = {"servers": "servers hold the model and no worker's optimizer state"} if self.state == "average" else {}
        reasons = Reasons(
            objections={**state, **pace.objections, **weights.objections},
            codec=weights.codec,
            stages=weights.stages or schedule.stages or pace.stages,
            loop=schedule.loop or weights.loop or pace.loop or self._no_loop,
        )
        messages = Messages(over=chosen.weights.encodes, changes=True)
        start, fisher = () if chosen.pace.lockstep else ("start",), ("fisher",) if self.weights == "fisher" else ()
        keeps = {"group": (*start, *fisher), "servers": start, "codec": () if start else ("start",)}
        return replace(self.traits, reasons=reasons, messages=messages, lockstep=chosen.pace.lockstep, keeps=keeps)

    @property
    def _no_loop(self) -> str:
        return "" if self.state == "keep" else "the state of the optimizer is the loop's own; use state=keep"

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("assign"), Barrier())

    async def work(self, worker: Worker) -> None:
        await self.algorithm.work(worker)


@dataclass(frozen=True, slots=True)
class OneShot:
    """Each worker trains alone, and all models are averaged once, at the end.

    Zinkevich, Weimer, Smola, Li, "Parallelized Stochastic Gradient Descent", NeurIPS 2010, algorithm 3.

        for t = 1, ..., T                                 at every worker k, on data of its own
            w_k  <- Opt_k(w_k, gradient of f at w_k)
        v  <- sum of B_k w_k / sum of B_k                 over all workers, once

    | in the paper                  | here                                                                |
    |-------------------------------|---------------------------------------------------------------------|
    | T = m / k examples, shuffled  | the worker's share of the data, in an order of its own; its `steps` |
    | w_0 = 0 everywhere            | the job's initial model, the same everywhere                        |
    | constant rate, one example    | the job's optimizer and mini-batches; nothing of its state is shared |
    | v = (1/k) sum of w_k          | weighted by batch size, where workers differ                        |

    It is `averaging` with a period of the whole run. A slow worker delays only the end. Over servers, a failed worker
    is left out of the mean; a late worker makes all its steps, and the others wait for it.
    """

    paper: ClassVar[str] = "Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010"

    traits: ClassVar[Traits] = Traits(
        needs=("group", "servers"),
        lockstep=True,
        delivers="mean",
        alone=True,
        staged=True,
        keeps={},
    )

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        return ServerRule(OptimizerSpec("assign"), Barrier())

    async def work(self, worker: Worker) -> None:
        if worker.state.stats:
            return  # the other workers have averaged without this one
        try:
            while True:
                worker.step(await worker.gradient())
                worker.heartbeat()
        except EndOfWork:
            if not worker.over_servers:
                await worker.group.mean_params()
            else:
                await worker.server.push(worker.params, stats={"clock": worker.clock})
                await worker.server.next_version()
