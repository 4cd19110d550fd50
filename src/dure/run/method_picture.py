"""A few steps of a synchronization method in virtual time, as a picture: four workers, the last at half the speed.

The picture is drawn from the spans of the run, so it shows what the method's code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, WORKER
from dure.errors import UsageError
from dure.report.time_drawing import APPLY, COMMUNICATE, COMPUTE, WAIT, Cell, TimePicture
from dure.run.callbacks import Callbacks
from dure.run.config import TrainConfig
from dure.run.prebuilt import Prebuilt
from dure.run.resolve import resolve
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

if TYPE_CHECKING:
    from dure.core.meter import Span
    from dure.run.strategy import Strategy
    from dure.sync.worker import Worker

WORKERS, SLOW = 4, 0.5
STEP = 0.010
STEPS, SHOWN = 16, 9
"""Steps of each worker in the run, and of a fast one in the picture."""

KINDS = {"compute": COMPUTE, "send": COMMUNICATE, "recv": COMMUNICATE, "communicate": COMMUNICATE, "wait": WAIT}


def picture_of(strategy: Strategy, title: str) -> TimePicture:
    """Run `strategy` and make its picture. Raises `UsageError` for one that does not run in virtual time."""
    versions: dict[str, list[str]] = {}

    def stepped(worker: Worker, now: float, sent: Callable[[], int]) -> None:
        versions.setdefault(str(worker.node.name), []).append(_version(worker))

    setup, cluster = resolve(_config(strategy), Prebuilt(cluster=_cluster(), strategy=strategy))
    assert cluster is not None
    outcome = VirtualRun(setup, cluster, Callbacks(stepped=stepped)).run()
    seconds = min(SHOWN * STEP * 1.6, max((span.end for span in outcome.spans), default=0.0))
    if not seconds:
        raise UsageError(f"{title} has no steps to draw.")
    rows = {
        name: list(_cells(spans, versions.get(name, []), seconds)) for name, spans in _by_node(outcome.spans).items()
    }
    about = f"{WORKERS} workers, the last at {SLOW:g} of the others' speed; steps of {STEP * 1e3:g} ms, virtual time"
    return TimePicture(title, about, seconds, rows)


def _config(strategy: Strategy) -> TrainConfig:
    config = TrainConfig(job="digits-mlp", strategy=str(strategy), on="virtual", workers=WORKERS, steps=STEPS)
    made = TrainConfig.of({**config.plain(), "eval_every": STEPS})
    object.__setattr__(made, "trace", True)  # the spans are wanted, and no file of them
    return made


def _cluster() -> Cluster:
    compute = Constant(flops_per_second=1e18, overhead=STEP)
    kinds = (Machines(count=WORKERS - 1, compute=compute), Machines(count=1, compute=compute, speed=SLOW))
    return Cluster(machines=kinds, link=Link(bandwidth=2e7, latency=2e-4))


def _version(worker: Worker) -> str:
    """The version of the servers' weights at which a gradient was computed; empty without servers."""
    versions = worker.versions
    if versions is None:
        return ""
    least, most = min(versions), max(versions)
    return str(least) if least == most else f"{least}-{most}"


def _by_node(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of workers, then of servers, in the order of their starts."""
    found: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (not span.rank_name.startswith(WORKER), span.rank_name, span.start)):
        if span.rank_name.startswith((WORKER, SERVER)):
            found.setdefault(span.rank_name, []).append(span)
    return found


def _cells(spans: Iterable[Span], versions: list[str], seconds: float) -> Iterator[Cell]:
    step = 0
    for span in spans:
        if span.start >= seconds:
            continue
        if span.kind == APPLY:
            yield Cell(APPLY, span.start, span.end)
        elif span.kind != COMPUTE:
            yield Cell(KINDS[span.kind], span.start, span.end)
        elif span.detail == "aborted":
            yield Cell(COMPUTE, span.start, span.end, aborted=True)
        else:
            yield Cell(COMPUTE, span.start, span.end, step + 1, versions[step] if step < len(versions) else "")
            step += 1
