"""Measures the momentum that asynchrony adds, and compares compensated momentum with plain.

Mitliagkas, Zhang, Hadjis and Re, "Asynchrony Begets Momentum, with an Application to Deep Learning", Allerton 2016,
theorem 3 and figure 4: if K workers' steps take independent exponential times, the expected model moves as under a
momentum of 1 - 1/K. The less momentum is given beside it, the more workers can be used.

On a quadratic, each gradient g_t gets a random push n_t, which depends on nothing. The mean response of the
model after h updates, r_h, is then the correlation of the two. By the theorem

    r_(h+1) - r_h  =  mu (r_h - r_(h-1))  -  (1 - mu) lr r_h                  for h >= 2

and mu is fitted by least squares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Compute, Constant, Pareto, ShiftedExponential
from dure_studies.study import FigureColumn, OfSeed, Row, Setting, Statement, Study, learnt, less

if TYPE_CHECKING:
    import torch

    from dure.job.job import Job
    from dure.topology.correction import Update

GROUPS = (2, 4, 8)
QUADRATIC = "quadratic:dim=1000,conditioning=1,noise=0,samples=64,dtype=float64"
LR, UPDATES, LAGS = 0.3, 1200, 24
MNIST_WORKERS = 16


class Record:
    """The random pushes of a run, and the model before each of them."""

    def __init__(self, seed: int) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(seed)
        self.pushes: list[torch.Tensor] = []
        self.models: list[torch.Tensor] = []


@dataclass(frozen=True, slots=True)
class Pushes:
    """Adds a random push to each gradient at the server."""

    record: Record
    compares: ClassVar[bool] = False

    def correct(self, update: Update) -> None:
        import torch

        push = torch.randn(update.gradient.shape, dtype=update.gradient.dtype, generator=self.record.generator)
        self.record.models.append(update.values.clone())
        self.record.pushes.append(push)
        update.gradient.add_(push)


def momentum_of(models: torch.Tensor, pushes: torch.Tensor, lr: float) -> float:
    """The momentum fitted to the mean response of `models` (updates, dim) to `pushes` before each update."""
    import torch

    centred = models - models.mean(dim=0)
    last = len(models) - LAGS
    response = torch.stack([-(centred[lag : lag + last] * pushes[:last]).mean() / lr for lag in range(LAGS)])
    moved = response[1:] - response[:-1]  # moved[h] is r_(h+1) - r_h
    pulled = lr * response
    left, right = moved[2:] + pulled[2:-1], moved[1:-1] + pulled[2:-1]
    return float((left * right).sum() / (right * right).sum())


def fitted(study: Study, job: Job, setting: Setting, rounds: int, seed: int) -> Row:
    """The fitted momentum of a run on the quadratic; for other jobs, the figures of `learnt`."""
    if not setting.job:
        return learnt(study, job, setting, rounds, seed)
    import torch

    from dure.run.train import train
    from dure.sync.corrected import Corrected
    from dure.sync.downpour import Downpour

    record = Record(seed)
    steps = max(2 * LAGS, UPDATES * rounds // study.rounds) // setting.cluster.workers
    run = train(
        job, sync=Corrected(Downpour(), (Pushes(record),)), topology="ps", on=setting.cluster, steps=steps, seed=seed,
        lr=LR, eval_every=steps, exact=True, batch_size=1,
    )  # fmt: skip
    found = momentum_of(torch.stack(record.models), torch.stack(record.pushes), LR)
    staleness = run.summary()["staleness"]["mean"]
    return {"momentum": found, "staleness": staleness, "why": "", "history": ()}


def _quadratics() -> dict[str, Setting]:
    def free(workers: int, compute: Compute) -> Cluster:
        """A cluster whose messages take no time."""
        machines = (Machines(count=workers, compute=compute),)
        return Cluster(machines=machines, link=Link(bandwidth=1e15, latency=0.0), alpha=0.0, beta=0.0, gamma=0.0)

    kinds: Mapping[str, Compute] = {
        "exponential": ShiftedExponential(seconds=1.0, shift=0.0),
        "Pareto": Pareto(seconds=1.0, tail=2.5),
        "constant": Constant(seconds=1.0),
    }
    sizes = [("exponential", workers) for workers in GROUPS] + [("Pareto", GROUPS[-1]), ("constant", GROUPS[-1])]
    return {
        f"{kind}, {workers} workers": Setting(
            "downpour ps", free(workers, kinds[kind]), job=QUADRATIC, panel="momentum", line=kind, at=workers
        )
        for kind, workers in sizes
    }


def _trainings() -> dict[str, Setting]:
    cluster = Cluster.uniform(MNIST_WORKERS, compute=ShiftedExponential(seconds=0.01, shift=0.0))
    optimizer = {"optimizer": "momentum:momentum=0.9"}
    strategies: Mapping[str, tuple[str, Mapping[str, str]]] = {
        "momentum 0.9": ("downpour ps", optimizer),
        "momentum 0": ("downpour ps", {}),
        "compensated to 0.9": ("downpour+momentum-compensation:target=0.9 ps", {}),
        "compensated to 0.5": ("downpour+momentum-compensation:target=0.5 ps", {}),
    }
    return {
        f"mnist-mlp, {name}": Setting(
            strategy, cluster, options=options, share=0.5, rates=(0.003, 0.01, 0.03, 0.06), at=MNIST_WORKERS
        )
        for name, (strategy, options) in strategies.items()
    }


def _settings() -> Mapping[str, Setting]:
    return _quadratics() | _trainings()


def _near(kind: str, workers: int, within: float) -> Statement:
    def holds(rows: OfSeed) -> bool:
        return bool(abs(rows[f"{kind}, {workers} workers"]["momentum"] - (1 - 1 / workers)) <= within)

    return Statement(
        f"{kind} steps, {workers} workers: the momentum is within {within:g} of {1 - 1 / workers:g}", holds
    )


def _sooner(one: str, other: str) -> Statement:
    text = f"{MNIST_WORKERS} workers: {one} needs fewer samples to the target than {other}"
    return less(text, "samples_to_target", f"mnist-mlp, {one}", f"mnist-mlp, {other}")


STUDY = Study(
    name="momentum",
    about=f"Downpour over one server; a quadratic, then mnist-mlp with {MNIST_WORKERS} workers at the best rate.",
    settings=_settings,
    columns=(FigureColumn("momentum", "fitted momentum", "{:.3f}"), "staleness", "lr", "accuracy", "samples_to_target"),
    rounds=250,
    measure=fitted,
    x="workers",
    y="momentum",
    statements=(
        *(_near("exponential", workers, 0.05) for workers in GROUPS),
        *(_near(kind, GROUPS[-1], 0.05) for kind in ("Pareto", "constant")),
        _sooner("compensated to 0.9", "momentum 0.9"),
        _sooner("compensated to 0.5", "momentum 0"),
        _sooner("compensated to 0.5", "momentum 0.9"),
        less(
            f"{MNIST_WORKERS} workers: compensated to 0.5 ends more accurate than momentum 0",
            "accuracy",
            "mnist-mlp, momentum 0",
            "mnist-mlp, compensated to 0.5",
        ),
    ),
)
