"""Compares IT-signSGD with signSGD with a majority vote, if some of 15 workers compute less than the others.

Park and Lee, "IT-signSGD" (in Korean); Park, Poor and Lee, "SignSGD with Federated Voting", 2024, arXiv 2403.16372.

    mode                                   1    2    3    4
    workers with batches of 4              0    9   12   14      the others have batches of 64

The paper shows curves only: both are equal in mode 1, and the lead of IT-signSGD grows from mode 2 to 4. It does not
give the model, the learning rate, the number of rounds, the other batch size, the rounds in which the vote has equal
weights, and the treatment of gradients that are exactly zero. Such gradients are many: pixels are from 0 to 1, so those
at the border are zero in all images. With one bit an element their signs are random, as a constant +1 would be a bias.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dure.core.spec_text import names
from dure.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from dure.job.data.dataset import Data
    from dure.job.job import Job
    from dure.report.run import Run

WORKERS = 15
FEW, MANY = 4, 64
"""Batch sizes."""

MODES: Mapping[int, int] = {1: 0, 2: 9, 3: 12, 4: 14}
"""Workers with batches of `FEW`, by mode."""

EVALUATIONS = 12


class Contender(NamedTuple):
    """A codec that aggregates gradients, and a learning rate that suits it by data set: signs need small rates."""

    codec: str
    lr: Mapping[str, float]


_OF_SIGNS = {"mnist": 1e-3, "cifar10": 1e-3}

METHODS: Mapping[str, Contender] = {
    "SGD": Contender("fp32", {"mnist": 0.5, "cifar10": 0.1}),
    "signSGD-MV": Contender("sign:zeros=random", _OF_SIGNS),
    "IT-signSGD (paper)": Contender("it-sign:granularity=coordinate,zeros=random", _OF_SIGNS),
    "IT-signSGD": Contender("it-sign", _OF_SIGNS),
}


def _mnist(data: Path | None) -> Job:
    from dure.job.data.mnist import DEVIATION, MEAN
    from dure.job.job import load_job

    job = load_job("mnist-mlp", data, hidden=64)
    return dataclasses.replace(job, train=_pixels(job.train, MEAN, DEVIATION), test=_pixels(job.test, MEAN, DEVIATION))


def _cifar10(data: Path | None) -> Job:
    from dure.job.job import load_job

    job = load_job("cifar10-cnn", data)  # no pixel has the same value in all images
    return dataclasses.replace(job, model=convnet, name="cifar10-small-cnn")


def _pixels(data: Data | None, mean: float, deviation: float) -> Data:
    """Scales standardised images back to pixels from 0 to 1; black pixels are exactly 0."""
    assert data is not None
    inputs = cast("Tensor", data.inputs)
    return dataclasses.replace(data, inputs=(inputs * deviation + mean).mul_(255).round_().div_(255))


def convnet() -> nn.Sequential:
    """Network from (batch, 3, 32, 32) to (batch, 10) of 26,346 parameters; batch norm needs batches of more than 4."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 10),
    )


JOBS: Mapping[str, Callable[[Path | None], Job]] = {"mnist": _mnist, "cifar10": _cifar10}


@dataclass(frozen=True, slots=True)
class Curve:
    """Test accuracy over rounds: mean and standard deviation over seeds."""

    rounds: tuple[int, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    bytes_per_step: float
    bytes_back_per_step: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Curve:
        """The curve of runs that differ only in their seeds."""
        by_seed = [{int(row["step"]): row["accuracy"] for row in run.history} for run in runs]
        steps = tuple(by_seed[0])
        columns = [[seed[step] for seed in by_seed] for step in steps]
        summaries = [run.summary() for run in runs]
        sent, received = (
            statistics.mean(each[f"bytes_{way}"] for each in summaries) / steps[-1] / WORKERS
            for way in ("sent", "received")
        )
        return cls(steps, tuple(map(statistics.mean, columns)), tuple(map(_deviation, columns)), sent, received)


QUICK: dict[str, Any] = {"rounds": 60, "seeds": 1}
"""Flags of the reduced form."""


def reproduce(
    *,
    dataset: str = "mnist",
    rounds: int = 100,
    seeds: int = 3,
    data: Path | None = None,
    out: Path = Path("it-signsgd.svg"),
) -> dict[str, Any]:
    """Train with every method in every mode; return the rows, and draw the curves to `out`.

    `accuracy` is the test accuracy after the last round, and `spread` its standard deviation over seeds.
    `bytes_per_step` are the bytes that a worker sends in a step, and `bytes_back_per_step` those that it receives.

    Raises `UsageError` for options that do not fit, `DataError` if data is missing; both before the training.
    """
    wanted = _datasets(dataset)
    for name, value, least in (("rounds", rounds, 1), ("seeds", seeds, 1)):
        if value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}.")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"cannot write {out}: there is no folder {out.parent}.")
    jobs = {name: JOBS[name](data) for name in wanted}
    curves = {
        (name, mode, method): _curve(job, mode, METHODS[method].codec, METHODS[method].lr[name], rounds, range(seeds))
        for name, job in jobs.items()
        for mode in MODES
        for method in METHODS
    }
    _draw(out, curves)
    rows = [
        {
            "dataset": name,
            "mode": mode,
            "method": method,
            "accuracy": curve.means[-1],
            "spread": curve.spreads[-1],
            "bytes_per_step": curve.bytes_per_step,
            "bytes_back_per_step": curve.bytes_back_per_step,
        }
        for (name, mode, method), curve in curves.items()
    ]
    sources = {name: job.source for name, job in jobs.items()}
    return {
        "reproduce": "it-signsgd",
        "time": "virtual",
        "rounds": rounds,
        "seeds": seeds,
        "data": sources,
        "picture": str(out),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> Table:
    """The rows as a table."""
    from rich import box
    from rich.table import Table

    caption = (
        f"test accuracy after {result['rounds']} rounds, mean and standard deviation over seeds ({result['seeds']}). "
        f"Workers and links are virtual, gradients and messages real. Curves: {result['picture']}"
    )
    shown = Table(box=box.SIMPLE_HEAD, header_style="bold", caption=caption, caption_justify="left")
    for name in ("data", "mode", "small batches", "method", "accuracy", "spread", "bytes sent a step", "received"):
        shown.add_column(name, justify="left" if name in ("data", "method") else "right")
    for row in result["rows"]:
        few = f"{MODES[row['mode']]} of {WORKERS}"
        spread = f"{row['spread']:.2%}" if result["seeds"] > 1 else "\N{EN DASH}"
        figures = (
            f"{row['accuracy']:.2%}",
            spread,
            f"{row['bytes_per_step']:,.0f}",
            f"{row['bytes_back_per_step']:,.0f}",
        )
        shown.add_row(row["dataset"], str(row["mode"]), few, row["method"], *figures)
    return shown


def _datasets(text: str) -> list[str]:
    wanted = [name.strip() for name in text.split(",")]
    for name in wanted:
        if name not in JOBS:
            raise UsageError(f"it-signsgd has the data sets {names(JOBS)}, got {name!r}. Write mnist,cifar10 for both.")
    return list(dict.fromkeys(wanted))


def _curve(job: Job, mode: int, codec: str, lr: float, rounds: int, seeds: Sequence[int]) -> Curve:
    from dure.run.train import train

    few = MODES[mode]
    runs = [
        train(
            job,
            sync="bsp",
            topology="ps",
            codec=codec,
            lr=lr,
            on="virtual",
            workers=WORKERS,
            batch_sizes=(FEW,) * few + (MANY,) * (WORKERS - few),
            steps=rounds,
            eval_every=max(1, rounds // EVALUATIONS),
            seed=seed,
            exact=True,
        )
        for seed in seeds
    ]
    return Curve.of(runs)


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _draw(path: Path, curves: Mapping[tuple[str, int, str], Curve]) -> None:
    """Draw a row of panels for each data set, a panel for each mode, and a line with its spread for each method."""
    from dure.report.figures import Band, grid
    from dure.report.files import replacing

    panels: dict[tuple[str, str], list[Band]] = {}
    for (name, mode, method), curve in curves.items():
        title = f"mode {mode}: {MODES[mode]} of {WORKERS} have small batches"
        panels.setdefault((name, title), []).append(Band(method, curve.rounds, curve.means, curve.spreads))
    with replacing(path) as file:
        file.write(grid(panels, x_label="rounds", y_label="test accuracy"))
