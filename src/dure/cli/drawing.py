"""Draws a method or a pipeline over time, for `dure methods NAME --draw`: as text, and in color as an SVG file.

A method is drawn from the spans of a short run in virtual time, so the picture shows what its code does. A pipeline is
drawn from its order of actions, one tick for each, in the notation of the papers: stages and micro-batches count from
1, and micro-batches count on over the mini-batches. F3 is the forward of micro-batch 3, and F3' that of the worker's
second chunk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, WORKER, NodeId
from dure.core.regular_file import check_output
from dure.errors import UsageError
from dure.partition.mesh import Mesh
from dure.partition.pipeline import Pipeline
from dure.partition.programmed import Programmed
from dure.partition.schedule import Orders, Read, Timed, WeightsRead, schedule, weights_read
from dure.report.files import replacing
from dure.report.gantt import Bar, BarKind, BarRow, Gantt, svg, text
from dure.report.trace import ACTIONS
from dure.run.config import TrainConfig
from dure.run.prebuilt import Callbacks, Prebuilt
from dure.run.resolve import resolve
from dure.run.strategy import Strategy, by_axis, make
from dure.run.virtual import VirtualRun
from dure.runtime.virtual.cluster import Cluster, Link, Machines
from dure.runtime.virtual.compute import Constant

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from dure.core.meter import Span
    from dure.partition.orders import Action
    from dure.partition.schedule import Timetable
    from dure.sync.worker_state import WorkerState


@dataclass(frozen=True)
class Drawing:
    """A picture that is written to `path`."""

    picture: MethodPicture | PipelinePicture
    path: Path

    @property
    def row(self) -> dict[str, Any]:
        """The figures of the picture, for JSON."""
        head, *rest = self.picture.figures.items()
        return dict([head, ("picture", str(self.path)), *rest])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        yield Text(text(self.picture.chart, options.max_width), no_wrap=True)


def draw(name: str, files: Sequence[Path]) -> Drawing:
    """Draw the method or the partition `name` into the file of `files`, NAME.svg if there is none.

    Raises `UsageError` for what has no picture, for several files, and for a file that cannot be written.
    """
    if not name:
        raise UsageError("--draw needs a method or a partition before it, as in dure methods ssp --draw FILE.svg.")
    axes = by_axis(name)
    picture: MethodPicture | PipelinePicture
    if "sync" in axes:
        partition = axes.get("partition")
        if partition is not None:
            raise UsageError(
                f"a method is drawn without a partition, and {partition} is one: leave it out, or draw it alone, as in "
                f"dure methods {partition} --draw."
            )
        path = _file_of(name, files)
        picture = MethodPicture.of(Strategy.parse(name), name)
    else:
        pipeline = _pipeline(name)
        path = _file_of(name, files)
        picture = PipelinePicture.of(pipeline, name)
    with replacing(path) as file:
        file.write(svg(picture.chart))
    return Drawing(picture, path)


def shown(drawing: Drawing) -> list[RenderableType]:
    """The rows of the picture as text, and how to read them."""
    from rich.text import Text

    chart = drawing.picture.chart
    head = Text(f"{chart.title}: {chart.about}", style="bold")
    return [head, drawing, *drawing.picture.explained(), Text(f"In color: {drawing.path}")]


def _pipeline(name: str) -> Pipeline:
    """The pipeline of a partition; of a mesh, that of its stages."""
    made = make(name, "partition")
    pipeline = made.pipeline if isinstance(made, Mesh) else made
    if not isinstance(pipeline, Pipeline):
        raise UsageError(f"{name} makes no stages, and a drawing shows stages: draw pipedream, for example.")
    return pipeline


def _file_of(name: str, files: Sequence[Path]) -> Path:
    """The file of `files`, or NAME.svg."""
    if len(files) > 1:
        raise UsageError(f"--draw writes one file, and {len(files)} are named: {', '.join(map(str, files))}.")
    path = files[0] if files else Path(f"{re.split('[: ]', name)[0]}.svg")
    check_output(path)
    return path


# ---- pipelines


@dataclass(frozen=True)
class PipelinePicture:
    """A pipeline over the mini-batches `batches`, one tick for each action; `title` names it."""

    pipeline: Pipeline
    title: str
    batches: range

    @classmethod
    def of(cls, pipeline: Pipeline, title: str) -> PipelinePicture:
        """A picture of enough mini-batches: two with a flush, else as many as show the steady state.

        Raises `UsageError` for a method that is a program, not an order of actions.
        """
        if isinstance(pipeline, Programmed):
            raise UsageError(
                f"{title} has no order of actions to draw: it is a program on the stages. "
                "Record a run of it by dure train --trace --out DIR, and open DIR/trace.json in Perfetto."
            )
        return cls(pipeline, title, range(2 if pipeline.flushes else 2 * pipeline.stages + 4))

    @cached_property
    def timetable(self) -> Timetable:
        """The actions of all workers over time."""
        return schedule(Orders.of(self.pipeline, self.batches))

    @cached_property
    def weights(self) -> Sequence[WeightsRead]:
        """The weights that each worker reads."""
        return [weights_read(self.pipeline, rank, row) for rank, row in enumerate(self.timetable.workers)]

    def staleness(self, rank: int) -> int:
        """The largest staleness of a worker."""
        return max(self.weights[rank].staleness.values())

    def label(self, action: Action) -> str:
        """An action in the notation of the papers."""
        return f"{action.kind}{self._number(action)}{chr(39) * action.chunk}"

    @property
    def figures(self) -> dict[str, Any]:
        """The bubble, and of each worker its stages, its share of idle time, and what it keeps."""
        table = self.timetable
        workers = [
            {
                "stages": [1 + self.pipeline.stage_of(rank, chunk) for chunk in range(self.pipeline.chunks)],
                "idle": table.idle(rank) / table.makespan,
                "most_sets": table.most_sets(rank),
                "most_versions": self.weights[rank].most_versions,
                "staleness": self.staleness(rank),
            }
            for rank in range(len(table.workers))
        ]
        return {"partition": self.title, "ticks": table.makespan, "bubble": table.bubble, "workers": workers}

    @cached_property
    def chart(self) -> Gantt:
        """Each action with the weights that it reads, the updates, and the figures of each worker."""
        return Gantt(
            self.title,
            self._bubble,
            {f"k={rank + 1}": self._row(rank, worker) for rank, worker in enumerate(self.figures["workers"])},
            self.timetable.makespan,
            ACTIONS,
            unit="tick",
            columns=("idle", "in flight", "versions", "staleness"),
            idle="idle (bubble)",
            mark="update of the weights",
            notes=self._notes,
        )

    def explained(self) -> list[RenderableType]:
        """How to read the text, and the figures of each worker as a table."""
        from rich.table import Table
        from rich.text import Text

        on = f", and {self._counted}es count on over the mini-batches" if self.pipeline.micro_batches > 1 else ""
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("worker", "stages", "idle", "in flight", "versions", "staleness"):
            shown.add_column(heading, justify="right")
        for rank, worker in enumerate(self.figures["workers"]):
            shown.add_row(str(rank), ", ".join(map(str, worker["stages"])), *_texts(worker))
        return [Text(f"Stages and {self._counted}es count from 1{on}; a dot is idle."), shown]

    def _row(self, rank: int, worker: Mapping[str, Any]) -> BarRow:
        row, stages = self.timetable.workers[rank], list(map(str, worker["stages"]))
        held = f"stages {', '.join(stages if len(stages) <= 4 else [*stages[:2], '...', stages[-1]])}"
        return BarRow(
            [
                self._bar(each, read)
                for each, read in zip(row, self.weights[rank].reads, strict=True)
                if read is not None
            ],
            note=f"worker {rank}" if len(stages) == 1 else held,
            marks=[each.end for each in row if each.action.kind == "U"],
            figures=_texts(worker),
        )

    def _bar(self, each: Timed, read: Read) -> Bar:
        action, label = each.action, self.label(each.action)
        chunk = f", chunk {action.chunk + 1}" if self.pipeline.chunks > 1 else ""
        about = f"{ACTIONS[action.kind].meaning} of {self._counted} {self._number(action)}{chunk}, reads {read}"
        return Bar(action.kind, each.start, each.end, (label, str(read)), about, label, shade=action.chunk)

    def _number(self, action: Action) -> int:
        """The number of a micro-batch over all mini-batches, from 1."""
        return (action.batch - self.batches.start) * self.pipeline.micro_batches + action.micro + 1

    @property
    def _counted(self) -> str:
        """The samples of an action: a micro-batch, or the whole mini-batch where it is not divided."""
        return "mini-batch" if self.pipeline.micro_batches == 1 else "micro-batch"

    @property
    def _bubble(self) -> str:
        """The size of the pipeline, the time and the bubble."""
        table, pipeline = self.timetable, self.pipeline
        symbols = {"K": pipeline.stages, "v": pipeline.chunks, "U": pipeline.micro_batches}
        shown = [f"{symbol} = {count}" for symbol, count in symbols.items() if symbol == "K" or count > 1]
        shown.append(f"{len(self.batches)} mini-batches")
        steady = "" if pipeline.flushes else f", {table.steady_bubble:.1%} in the steady state"
        return f"{', '.join(shown)}: {table.makespan:g} ticks, {table.bubble:.1%} of the time idle{steady}"

    @property
    def _notes(self) -> Sequence[str]:
        """How to read the texts and the figures of the picture."""
        micro, versions = self.pipeline.micro_batches, self.pipeline.versions
        over = f", counted on over mini-batches of {micro}" if micro > 1 else ""
        primes = "; F3' (darker): through the worker's next chunk" if self.pipeline.chunks > 1 else ""
        predicted = any(read and read.ahead for worker in self.weights for read in worker.reads)
        ahead = "; w3+2: a prediction of them 2 updates ahead" if predicted else ""
        weights = (
            f"v3 w1: version 3 of the {versions} of the model, after 1 update of it"
            if versions > 1
            else f"w3: the weights after 3 updates of the worker{ahead}"
        )
        again = " A backward computes its forward again." if self.pipeline.remat else ""
        return (
            f"F3: forward of {self._counted} 3{over}{primes}. {weights}.{again}",
            f"idle: share of the time. in flight: the most {self._counted}es between forward and backward. "
            "versions: the most weights kept. staleness: the most updates between the weights of a forward and its "
            "update.",
        )


def _texts(worker: Mapping[str, Any]) -> tuple[str, ...]:
    """The figures of a worker of a pipeline."""
    return f"{worker['idle']:.0%}", *(str(worker[name]) for name in ("most_sets", "most_versions", "staleness"))


# ---- methods

WORKERS, SLOW = 4, 0.5
STEP = 0.010
STEPS, SHOWN = 16, 9
"""Steps of each worker in the run, and of a fast one in the picture."""

LARGE = 128
"""Samples of a mini-batch of a method with a coordinator, so that a few steps are an evaluation of all data."""

COMPUTE, COMMUNICATE, WAIT, APPLY = "compute", "communicate", "wait", "apply"
ACTIVITIES = {
    COMPUTE: BarKind("#9cc8f2", "computes the gradient of step 3", "3"),
    COMMUNICATE: BarKind("#f6cd83", "sends, receives, or is in a collective", sign="~"),
    WAIT: BarKind("#eceff2", "waits", sign="."),
    APPLY: BarKind("#a6dba0", "the server applies an update", sign="+"),
}
SPANS = {"send": COMMUNICATE, "recv": COMMUNICATE, **{kind: kind for kind in ACTIVITIES}}
"""The activity of a span, by its kind."""

ORDER = "order"
"""A round of commands of a coordinator, which is drawn even if it takes no time that shows."""

PREPOSITIONS = {"push": "to", "pull": "from", "fetch": "from"}
"""Prepositions of messages to servers. Other messages have their receivers in the `about` of a picture."""


@dataclass(frozen=True)
class Cell:
    """An activity of a node from `start` to `end`, in seconds.

    `step` and `version` are those of a computation, `message` that of a communication: "push", for example.
    """

    kind: str
    start: float
    end: float
    step: int | None = None
    version: str = ""
    aborted: bool = False
    message: str = ""

    @property
    def number(self) -> str:
        """The step; x for an aborted computation."""
        return "x" if self.aborted else "" if self.step is None else str(self.step)

    def bar(self, servers: str) -> Bar:
        """The cell in a chart; `servers` are those of its messages."""
        there = f" {PREPOSITIONS[self.message]} {servers}" if servers and self.message in PREPOSITIONS else ""
        parts = [
            f"{self.kind}{' in vain' if self.aborted else ''}",
            "" if self.step is None else f"step {self.step}",
            f"version {self.version} of the weights" if self.version else "",
            f"{self.message}{there}" if self.message else "",
        ]
        return Bar(
            self.kind,
            self.start,
            self.end,
            (self.message,) if self.message else (self.number, f"w{self.version}" if self.version else ""),
            f"{', '.join(filter(None, parts))}: {self.start:.4g} to {self.end:.4g} s",
            f"{self.number}/{self.version}" if self.version else self.number,
            always=self.message == ORDER,
        )


@dataclass(frozen=True)
class MethodPicture:
    """The cells of each node of a short run over `seconds`: four workers, the last at half the speed.

    `servers` are those that workers exchange messages with, in words; empty without servers.
    """

    title: str
    about: str
    seconds: float
    rows: Mapping[str, Sequence[Cell]]
    servers: str = ""

    @classmethod
    def of(cls, strategy: Strategy, title: str) -> MethodPicture:
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
        nodes = _by_node(outcome.spans)
        rows = {name: list(_cells(spans, steps.get(name, []), seconds)) for name, spans in nodes.items()}
        about = (
            f"{WORKERS} workers, the last at {SLOW:g} of the others' speed; steps of {STEP * 1e3:g} ms, virtual time"
        )
        servers = setup.deployment.names(SERVER)
        if setup.coordinated:
            about += f"; {servers[0]} has the coordinator, whose rounds of commands to all servers are drawn"
        return cls(title, about, seconds, rows, _listed(servers))

    @property
    def figures(self) -> dict[str, Any]:
        """The computations of each worker: the step, the version read, start and end."""
        workers = {
            name: [
                {"step": cell.step, "version": cell.version, "start": cell.start, "end": cell.end}
                for cell in cells
                if cell.kind == COMPUTE
            ]
            for name, cells in self.rows.items()
        }
        return {"method": self.title, "time": "virtual", "seconds": self.seconds, "workers": workers}

    @cached_property
    def chart(self) -> Gantt:
        """Each cell as a bar, with its step and version, or its message."""
        kinds = dict(ACTIVITIES)
        if any(cell.version for cells in self.rows.values() for cell in cells):
            computes = f"{ACTIVITIES[COMPUTE].meaning}, after version 5 of the servers' weights"
            kinds[COMPUTE] = ACTIVITIES[COMPUTE]._replace(meaning=computes, sample="3/w5")
        kinds[COMMUNICATE] = ACTIVITIES[COMMUNICATE]._replace(meaning=self._communication)
        rows = {name: BarRow([cell.bar(self.servers) for cell in cells]) for name, cells in self.rows.items()}
        return Gantt(self.title, self.about, rows, self.seconds, kinds)

    def explained(self) -> list[RenderableType]:
        """How to read the text."""
        from rich.text import Text

        read = "=: computes; 3/5 is step 3, after version 5 of the servers' weights; x: a computation in vain. "
        return [Text(f"{read}~: {self._communication}. A dot: waits.")]

    @property
    def _communication(self) -> str:
        return f"exchanges messages with {self.servers}" if self.servers else ACTIVITIES[COMMUNICATE].meaning


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
            message = span.detail if SPANS[span.kind] == COMMUNICATE else ""
            yield Cell(SPANS[span.kind], span.start, span.end, own, version, aborted, message)
