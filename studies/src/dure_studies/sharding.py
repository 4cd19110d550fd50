"""Compares parameter sharding by layer and by memory on VGG-16, for 1 to 8 workers with a server for each two.

The paper (in Korean; TensorFlow 1.15 with MPICH, two RTX 2080 Ti in each host, 10 Gbit/s Ethernet, ImageNet-1K) reports
equal times with 1 and 2 workers, which have one server; sharding by memory is faster by 20 % with 4 workers and by 66 %
with 8. It does not give the compute time of a step, the order of updates and the machines of the servers. Here servers
have machines of their own. For each order of updates and each kind of hosts, one compute time for all cluster sizes is
fitted to the two figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dure.core.regular_file import check_output
from dure.errors import UsageError
from dure_studies.flags import DATA, OUT, ROUNDS, SEEDS, check_counts, listed
from dure_studies.output import Columns, Row, draw, line, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dure.job.job import Job
    from dure.report.figures import Band

PAPER = {1: 1.0, 2: 1.0, 4: 1.20, 8: 1.66}
"""Published ratios: seconds of a step by layer, divided by those by memory, by number of workers."""

SYNCS = ("bsp", "downpour")
HOSTS = ("separate", "paired")

TIMES = tuple(0.25 * 2 ** (number / 2) for number in range(11))
"""Seconds of a step's computation, 0.25 to 8, among which the fit begins."""

StepSeconds = Callable[[int, int, str], float]
"""Gives seconds of a step for a number of workers, a number of servers, and the unit of sharding."""


ON = arg(help="virtual, or namespaces: for real, on hosts with slow links that root can make of this machine.")
SYNC = arg(help="bsp for synchronous servers, downpour for asynchronous ones, or both with a comma.")

quick = {"sync": "bsp"}


def reproduce(
    on: Annotated[str, ON] = "virtual",
    *,
    sync: Annotated[str | None, SYNC] = None,
    hosts: Annotated[str | None, arg(help="separate, paired for two workers behind one card, or both.")] = None,
    accuracy: Annotated[bool, arg(help="Train a small network with both cuts; compare accuracies.")] = False,
    rounds: Annotated[int | None, ROUNDS] = None,
    seeds: Annotated[int | None, SEEDS] = None,
    data: Annotated[Path | None, DATA] = None,
    out: Annotated[Path | None, OUT] = None,
) -> dict[str, Any]:
    """The rows, in virtual time: `layer` and `memory` are seconds per step, `ratio` is the first divided by the second.

    `sync` has "bsp", "downpour" or both with a comma, `hosts` "separate", "paired" or both. `fits` has the fitted
    compute time of a step for each, and the relative error of each ratio to the paper's. `speedups` are samples per
    second relative to one worker. `servers` has 8 workers with 1 to 8 servers (`sharding_virtual`).

    With `accuracy`, the rows are those of `sharding_accuracy` instead. On "namespaces" the seconds are real, of a small
    model of the same shape, and nothing is fitted (`sharding_real`).

    Raises `UsageError` for other values, for flags that do not fit, or if the machine cannot make namespaces.
    """
    if on not in ("virtual", "namespaces"):
        raise UsageError(f'sharding is reproduced on "virtual" or "namespaces", got {on!r}.')
    real = on == "namespaces"
    unfit: dict[str, Any] = {
        "hosts": hosts if real or accuracy else None,
        "accuracy": accuracy and real,
        "out": accuracy and out,
    }
    unfit |= {} if accuracy else {"rounds": rounds, "seeds": seeds, "data": data}
    _refuse(unfit, "--accuracy" if accuracy and not real else f"--on {on}")
    syncs = listed("sync", sync or ("bsp" if real else ",".join(SYNCS)), SYNCS)
    if accuracy:
        given = {name: value for name, value in (("rounds", rounds), ("seeds", seeds)) if value is not None}
        return _accuracies(syncs, data, **given)
    path = out or Path("sharding.svg")
    check_output(path)
    result = _real(syncs) if real else _virtual(syncs, listed("hosts", hosts or ",".join(HOSTS), HOSTS))
    _draw(path, result["rows"], result["time"])
    return result | {"picture": str(path)}


def _refuse(unfit: dict[str, Any], beside: str) -> None:
    for name, value in unfit.items():
        if value is not None and value is not False:
            raise UsageError(f"sharding has no use for --{name} with {beside}: leave it out.")


def _real(syncs: Sequence[str]) -> dict[str, Any]:
    from dure_studies.sharding_real import COMPUTE, measured

    rows = [row for sync in syncs for row in _rows(measured(sync), sync, "separate")]
    return {"reproduce": "sharding", "time": "real", "compute_seconds": COMPUTE, "rows": rows}


def _virtual(syncs: Sequence[str], hosts: Sequence[str]) -> dict[str, Any]:
    from dure.job.shapes.images import vgg16
    from dure_studies.sharding_virtual import Course, equal_layers, rows_by_servers

    job = vgg16()
    rows: list[Row] = []
    fits: list[Row] = []
    for place, sync in ((place, sync) for place in hosts for sync in syncs):
        compute = _fit(job, sync, place)
        found = _rows(Course(job, sync, place, compute).seconds, sync, place)
        residual = {str(row["workers"]): row["ratio"] / row["paper"] - 1 for row in found}
        fits.append({"sync": sync, "hosts": place, "compute_seconds": compute, "residual": residual})
        rows += found
    jobs, first = {"VGG-16": job, "equal layers": equal_layers()}, fits[0]["compute_seconds"]
    servers = [row for sync in syncs for row in rows_by_servers(jobs, sync, hosts[0], first)]
    return {"reproduce": "sharding", "time": "virtual", "fits": fits, "rows": rows, "servers": servers}


def _accuracies(syncs: Sequence[str], data: Path | None, *, rounds: int = 100, seeds: int = 3) -> dict[str, Any]:
    from dure_studies.sharding_accuracy import accuracy_rows

    check_counts(rounds=rounds, seeds=seeds)
    source, rows = accuracy_rows(syncs, rounds, seeds, data)
    given = {"rounds": rounds, "seeds": seeds, "data": source}
    return {"reproduce": "sharding", "time": "virtual", "accuracy": rows, **given}


def _rows(step_seconds: StepSeconds, sync: str, hosts: str) -> list[Row]:
    rows = [{"sync": sync, "hosts": hosts, **_row(workers, step_seconds)} for workers in PAPER]
    for row in rows:
        row["speedups"] = {by: row["workers"] * rows[0][by] / row[by] for by in ("layer", "memory")}
    return rows


def _row(workers: int, step_seconds: StepSeconds) -> Row:
    servers = max(1, workers // 2)
    layer, memory = (step_seconds(workers, servers, by) for by in ("layer", "memory"))
    ratio = layer / memory
    return {
        "workers": workers,
        "servers": servers,
        "layer": layer,
        "memory": memory,
        "ratio": ratio,
        "paper": PAPER[workers],
    }


def _fit(job: Job, sync: str, hosts: str) -> float:
    """The compute time whose ratios fit the paper best: least squares of their logarithms.

    Asynchronous ratios have local optima, so the best of `TIMES` is found first.
    """
    from scipy.optimize import minimize_scalar

    from dure_studies.sharding_virtual import Course

    def distance(compute: float) -> float:
        seconds = Course(job, sync, hosts, compute).seconds
        return sum(math.log(_row(workers, seconds)["ratio"] / PAPER[workers]) ** 2 for workers in (4, 8))

    near = min(TIMES, key=distance)
    bounds = near / TIMES[1] * TIMES[0], near * TIMES[1] / TIMES[0]
    return float(minimize_scalar(distance, bounds=bounds, method="bounded", options={"xatol": 0.03 * near}).x)


def table(result: dict[str, Any]) -> Group | Table:
    """The rows as tables: those of the figure and those by servers, or those of accuracy."""
    from rich.console import Group

    if "accuracy" in result:
        return _accuracy_table(result)
    shown = [_figure_table(result)]
    return Group(*shown, *([_servers_table(result)] if result["time"] == "virtual" else []))


def _figure_table(result: Row) -> Table:
    columns: Columns = [
        ("hosts", "{hosts}"),
        ("updates", "{sync}"),
        ("workers", "{workers}"),
        ("servers", "{servers}"),
        ("by layer", "{layer:.2f} s"),
        ("by memory", "{memory:.2f} s"),
        ("ratio", "{ratio:.2f}"),
        ("paper", "{paper:.2f}"),
        ("speed-ups: layer", "{speedups[layer]:.2f}"),
        ("memory", "{speedups[memory]:.2f}"),
    ]
    return table_of(result["rows"], columns, _caption(result), texts=("hosts", "updates"))


def _caption(result: dict[str, Any]) -> str:
    drawn = f"Speed-ups: {result['picture']}"
    if result["time"] == "real":
        return (
            "seconds per step are real: hosts in network namespaces of this machine, a small model of the same shape. "
            f"A step computes for {result['compute_seconds']:g} s. {drawn}"
        )
    fits = "; ".join(
        f"{fit['hosts']} {fit['sync']} {fit['compute_seconds']:.2f} s "
        f"(ratios {fit['residual']['4']:+.1%} and {fit['residual']['8']:+.1%} off)"
        for fit in result["fits"]
    )
    return (
        "seconds per step are virtual: a model of machines and network. paired: two workers behind one card. "
        f"Fitted to the paper's ratios with 4 and 8 workers, a step computes for: {fits}. {drawn}"
    )


def _servers_table(result: Row) -> Table:
    first = result["servers"][0]
    columns: Columns = [
        ("model", "{model}"),
        ("updates", "{sync}"),
        ("servers", "{servers}"),
        ("by layer", "{layer[seconds]:.2f} s"),
        ("free", "{layer[seconds_without_updates]:.2f} s"),
        ("by memory", "{memory[seconds]:.2f} s"),
        ("free", "{memory[seconds_without_updates]:.2f} s"),
        ("GB by layer", lambda row: _loads(row["layer"])),
        ("GB by memory", lambda row: _loads(row["memory"])),
    ]
    caption = (
        f"seconds per step are virtual, of {first['workers']} workers; hosts: {first['hosts']}; a step computes for "
        f"{first['compute_seconds']:.2f} s. free: if the work of servers takes no time. GB of each server's card in a "
        "step, both directions."
    )
    return table_of(result["servers"], columns, caption, texts=("model", "updates"))


def _loads(cut: Row) -> str:
    """The bytes of each server's card, the largest first; equal ones once, with their number."""
    texts = (f"{nbytes / 1e9:.2f}" for nbytes in sorted(cut["card_bytes"], reverse=True))
    runs = ((text, len(list(equal))) for text, equal in groupby(texts))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _accuracy_table(result: Row) -> Table:
    digests = {(row["sync"], row["split"]): row["digests"] for row in result["accuracy"]}

    def equal(row: Row) -> str:
        pairs = zip(digests[row["sync"], "layer"], digests[row["sync"], "memory"], strict=True)
        return f"{sum(layer == memory for layer, memory in pairs)} of {result['seeds']}"

    columns: Columns = [
        ("updates", "{sync}"),
        ("split", "{split}"),
        ("accuracy", "{accuracy:.2%}"),
        ("spread", "{spread:.2%}"),
        ("staleness", "{staleness:.1f}"),
        ("s/step", "{seconds:.2f}"),
        ("equal parameters", equal),
    ]
    caption = (
        f"test accuracy after {result['rounds']} steps of 8 workers with 4 servers, mean and standard deviation over "
        f"seeds ({result['seeds']}). Workers and seconds are virtual, gradients are real. Equal parameters: of how "
        "many seeds both cuts end with the same bits."
    )
    return table_of(result["accuracy"], columns, caption, texts=("updates", "split"))


def _draw(path: Path, rows: Sequence[Row], time: str) -> None:
    """Draw speed-ups against workers: a panel for each kind of hosts and order of updates, a line for each cut.

    A third line is the speed-up by layer times the paper's ratio: the speed-up by memory if the ratio were the paper's.
    `time` is "virtual" or "real".
    """
    panels: dict[tuple[str, str], list[Band]] = {}
    for sync, hosts in dict.fromkeys((row["sync"], row["hosts"]) for row in rows):
        own = [row for row in rows if (row["sync"], row["hosts"]) == (sync, hosts)]
        lines = {f"by {by}": [row["speedups"][by] for row in own] for by in ("layer", "memory")}
        lines["by layer, times the paper's ratio"] = [row["speedups"]["layer"] * row["paper"] for row in own]
        workers = [row["workers"] for row in own]
        panels[sync, f"hosts: {hosts}"] = [line(name, workers, values) for name, values in lines.items()]
    draw(path, panels, x="workers, with a server for each two", y=f"{time} speed-up")
