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
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from tyro.conf import arg

from dure.core.regular_file import check_output
from dure_studies.flags import DATA, OUT, ROUNDS, SEEDS, check_counts, listed
from dure_studies.it_signsgd_modes import METHODS, MODES, WORKERS, Contender, batch_sizes
from dure_studies.output import Columns, draw, spread, statement_table, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from torch import Tensor, nn

    from dure.job.data.dataset import Data
    from dure.job.job import Job
    from dure.report.figures import Band
    from dure_studies.vote_rounds import Learned

EVALUATIONS = 12

EQUAL = 0.01
"""Largest difference of two accuracies that count as equal."""


def _ahead(place: int) -> Callable[[Sequence[float]], bool]:
    return lambda leads: leads[place] > 0


def _grows(leads: Sequence[float]) -> bool:
    return all(before < after for before, after in itertools.pairwise(leads))


CLAIMS: Mapping[str, Callable[[Sequence[float]], bool]] = {
    f"is within {100 * EQUAL:.0f} point of the majority in mode 1": lambda leads: abs(leads[0]) <= EQUAL,
    **{f"is ahead of the majority in mode {mode}": _ahead(place) for place, mode in enumerate(MODES) if place},
    "is ahead in modes 2 to 4, and further in each": lambda leads: leads[1] > 0 and _grows(leads[1:]),
}
"""The paper's statements on figure 1, of the leads of the weighted vote over the majority by mode."""

Finals = Mapping[tuple[str, int, str], Sequence[float]]
"""Accuracy after the last round by seed, by data set, mode and method."""


MAJORITY = "signSGD-MV"
VOTES = ("IT-signSGD (paper)", "IT-signSGD")


def _mnist(data: Path | None) -> Job:
    from dure.job.job import load_job
    from dure_jobs.data.mnist import DEVIATION, MEAN

    job = load_job("mnist-mlp", data, hidden=32)
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
    """Network from (batch, 3, 32, 32) to (batch, 10) of 4,346 parameters; batch norm needs batches of more than 4."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=5, stride=4, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


JOBS: Mapping[str, Callable[[Path | None], Job]] = {"mnist": _mnist, "cifar10": _cifar10}


@dataclass(frozen=True, slots=True)
class Curve:
    """Test accuracy over rounds: mean and standard deviation over seeds."""

    rounds: tuple[int, ...]
    means: tuple[float, ...]
    spreads: tuple[float, ...]
    finals: tuple[float, ...]
    """Accuracy after the last round, by seed."""
    bytes_per_step: float
    bytes_back_per_step: float

    @classmethod
    def of(cls, runs: Sequence[Learned]) -> Curve:
        """The curve of runs that differ only in their seeds."""
        rounds = tuple(runs[0].accuracies)
        columns = [[run.accuracies[step] for run in runs] for step in rounds]
        sent = statistics.mean(run.bytes_per_step for run in runs)
        received = statistics.mean(run.bytes_back_per_step for run in runs)
        means, spreads = tuple(map(statistics.mean, columns)), tuple(map(spread, columns))
        return cls(rounds, means, spreads, tuple(columns[-1]), sent, received)


quick = {"dataset": "mnist", "rounds": 60, "seeds": 1}


def reproduce(
    *,
    dataset: Annotated[str, arg(help="mnist, cifar10, or both with a comma.")] = "",
    rounds: Annotated[int, ROUNDS] = 200,
    seeds: Annotated[int, SEEDS] = 3,
    sweep: Annotated[bool, arg(help="Vary each choice that the paper leaves open, in place of the figure.")] = False,
    data: Annotated[Path | None, DATA] = None,
    out: Annotated[Path, OUT] = Path("it-signsgd.svg"),
) -> dict[str, Any]:
    """Train with every method in every mode; return the rows, and draw the curves to `out`.

    `accuracy` is the test accuracy after the last round, and `spread` its standard deviation over seeds.
    `bytes_per_step` are the bytes that a worker sends in a step, and `bytes_back_per_step` those that it receives.

    With `sweep`, the rows are those of `it_signsgd_sweep`, and nothing is drawn.

    Raises `UsageError` for options that do not fit, `DataError` if data is missing; both before the training.
    """
    wanted = listed("dataset", dataset or ("mnist" if sweep else ",".join(JOBS)), list(JOBS))
    check_counts(rounds=rounds, seeds=seeds)
    if not sweep:
        check_output(out)
    jobs = {name: JOBS[name](data) for name in wanted}
    result = {
        "reproduce": "it-signsgd",
        "time": "virtual",
        "rounds": rounds,
        "seeds": seeds,
        "data": {name: job.source for name, job in jobs.items()},
    }
    if sweep:
        from dure_studies import it_signsgd_sweep

        return result | it_signsgd_sweep.swept(jobs, rounds, seeds)
    curves = {
        (name, mode, method): _curve(job, mode, METHODS[method], METHODS[method].lr[name], rounds, seeds)
        for name, job in jobs.items()
        for mode in MODES
        for method in METHODS
    }
    _draw(out, curves)
    return result | {
        "picture": str(out),
        "rows": [_row(*key, curve) for key, curve in curves.items()],
        "statements": statements({key: curve.finals for key, curve in curves.items()}),
    }


def _row(name: str, mode: int, method: str, curve: Curve) -> dict[str, Any]:
    return {
        "dataset": name,
        "mode": mode,
        "method": method,
        "accuracy": curve.means[-1],
        "spread": curve.spreads[-1],
        "accuracies": list(curve.finals),
        "bytes_per_step": curve.bytes_per_step,
        "bytes_back_per_step": curve.bytes_back_per_step,
    }


def statements(finals: Finals) -> list[dict[str, Any]]:
    """The paper's statements on figure 1, each with the number of seeds in which it holds, by data set and vote."""
    found: dict[str, list[bool]] = {}
    for name in dict.fromkeys(name for name, _, _ in finals):
        last = partial(_by_seed, finals, name)
        found[f"{name}: {MAJORITY} loses more than SGD from mode 1 to 4"] = [
            majority[0] - majority[-1] > mean[0] - mean[-1]
            for majority, mean in zip(last(MAJORITY), last("SGD"), strict=True)
        ]
        for vote in VOTES:
            leads = [
                [ours - theirs for ours, theirs in zip(*pair, strict=True)]
                for pair in zip(last(vote), last(MAJORITY), strict=True)
            ]
            found |= {f"{name}: {vote} {claim}": [holds(each) for each in leads] for claim, holds in CLAIMS.items()}
    return [{"statement": text, "holds": sum(by_seed), "of": len(by_seed)} for text, by_seed in found.items()]


def _by_seed(finals: Finals, name: str, method: str) -> list[tuple[float, ...]]:
    """For each seed the accuracies by mode."""
    return list(zip(*(finals[name, mode, method] for mode in MODES), strict=True))


def table(result: dict[str, Any]) -> Table | Group:
    """The rows, and the statements."""
    from rich.console import Group

    if "choices" in result:
        from dure_studies import it_signsgd_sweep

        return it_signsgd_sweep.table(result)
    columns: Columns = [
        ("data", "{dataset}"),
        ("mode", "{mode}"),
        ("small batches", lambda row: f"{MODES[row['mode']]} of {WORKERS}"),
        ("method", "{method}"),
        ("accuracy", "{accuracy:.2%}"),
        ("spread", "{spread:.2%}" if result["seeds"] > 1 else "\N{EN DASH}"),
        ("bytes sent a step", "{bytes_per_step:,.0f}"),
        ("received", "{bytes_back_per_step:,.0f}"),
    ]
    caption = (
        f"test accuracy after {result['rounds']} rounds, mean and standard deviation over seeds ({result['seeds']}). "
        f"Workers are virtual, gradients and messages real. Curves: {result['picture']}"
    )
    return Group(table_of(result["rows"], columns, caption, texts=("data", "method")), statement_table(result))


def _curve(job: Job, mode: int, contender: Contender, rate: float, rounds: int, seeds: int) -> Curve:
    from dure_studies.vote_rounds import VoteTrial, learn

    trial = VoteTrial(codec=contender.codec, lr=rate, batch_sizes=batch_sizes(mode))
    every = max(1, rounds // EVALUATIONS)
    return Curve.of([learn(job, trial, rounds=rounds, every=every, seed=seed) for seed in range(seeds)])


def _draw(path: Path, curves: Mapping[tuple[str, int, str], Curve]) -> None:
    """Draw a row of panels for each data set, a panel for each mode, and a line with its spread for each method."""
    from dure.report.figures import Band

    panels: dict[tuple[str, str], list[Band]] = {}
    for (name, mode, method), curve in curves.items():
        title = f"mode {mode}: {MODES[mode]} of {WORKERS} have small batches"
        panels.setdefault((name, title), []).append(Band(method, curve.rounds, curve.means, curve.spreads))
    draw(path, panels, x="rounds", y="test accuracy", percent=True)
