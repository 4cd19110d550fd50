"""Accuracy of a mean, a majority vote and a vote weighted by reliability, if some of 15 workers send false gradients.

Bernstein, Zhao, Azizzadenesheli and Anandkumar, "signSGD with Majority Vote is Communication Efficient and Fault
Tolerant", ICLR 2019, in which up to half of the workers send their gradient inverted.

    honest      g             the gradient of its mini-batch
    random      s N(0, 1)     noise
    inverted    -s g          the opposite gradient
    constant    s 1           one value in all elements, the same at all liars

with s such that a lie is `SCALE` times as long as the gradient. A sign does not depend on the length; a mean does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch

from dure.errors import DivergedError, UsageError
from dure.sync.base import Traits
from dure.sync.bsp import BSP
from dure_studies.flags import ROUNDS, SEEDS

if TYPE_CHECKING:
    from rich.table import Table

    from dure.sync.worker import Worker

WORKERS = 15
MOST = 7
"""The most liars: one more would be half of the voters."""

SCALE = 10.0

Lie = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def _random(truth: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(truth.shape, generator=generator, dtype=truth.dtype)


def _inverted(truth: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return -truth


def _constant(truth: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.ones_like(truth)


LIES: Mapping[str, Lie] = {"random": _random, "inverted": _inverted, "constant": _constant}


class Aggregation(NamedTuple):
    """A codec that aggregates gradients, and a learning rate that suits it."""

    codec: str
    lr: float


RULES: Mapping[str, Aggregation] = {
    "mean": Aggregation("fp32", 0.1),
    "majority": Aggregation("sign", 0.003),
    "IT vote": Aggregation("it-sign", 0.003),
}


@dataclass(frozen=True, slots=True)
class Lied(BSP):
    """BSP over servers, in which the first `liars` workers push a lie instead of their gradient."""

    liars: int = 0
    lie: str = "random"

    traits: ClassVar[Traits] = replace(BSP.traits, topologies=("ps",), delivers="server", encodes=("ps",))

    async def work(self, worker: Worker) -> None:
        while True:
            await worker.server.next_version(lend=True)
            gradient = await worker.gradient()
            await worker.server.push(self.told(gradient, worker) if worker.rank < self.liars else gradient)

    def told(self, truth: torch.Tensor, worker: Worker) -> torch.Tensor:
        """The lie for a gradient `truth`, `SCALE` times as long."""
        generator = torch.Generator().manual_seed(worker.clock * WORKERS + worker.rank)
        lie = LIES[self.lie](truth, generator)
        return lie.mul_(SCALE * truth.norm() / lie.norm().clamp_min(torch.finfo(lie.dtype).tiny))


QUICK: dict[str, Any] = {"rounds": 30, "seeds": 1}
"""Flags of the reduced form."""


def reproduce(*, rounds: Annotated[int, ROUNDS] = 100, seeds: Annotated[int, SEEDS] = 3) -> dict[str, Any]:
    """Train `digits-mlp` with 0 to `MOST` liars of each kind under each rule, and return the rows.

    `accuracy` is the test accuracy after the last round, a mean over seeds; `spread` is its standard deviation. Both
    are NaN if the training diverged.

    Raises `UsageError` for numbers that are out of range.
    """
    for name, value in (("rounds", rounds), ("seeds", seeds)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}.")
    cases = [("none", 0), *((lie, liars) for lie in LIES for liars in range(1, MOST + 1))]
    rows = [_row(lie, liars, rule, rounds, seeds) for lie, liars in cases for rule in RULES]
    return {"reproduce": "byzantine", "time": "virtual", "rounds": rounds, "seeds": seeds, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """A row for each kind of lie and each rule, a column for each number of liars."""
    from rich import box
    from rich.table import Table

    caption = (
        f"test accuracy of digits-mlp after {result['rounds']} rounds by how many of {WORKERS} workers lie, mean of "
        f"{result['seeds']} seeds. Workers and links are virtual, gradients and messages real."
    )
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", caption=caption, caption_justify="left")
    shown.add_column("who lies says")
    shown.add_column("rule")
    for liars in range(MOST + 1):
        shown.add_column(str(liars), justify="right")
    found = {(row["lie"], row["byzantine"], row["rule"]): row["accuracy"] for row in result["rows"]}
    for lie in LIES:
        for rule in RULES:
            cells = [found["none", 0, rule], *(found[lie, liars, rule] for liars in range(1, MOST + 1))]
            shown.add_row(lie, rule, *("diverged" if math.isnan(cell) else f"{cell:.1%}" for cell in cells))
    return shown


def accuracy(lie: str, liars: int, rule: Aggregation, *, rounds: int, seed: int = 0) -> float:
    """Test accuracy of one run; NaN if it diverges."""
    from dure.run.train import train

    sync = Lied() if lie == "none" else Lied(liars, lie)
    options = {"workers": WORKERS, "steps": rounds, "eval_every": rounds, "lr": rule.lr, "seed": seed, "exact": True}
    try:
        run = train("digits-mlp", sync=sync, codec=rule.codec, on="virtual", **options)
    except DivergedError:
        return math.nan
    return float(run.summary()["accuracy"])


def _row(lie: str, liars: int, rule: str, rounds: int, seeds: int) -> dict[str, Any]:
    found = [accuracy(lie, liars, RULES[rule], rounds=rounds, seed=seed) for seed in range(seeds)]
    mean = statistics.fmean(found)
    spread = math.nan if math.isnan(mean) else statistics.stdev(found) if seeds > 1 else 0.0
    return {"lie": lie, "byzantine": liars, "rule": rule, "accuracy": mean, "spread": spread}
