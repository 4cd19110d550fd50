"""Compares pipelines by the test loss that they reach: a deep dense network on MNIST, over 2, 4 and 8 stages.

Yook, Lee and Yoo, "A survey on parallel training algorithms for deep neural networks", 2020 (in Korean), section III,
compares pipelines in words: updates with weights that are stale damage learning as the number of stages K grows, DDG
and SpecTrain suffer with K, and GPipe's efficiency falls with K and with small mini-batches. It gives no figures.
Here each method trains the same model on the same samples in virtual time, with real gradients, at several learning
rates and seeds. Damage is the test loss beside that of SGD on one worker.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dure import partition
from dure.core.regular_file import check_output
from dure.errors import DivergedError, StrategyError
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Constant
from dure_studies.flags import DATA, OUT, ROUNDS, SEEDS, check_counts, listed, numbers
from dure_studies.output import Columns, Row, draw, judged, known, line, spread, statement_table, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dure.job.job import Job
    from dure.report.figures import Band
    from dure.report.run import Run

STAGES = (2, 4, 8)
RATES = (0.01, 0.05, 0.1)
DEPTH, HIDDEN = 7, 64
WIDTH = 1024
"""Units of each layer in the table of GPipe's efficiency."""

SGD = "none"
"""The row of one worker with the whole model."""

METHODS = (SGD, *partition.PIPELINES)

MOMENTUM = 0.9
WITH_MOMENTUM = ("spectrain",)
"""Methods that need momentum; their rate is multiplied by 1 - `MOMENTUM`, for updates of the same size."""

EFFICIENCY_BATCHES = (8, 16, 32, 64, 128, 256)
MICRO_BATCH = 8
"""Samples of a micro-batch in the table of GPipe's efficiency."""

DOUBLE_ROUNDS = 300
"""Mini-batches of the comparison of flush methods with SGD in double precision."""

BYTES = ("weight_bytes", "version_bytes", "activation_bytes")
"""Kinds of memory of a stage."""

quick = {"rounds": 200, "seeds": 1, "stages": "4", "rates": "0.05"}


def reproduce(
    *,
    rounds: Annotated[int, ROUNDS] = 1875,
    seeds: Annotated[int, SEEDS] = 3,
    stages: Annotated[str, arg(help="Numbers of stages, with commas between.")] = ",".join(map(str, STAGES)),
    rates: Annotated[str, arg(help="Learning rates, with commas between.")] = ",".join(map(str, RATES)),
    methods: Annotated[str, arg(help="Methods, with commas between.")] = ",".join(METHODS),
    data: Annotated[Path | None, DATA] = None,
    out: Annotated[Path, OUT] = Path("pipelines.svg"),
) -> dict[str, Any]:
    """Train with every method at every number of stages and rate for `rounds` mini-batches; draw loss against K.

    `loss` and `accuracy` are those of the test data at the end, `spread` is the standard deviation of the accuracy over
    seeds. `damage` is the loss divided by that of SGD at the same rate. `efficiency` is the speed of GPipe
    over that of one worker, divided by the stages, beside its closed form. `distance` is the relative distance of the
    losses of a flush method from those of SGD in double precision, the largest over the seeds. `statements` has for
    each sentence how many seeds confirm it.

    Raises `UsageError` for options that do not fit, `DataError` if data is missing; both before the training.
    """
    counts, wanted_rates = numbers("stages", stages, int, "2,4,8"), numbers("rates", rates, float, "0.01,0.1")
    wanted = list(dict.fromkeys([SGD, *listed("methods", methods, METHODS)]))
    check_counts(rounds=rounds, seeds=seeds)
    check_output(out)
    job = _job(data)
    rows = [
        _row(job, method, count, rate, rounds, range(seeds))
        for rate in wanted_rates
        for method in wanted
        for count in (counts if method != SGD else [1])
    ]
    _compare(rows)
    _draw(out, rows, counts)
    return {
        "reproduce": "pipelines",
        "time": "virtual",
        "rounds": rounds,
        "seeds": seeds,
        "data": job.source,
        "picture": str(out),
        "rows": rows,
        "efficiency": [_efficiency(count, batch) for count in counts for batch in EFFICIENCY_BATCHES],
        "distance": _distances(job, wanted, counts, rates=wanted_rates, rounds=rounds, seeds=range(seeds)),
        "statements": [each for rate in wanted_rates for each in _statements(rows, rate)],
    }


def table(result: Row) -> Group:
    """The rows, the figures of each stage, the efficiency of GPipe, and the statements, as tables."""
    from rich.console import Group

    shown = [_damage_table(result), _stage_table(result), _efficiency_table(result)]
    shown += [_distance_table(result)] if result["distance"] else []
    return Group(*shown, *([statement_table(result)] if result["statements"] else []))


def _damage_table(result: Row) -> Table:
    columns: Columns = [
        ("rate", "{rate:g}"),
        ("method", lambda row: "SGD, one worker" if row["method"] == SGD else row["method"]),
        ("stages", "{stages}"),
        ("accuracy", lambda row: known("accuracy", "{:.2%}")(row) or _reason(row)),
        ("spread", known("spread", "{:.2%}")),
        ("loss", known("loss", "{:.3f}")),
        ("of SGD's", known("damage", "{:.2f}")),
        ("seconds", known("seconds", "{:.3g}")),
    ]
    caption = (
        f"mnist-mlp of depth {DEPTH} after {result['rounds']} mini-batches, seeds: {result['seeds']}. Workers and "
        f"seconds are virtual, gradients are real. Curves: {result['picture']}"
    )
    return table_of(result["rows"], columns, caption, texts=("method",))


def _reason(row: Row) -> str:
    return str(row["why"]) if row["why"].startswith("diverged") else "refused"


def _stage_table(result: Row) -> Table:
    def counts(name: str) -> Callable[[Row], str]:
        return lambda row: " ".join(map(str, row["by_stage"][name]))

    def kilobytes(name: str) -> Callable[[Row], str]:
        return lambda row: " ".join(f"{each / 1e3:.0f}" for each in row["by_stage"][name])

    columns: Columns = [
        ("method", "{method}, {stages} stages"),
        ("staleness", counts("staleness")),
        ("versions", counts("versions")),
        ("weights, kB", kilobytes("weight_bytes")),
        ("share", lambda row: f"{max(row['by_stage']['weight_bytes']) / sum(row['by_stage']['weight_bytes']):.0%}"),
        ("other versions, kB", kilobytes("version_bytes")),
        ("activations, kB", kilobytes("activation_bytes")),
    ]
    caption = (
        "Figures of each stage, the first on the left; the most at once. The share is that of the largest stage in the "
        "weights of the whole model. Activations are kept for backwards."
    )
    first: dict[tuple[str, int], Row] = {}
    for row in result["rows"]:
        if row.get("by_stage", {}).get("versions"):
            first.setdefault((row["method"], row["stages"]), row)
    return table_of(first.values(), columns, caption, texts=("method",))


def _efficiency_table(result: Row) -> Table:
    columns: Columns = [
        ("stages", "{stages}"),
        ("mini-batch", "{batch}"),
        ("micro-batches", "{micro}"),
        ("efficiency", "{efficiency:.1%}"),
        ("closed form", "{closed_form:.1%}"),
    ]
    caption = (
        f"GPipe with micro-batches of {MICRO_BATCH} samples, on {DEPTH + 1} equal layers. Seconds are virtual. The "
        "closed form is U / (U + K - 1) for U micro-batches and K stages."
    )
    return table_of(result["efficiency"], columns, caption, texts=())


def _distance_table(result: Row) -> Table:
    columns: Columns = [("method", "{method}"), ("stages", "{stages}"), ("distance", "{distance:.1e}")]
    caption = (
        f"Test loss after {min(DOUBLE_ROUNDS, result['rounds'])} mini-batches in double precision, beside that of SGD "
        "with the same seed. The largest relative distance over the seeds."
    )
    return table_of(result["distance"], columns, caption, texts=("method",))


def _job(data: Path | None) -> Job:
    from dure.job.job import load_job

    return load_job("mnist-mlp", data, depth=DEPTH, hidden=HIDDEN)


def _row(job: Job, method: str, stages: int, rate: float, rounds: int, seeds: Iterable[int]) -> Row:
    row: Row = {"method": method, "stages": stages, "rate": rate, "loss": None, "accuracy": None, "why": ""}
    text = method if method == SGD else f"{method}:stages={stages}"
    summaries = []
    for seed in seeds:
        try:
            summaries.append(_run(job, text, stages, _optimizer(method, rate), rounds, seed).summary())
        except DivergedError:
            summaries.append({"loss": math.inf})
        except StrategyError as error:
            return row | {"why": str(error)}
    losses = [each["loss"] for each in summaries]
    row["losses"] = losses
    if math.inf in losses:
        return row | {"why": f"diverged: {losses.count(math.inf)} of {len(losses)}"}
    accuracies = [each["accuracy"] for each in summaries]
    return row | {
        "loss": statistics.mean(losses),
        "accuracy": statistics.mean(accuracies),
        "spread": spread(accuracies),
        "seconds": summaries[0]["seconds"],
        "by_stage": _by_stage(summaries[0].get("pipeline", {})),
    }


def _statements(rows: Sequence[Row], rate: float) -> list[Row]:
    """Sentences of the paper for which there are rows at `rate`, each with the number of seeds that confirm it."""
    found = {(row["method"], row["stages"]): row["losses"] for row in rows if row["rate"] == rate and "losses" in row}
    counts = sorted({stages for method, stages in found if method != SGD})
    few, many = (counts[0], counts[-1]) if counts else (0, 0)
    pairs = [
        *(
            (f"{method}: the loss is larger with {many} stages than with {few}", (method, few), (method, many))
            for method in ("petrowski", "ddg", "features-replay", "spectrain", "dni")
            if few < many
        ),
        ("petrowski: copies of weights (pipedream) reduce the loss", ("pipedream", many), ("petrowski", many)),
        ("petrowski: smaller mini-batches (chen) reduce the loss", ("chen", many), ("petrowski", many)),
        ("petrowski: predicted weights (spectrain) reduce the loss", ("spectrain", many), ("petrowski", many)),
        ("ddg: a second forward (features-replay) reduces the loss", ("features-replay", many), ("ddg", many)),
    ]
    return [
        judged(
            f"rate {rate:g}, {many} stages: {text}",
            [ours < theirs for ours, theirs in zip(found[small], found[large], strict=True)],
        )
        for text, small, large in pairs
        if small in found and large in found
    ]


def _distances(
    job: Job,
    methods: Sequence[str],
    counts: Sequence[int],
    *,
    rates: Sequence[float],
    rounds: int,
    seeds: Iterable[int],
) -> list[Row]:
    """For each flush method: the relative distance of its loss from that of SGD in double precision, over the seeds."""
    import torch

    from dure.run.strategy import make

    flushes = [name for name in methods if name != SGD and getattr(make(name, "partition"), "flushes", False)]
    if not flushes:
        return []
    double, steps, rate = job.to(torch.float64), min(DOUBLE_ROUNDS, rounds), rates[0]

    def loss(text: str, stages: int, seed: int) -> float:
        try:
            return float(_run(double, text, stages, _optimizer(SGD, rate), steps, seed).summary()["loss"])
        except DivergedError:
            return math.inf

    alone = {seed: loss(SGD, 1, seed) for seed in seeds}
    found = []
    for name, count in product(flushes, counts):
        with suppress(StrategyError):  # too few blocks for so many stages: the row of the damage says so
            losses = {seed: loss(f"{name}:stages={count}", count, seed) for seed in alone}
            distance = max(abs(losses[seed] / alone[seed] - 1) for seed in alone)
            found.append({"method": name, "stages": count, "distance": distance})
    return found


def _by_stage(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, list[int]]:
    """Figures of a run by the rank of its workers: the largest staleness, the most versions, and bytes by kind."""
    stages = [figures[f"worker {rank}"] for rank in range(len(figures))]
    found = {name: [int(stage[name]) for stage in stages] for name in ("versions", *BYTES)}
    return {"staleness": [max(map(int, stage["staleness"])) for stage in stages], **found}


def _optimizer(method: str, rate: float) -> str:
    if method in WITH_MOMENTUM:
        return f"momentum:lr={rate * (1 - MOMENTUM):g},momentum={MOMENTUM:g}"
    return f"sgd:lr={rate:g}"


def _run(job: Job, partition: str, stages: int, optimizer: str, rounds: int, seed: int) -> Run:
    from dure.partition.pipeline import Pipeline
    from dure.run.strategy import make
    from dure.run.train import train

    pipeline = make(partition, "partition")
    size = pipeline.batch_size(job.batch_size) if isinstance(pipeline, Pipeline) else job.batch_size
    steps = rounds * job.batch_size // size  # as many samples, also where mini-batches shrink
    given = {"steps": steps, "eval_every": steps, "seed": seed, "exact": True}
    strategy = f"bsp collective {partition}"
    return train(job, strategy=strategy, on="virtual", workers=stages, optimizer=optimizer, **given)


def _compare(rows: Sequence[Row]) -> None:
    """Add to each row its loss divided by that of SGD at the same rate."""
    of_sgd = {row["rate"]: row["loss"] for row in rows if row["method"] == SGD}
    for row in rows:
        base = of_sgd[row["rate"]]
        row["damage"] = None if row["loss"] is None or not base else row["loss"] / base


def _efficiency(stages: int, batch: int) -> Row:
    """The speed of GPipe over that of one worker, divided by the stages; micro-batches have `MICRO_BATCH` samples."""
    micro = max(1, batch // MICRO_BATCH)
    alone, split = _seconds("none", 1, batch), _seconds(f"gpipe:stages={stages},micro={micro}", stages, batch)
    closed_form = micro / (micro + stages - 1)
    return {
        "stages": stages,
        "batch": batch,
        "micro": micro,
        "efficiency": alone / (stages * split),
        "closed_form": closed_form,
    }


def _seconds(partition: str, workers: int, batch: int) -> float:
    """Virtual seconds of a run of four mini-batches, where calls of the model take no time, as in the closed form."""
    from dure.run.train import train
    from dure_studies.sharding_virtual import equal_layers

    strategy, cluster = f"bsp collective {partition}", Cluster.uniform(workers, compute=Constant(call=0.0))
    run = train(equal_layers(DEPTH + 1, WIDTH, batch), strategy=strategy, on=cluster, steps=4, timing_only=True)
    return float(run.summary()["seconds"])


def _draw(path: Path, rows: Sequence[Row], counts: Sequence[int]) -> None:
    """Draw the test loss against the number of stages: a panel for each rate, a line for each method."""
    panels: dict[tuple[str, str], list[Band]] = {}
    learnt = [row for row in rows if row["loss"] is not None]
    for rate, method in dict.fromkeys((row["rate"], row["method"]) for row in learnt):
        own = [row for row in learnt if (row["rate"], row["method"]) == (rate, method)]
        drawn = line(method, [row["stages"] for row in own], [row["loss"] for row in own])
        if method == SGD:
            drawn = line("SGD, one worker", counts, [own[0]["loss"]] * len(counts))
        panels.setdefault(("loss", f"learning rate {rate:g}"), []).append(drawn)
    draw(path, panels, x="stages", y="of the test data")
