"""Counts operations and words of synchronous, asynchronous and pipelined SGD, beside the formulas of a table of costs.

The table is the first of a comparison by Yook, Lee and Yoo (in Korean): data-parallel and pipelined training of an MLP
of L weight matrices of N x N, with M mini-batches of T samples on K nodes. It gives orders. The constants here come
from counting, with 2 operations for a multiplication and an addition:

    products         a mini-batch: forward 2 N^2 L T, gradient of weights 2 N^2 L T, of inputs 2 N^2 (L - 1) T
    updates          2 N^2 L of SGD

    | scheme     | updates and means, all nodes                 | words over links                                  |
    |------------|----------------------------------------------|---------------------------------------------------|
    | averaging  | 2 N^2 L M by workers, N^2 L M / tau by       | 2 N^2 L M / tau: models up and down               |
    |            | servers: K - 1 additions and a scaling       |                                                   |
    | gradients  | N^2 L M (1 + 2 / K) by servers: K - 1        | 2 N^2 L M                                         |
    |            | additions, a scaling, and the update         |                                                   |
    | async      | 2 N^2 L M by servers                         | 2 N^2 L M                                         |
    | pipelined  | 2 N^2 L M                                    | 2 (K - 1) N T M: outputs, and their gradients     |
    | versions   | 2 N^2 L M and N^2 L M / tau for means of the | the same                                          |
    |            | 2 K - 1 versions, every tau rounds           |                                                   |

A scheme is run in virtual time with real gradients, by the code of every run. Each matrix product and each operation on
a vector of parameters is counted as PyTorch carries it out, words are the payload of messages. Two runs of different
lengths are compared, so that the start, the end and evaluations do not count. The `real` rows are runs of processes, of
which words are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dure.job.data.dataset import Data
from dure.job.job import Job
from dure.job.optimizer import OptimizerSpec
from dure.planner.auto import train

if TYPE_CHECKING:
    from rich.table import Table

WIDTH, LAYERS, SAMPLES, BATCHES = (8, 16), (4, 8), (2, 6), 252
"""N, L, T, and M, which all K, all periods and all rounds of versions divide."""

NODES, PERIODS = (2, 4), (1, 3)


class EpochSizes(NamedTuple):
    """The numbers of the table: N, L, T, M, K and tau."""

    width: int
    layers: int
    samples: int
    batches: int
    nodes: int
    period: int

    @property
    def weights(self) -> int:
        """The weights of all matrices: N^2 L."""
        return self.width**2 * self.layers


ROWS = 60
"""Samples of the data."""

REAL = EpochSizes(width=8, layers=4, samples=6, batches=24, nodes=2, period=2)
"""The setting of the runs of processes."""


class EpochCosts(NamedTuple):
    """Operations of matrix products and on vectors of parameters, and words that are sent, of all nodes."""

    products: float
    vectors: float
    words: float


@dataclass(frozen=True)
class TrainingScheme:
    """A column of the table: its strategy in this library, and its formulas, in operations and words.

    `shared`: each node takes M / K of the mini-batches.
    """

    strategy: Callable[[EpochSizes], str]
    vectors: Callable[[EpochSizes], float]
    words: Callable[[EpochSizes], float]
    shared: bool = True
    periodic: bool = False


def _twice_the_model(at: EpochSizes) -> float:
    return 2 * at.weights * at.batches


def _with_means(at: EpochSizes) -> float:
    return 2 * at.weights * at.batches + at.weights * at.batches / at.period


def _borders(at: EpochSizes) -> float:
    return 2 * (at.nodes - 1) * at.width * at.samples * at.batches


SCHEMES: Mapping[str, TrainingScheme] = {
    "averaging": TrainingScheme(
        lambda at: f"averaging:period={at.period} ps",
        _with_means,
        lambda at: 2 * at.weights * at.batches / at.period,
        periodic=True,
    ),
    "gradients": TrainingScheme(
        lambda at: "bsp ps", lambda at: at.weights * at.batches * (1 + 2 / at.nodes), _twice_the_model
    ),
    "async": TrainingScheme(lambda at: "downpour ps", _twice_the_model, _twice_the_model),
    "pipelined": TrainingScheme(
        lambda at: f"bsp petrowski:stages={at.nodes}", _twice_the_model, _borders, shared=False
    ),
    "versions": TrainingScheme(
        lambda at: f"bsp multi-version:stages={at.nodes},average={at.period}",
        _with_means,
        _borders,
        shared=False,
        periodic=True,
    ),
}

SCHEMES_OF_PROCESSES = SCHEMES


def reproduce() -> dict[str, Any]:
    """The rows: for each scheme and setting, the counts and those of the formulas, for M mini-batches."""
    rows = [_row(name, setting, "virtual") for name in SCHEMES for setting in settings(SCHEMES[name])]
    rows += [_row(name, REAL, "local") for name in SCHEMES_OF_PROCESSES]
    return {"reproduce": "table1", "time": "virtual and real", "rows": rows}


def settings(scheme: TrainingScheme) -> Iterator[EpochSizes]:
    """The settings of a scheme."""
    for width, layers, samples, nodes in product(WIDTH, LAYERS, SAMPLES, NODES):
        for period in PERIODS if scheme.periodic else (1,):
            yield EpochSizes(width, layers, samples, BATCHES, nodes, period)


def formula(scheme: TrainingScheme, setting: EpochSizes) -> EpochCosts:
    """The counts of a scheme by the formulas."""
    width, layers, samples, batches, *_ = setting
    products = 2 * width**2 * samples * (3 * layers - 1) * batches
    return EpochCosts(products, scheme.vectors(setting), scheme.words(setting))


def counted(scheme: TrainingScheme, setting: EpochSizes, on: str = "virtual") -> EpochCosts:
    """The counts of a run of M mini-batches: those of a run of twice as many, less those of a run of as many."""
    once, twice = (_run(scheme, setting, times, on) for times in (1, 2))
    return EpochCosts(*(more - less for more, less in zip(twice, once, strict=True)))


def _row(name: str, setting: EpochSizes, on: str) -> dict[str, Any]:
    """A row. Operations of other processes are not counted."""
    scheme = SCHEMES[name]
    counts = counted(scheme, setting, on)._asdict()
    if on == "local":
        counts |= {"products": None, "vectors": None}
    return {
        "scheme": name,
        "time": "virtual" if on == "virtual" else "real",
        "strategy": scheme.strategy(setting),
        **setting._asdict(),
        "counted": counts,
        "formula": formula(scheme, setting)._asdict(),
    }


def _run(scheme: TrainingScheme, setting: EpochSizes, times: int, on: str) -> EpochCosts:
    steps = times * setting.batches // (setting.nodes if scheme.shared else 1)
    of_a_file = f"{__file__}:mlp:width={setting.width},layers={setting.layers},samples={setting.samples}"
    job = mlp(*setting[:3]) if on == "virtual" else of_a_file
    given: dict[str, Any] = {"on": on, "workers": setting.nodes, "steps": steps, "eval_every": steps}
    with OperationCounter(setting.width**2) as operations:
        run = train(job, strategy=scheme.strategy(setting), **given)
    found = run.summary()
    nbytes = found["bytes_sent"] + (found["bytes_received"] if scheme.shared else 0)
    return EpochCosts(operations.products, operations.vectors, nbytes / 4)


def mlp(width: int, layers: int, samples: int) -> Job:
    """L matrices without biases, a hyperbolic tangent behind each, on random data."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(ROWS, width, generator=draw) for _ in range(2))
    given: dict[str, Any] = {"batch_size": samples, "optimizer": OptimizerSpec(lr=0.01), "name": "mlp"}
    return Job(partial(_network, width, layers), nn.functional.mse_loss, Data(inputs, targets), None, **given)


def _network(width: int, layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)))


MADE = ("new_empty", "empty", "empty_like", "zeros", "zeros_like", "ones_like", "lift_fresh", "fill_", "zero_")
MOVED = ("detach", "slice", "view", "copy_", "clone", "cat", "split", "roll", "alias", "select", "index", "_to_copy")
FREE = frozenset((*MADE, *MOVED, "mean"))  # the mean is that of losses
"""Operations that compute nothing with parameters. Any other one counts once for each value of its result."""


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of matrix products, and those on vectors of at least `least` values, as those of parameters."""

    def __init__(self, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.least = least
        self.products = 0.0
        self.vectors = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        out = function(*args, **given)
        packet = function._overloadpacket
        if packet in flop_registry:
            self.products += flop_registry[packet](*args, **given, out_val=out)
        elif isinstance(out, Tensor) and out.dim() == 1 and out.numel() >= self.least:
            self.vectors += _cost(packet.__name__, given) * out.numel()
        return out


def _cost(name: str, given: Mapping[str, Any]) -> int:
    """Operations for each value of the result: one more where an operand is multiplied by `alpha`."""
    return 0 if name in FREE else 1 + (given.get("alpha", 1) != 1)


def table(result: dict[str, Any]) -> Table:
    """The rows as a table, with the ratio of counts and formulas."""
    from rich.table import Table

    shown = Table(title="Counted, and by formula, of all nodes", box=None, pad_edge=False)
    counts = (head for kind in ("products", "vectors", "words") for head in (kind, "formula"))
    for head in ("scheme", "N", "L", "T", "M", "K", "tau", *counts):
        shown.add_column(head, justify="left" if head == "scheme" else "right")
    for row in result["rows"]:
        cells = [_text(row[part][kind]) for kind in ("products", "vectors", "words") for part in ("counted", "formula")]
        shown.add_row(row["scheme"], *(str(row[name]) for name in EpochSizes._fields), *cells)
    return shown


def _text(count: float | None) -> str:
    return "" if count is None else f"{count:,.0f}"
