"""Weights of the models in an average: by batch size, equal, by loss, or for each parameter by Fisher information.

| weights   | c_k, the weight of worker k                                                              |
|-----------|------------------------------------------------------------------------------------------|
| `samples` | B_k / sum of B, batch sizes                                                              |
| `uniform` | 1 / K                                                                                    |
| `loss`    | exp(-L_k / temperature) / sum, L_k the mean loss of the round                             |
| `fisher`  | F_k / sum of F for each parameter, F_k the mean squared gradient of the round             |

Collectives need c_k itself. Servers divide by the sum of the weights, so they get `weight` and `exponent`:
c_k = weight_k exp(exponent_k) / sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from dure.sync.worker import Worker

LEAST_FISHER = 1e-12
"""Added to every squared gradient: a parameter without a gradient at any worker gets the plain mean."""


class Weights(Protocol):
    """Weighs the workers' models. `measures`: by figures of all workers, not of one alone.

    `known`: before a round begins. `encodes` are the needs over which a codec may encode; `uncoded`, `objections`,
    `unstaged` and `no_loop` are reasons as in `Reasons`.
    """

    measures: ClassVar[bool] = False
    known: ClassVar[bool] = True
    encodes: ClassVar[tuple[str, ...]] = ("group",)
    uncoded: ClassVar[str] = "servers are pushed models, and a codec encodes how far they have gone"
    objections: ClassVar[Mapping[str, str]] = {}
    unstaged: ClassVar[str] = ""
    no_loop: ClassVar[str] = ""

    def begin(self, worker: Worker) -> None:
        """Begin a round."""
        return

    def add(self, worker: Worker, gradient: torch.Tensor) -> None:
        """Take account of a gradient of the round."""
        return

    def weight(self, worker: Worker) -> float:
        """Return the weight over servers."""
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
    unstaged: ClassVar[str] = "weights=loss uses the loss, and only the last stage knows it"
    no_loop: ClassVar[str] = "the loss stays in the loop, and this method needs it"

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
    uncoded: ClassVar[str] = "a mean with weights of each parameter's own needs two vectors from everybody, as they are"
    objections: ClassVar[Mapping[str, str]] = {
        "servers": "a mean with weights of each parameter's own needs two vectors from everybody, and a push brings one"
    }

    def begin(self, worker: Worker) -> None:
        worker.keep("fisher").zero_()

    def add(self, worker: Worker, gradient: torch.Tensor) -> None:
        fisher = worker.keep("fisher")
        fisher += gradient * gradient

    async def mean(self, worker: Worker, loss: float) -> torch.Tensor:
        weight = worker.keep("fisher") + LEAST_FISHER
        total = await worker.group.mean(worker.params * weight, 1.0)
        return total / await worker.group.mean(weight, 1.0)
