"""A few steps of a synchronization method in virtual time, as a picture: four workers, the last at half the speed.

The picture is drawn from the spans of the run, so it shows what the method's code does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from dure.core.deployment import SERVER, WORKER, NodeId
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
    from dure.sync.worker_state import WorkerState

WORKERS, SLOW = 4, 0.5
STEP = 0.010
STEPS, SHOWN = 16, 9
"""Steps of each worker in the run, and of a fast one in the picture."""

LARGE = 128
"""Samples of a mini-batch of a method with a coordinator, so that a few steps are an evaluation of all data."""

KINDS = {
    "compute": COMPUTE,
    "send": COMMUNICATE,
    "recv": COMMUNICATE,
    "communicate": COMMUNICATE,
    "wait": WAIT,
    "apply": APPLY,
}


def picture_of(strategy: Strategy, title: str) -> TimePicture:
    """Run `strategy` and make its picture. Raises `UsageError` for one that does not run in virtual time."""
    steps: dict[str, list[tuple[float, str]]] = {}

    def stepped(worker: WorkerState, now: float, sent: Callable[[], int]) -> None:
        steps.setdefault(f"{WORKER} {worker.number}", []).append((now, _version(worker)))

    setup, cluster = resolve(_config(strategy), Prebuilt(cluster=_cluster(), strategy=strategy))
    assert cluster is not None
    outcome = VirtualRun(setup, cluster, Callbacks(stepped=stepped)).run()
    seconds = min(SHOWN * STEP * 1.6, max((span.end for span in outcome.spans), default=0.0))
    if not seconds:
        raise UsageError(f"{title} has no steps to draw.")
    rows = {name: list(_cells(spans, steps.get(name, []), seconds)) for name, spans in _by_node(outcome.spans).items()}
    about = f"{WORKERS} workers, the last at {SLOW:g} of the others' speed; steps of {STEP * 1e3:g} ms, virtual time"
    servers = setup.deployment.names(SERVER)
    if setup.coordinated:
        about += f"; {servers[0]} has the coordinator, whose rounds of commands to all servers are drawn"
    return TimePicture(title, about, seconds, rows, _listed(servers))


def _config(strategy: Strategy) -> TrainConfig:
    config = TrainConfig(job="digits-mlp", strategy=str(strategy), on="virtual", workers=WORKERS, steps=STEPS)
    more = {"batch_size": LARGE} if strategy.sync.traits.coordinated else {}
    made = TrainConfig.of({**config.plain(), "eval_every": STEPS, **more})
    object.__setattr__(made, "trace", True)  # the spans are wanted, and no file of them
    return made


def _cluster() -> Cluster:
    compute = Constant(flops_per_second=1e18, overhead=STEP)
    kinds = (Machines(count=WORKERS - 1, compute=compute), Machines(count=1, compute=compute, speed=SLOW))
    return Cluster(machines=kinds, link=Link(bandwidth=2e7, latency=2e-4))


def _listed(servers: Sequence[str]) -> str:
    """The servers as words."""
    numbers = [str(NodeId.of(name).rank) for name in servers]
    if len(numbers) > 2:
        return f"servers {numbers[0]} to {numbers[-1]}"
    return f"server{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)}" if numbers else ""


def _version(worker: WorkerState) -> str:
    """The version of the servers' weights at which a gradient was computed; empty without servers."""
    versions = worker.versions
    if versions is None:
        return ""
    least, most = min(versions), max(versions)
    return str(least) if least == most else f"{least}-{most}"


def _by_node(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of workers, then of servers, each in the order of their starts."""
    found: dict[NodeId, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        if span.rank_name.startswith((f"{WORKER} ", f"{SERVER} ")):
            found.setdefault(NodeId.of(span.rank_name), []).append(span)
    order = sorted(found, key=lambda node: (node.kind != WORKER, node.rank))
    return {str(node): found[node] for node in order}


def _cells(spans: Sequence[Span], steps: Sequence[tuple[float, str]], seconds: float) -> Iterator[Cell]:
    """The cells of a node. A step has the last computation that had ended when its gradient was complete.

    Other computations, as those of a gradient that is no step, have no number.
    """
    computed = [number for number, span in enumerate(spans) if span.kind == COMPUTE and span.detail != "aborted"]
    of_step: dict[int, tuple[int | None, str]] = {}
    for step, (now, version) in enumerate(steps, start=1):
        ended = [number for number in computed if spans[number].end <= now * (1 + 1e-9)]
        if ended:
            of_step[ended[-1]] = step, version
    for number, span in enumerate(spans):
        if span.start < seconds:
            own, version = of_step.get(number, (None, ""))
            aborted = span.detail == "aborted"
            message = span.detail if KINDS[span.kind] == COMMUNICATE else ""
            yield Cell(KINDS[span.kind], span.start, span.end, own, version, aborted, message)
