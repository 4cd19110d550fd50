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
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import torch

from dure.errors import DivergedError
from dure.sync.base import Traits
from dure.sync.bsp import BSP
from dure_studies.flags import ROUNDS, SEEDS, check_counts
from dure_studies.output import Columns, spread, table_of

if TYPE_CHECKING:
    from rich.table import Table

    from dure.sync.worker import Worker

WORKERS = 15
MOST = 7
"""The most liars: one more would be half of the voters."""

SCALE = 10.0

LIES: Mapping[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "random": lambda truth, generator: torch.randn(truth.shape, generator=generator, dtype=truth.dtype),
    "inverted": lambda truth, _: -truth,
    "constant": lambda truth, _: torch.ones_like(truth),
}


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

    traits: ClassVar[Traits] = replace(BSP.traits, needs=("servers",), delivers="server")

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


quick = {"rounds": 30, "seeds": 1}


def reproduce(*, rounds: Annotated[int, ROUNDS] = 100, seeds: Annotated[int, SEEDS] = 3) -> dict[str, Any]:
    """Train `digits-mlp` with 0 to `MOST` liars of each kind under each rule, and return the rows.

    `accuracy` is the test accuracy after the last round, a mean over seeds; `spread` is its standard deviation. Both
    are NaN if the training diverged.

    Raises `UsageError` for numbers that are out of range.
    """
    check_counts(rounds=rounds, seeds=seeds)
    cases = [("none", 0), *((lie, liars) for lie in LIES for liars in range(1, MOST + 1))]
    rows = [_row(lie, liars, rule, rounds, seeds) for lie, liars in cases for rule in RULES]
    return {"reproduce": "byzantine", "time": "virtual", "rounds": rounds, "seeds": seeds, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """A row for each kind of lie and each rule, a column for each number of liars."""
    found = {(row["lie"], row["byzantine"], row["rule"]): row["accuracy"] for row in result["rows"]}

    def of_liars(liars: int) -> Callable[[tuple[str, str]], str]:
        def cell(row: tuple[str, str]) -> str:
            lie, rule = row
            accuracy = found[lie if liars else "none", liars, rule]
            return "diverged" if math.isnan(accuracy) else f"{accuracy:.1%}"

        return cell

    columns: Columns = [
        ("false gradient", lambda row: row[0]),
        ("rule", lambda row: row[1]),
        *((str(liars), of_liars(liars)) for liars in range(MOST + 1)),
    ]
    caption = (
        f"test accuracy of digits-mlp after {result['rounds']} rounds by how many of {WORKERS} workers lie, mean of "
        f"{result['seeds']} seeds. Workers and links are virtual, gradients and messages real."
    )
    return table_of(product(LIES, RULES), columns, caption, texts=("false gradient", "rule"))


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
    return {
        "lie": lie,
        "byzantine": liars,
        "rule": rule,
        "accuracy": mean,
        "spread": math.nan if math.isnan(mean) else spread(found),
    }
