"""The lengths of the workers' rounds between two averages: equal numbers of steps, or equal seconds (FedNova)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from dure.sync.period import Rounds
    from dure.sync.worker import Worker
    from dure.topology.replica import Stats


class Pace(Protocol):
    """Gives a worker's steps of a round, and what it contributes to the average.

    `lockstep`: all workers are at the same clock when they average. Otherwise the first worker that ends its work ends
    the work of all. `objections`, `unstaged` and `no_loop` are as in `Reasons`.
    """

    lockstep: ClassVar[bool] = True
    objections: ClassVar[Mapping[str, str]] = {}
    unstaged: ClassVar[str] = ""
    no_loop: ClassVar[str] = ""

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
    objections: ClassVar[Mapping[str, str]] = {
        "group": (
            "workers that do different numbers of steps are at different clocks, and a collective needs all at one"
        )
    }
    unstaged: ClassVar[str] = "pace=time counts a worker's steps by its seconds, which differ between stages"
    no_loop: ClassVar[str] = (
        "its steps are counted by the loop, and this method ends when the first worker does; use pace=steps"
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
