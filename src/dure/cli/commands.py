"""The commands: the options of each, and what each does with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from dure.cli.reproduce import PaperStudy
from dure.cli.rl import RlOptions, values_of
from dure.core.packages import extra_is_there, import_extra
from dure.core.text import printable
from dure.errors import UsageError
from dure.planner.options import PlanOptions
from dure.run.config import (
    Checked,
    CompareConfig,
    ComparedTarget,
    Count,
    Options,
    Positional,
    Repeated,
    Seconds,
    TrainConfig,
    Workers,
)
from dure.run.emit import Emission, check_emission, launch_of_train
from dure.run.places import DEFAULT, has_early_fork_server, is_started_outside
from dure.runtime.launch.interruption import Interruption

if TYPE_CHECKING:
    from dure.report.run import Run
    from dure.runtime.launch.fork_server import ForkServer

AUTO = "auto"
"""The strategy that a plan chooses."""

FAILED = 1
"""Exit status of a command that has not written a file that it should write."""

LACKING = 3
"""Exit status of a run in which some worker has not done all its work."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: `values` for `--json`, `shown` (tables, text) for people, `said` on standard error.

    A function in `shown` writes to the console that it is given. `status` is the exit status.
    """

    values: dict[str, Any]
    shown: Sequence[Any] = ()
    said: str = ""
    status: int = 0


@dataclass(frozen=True, kw_only=True)
class Printed(Checked):
    """Options of every command."""

    json: bool = False
    """Print one JSON object as the last line."""


@dataclass(frozen=True, kw_only=True)
class Layered(Printed):
    """Options of a command whose `layers`, a class of options, may come from a file and from the environment too."""

    layers: ClassVar[type[Options]]

    config: Path | None = None
    """YAML file of options, by the names of the flags with _ for -; for compare a list for strategies and on."""
    print_config: bool = False
    """Print the options that would be used, as YAML, and do nothing."""


@dataclass(frozen=True, kw_only=True)
class Methods(Printed):
    """Every method, topology, codec and partition; or all about one of them."""

    example: ClassVar[str] = "dure methods ssp"

    name: Positional[str] = ""
    """A member; all if left out. gossip may have a graph, as in gossip:graph=ring."""
    workers: Workers | None = None
    """Workers of the graphs of gossip; 8, 16 and 64 if left out."""
    draw: tuple[Path, ...] | None = None
    """Draw a method over time, as in ssp --draw FILE.svg, or the timetable of a partition, as in pipedream:stages=4: as
    text and, in the file, in color."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Return the rows and their tables."""
        from dure.cli.methods import members, tables

        if self.draw is not None:
            from dure.cli.drawing import draw, shown

            drawing = draw(self.name, self.draw)
            return CommandResult({"drawing": drawing.row}, shown(drawing))
        rows = members(self.name, self.workers)
        return CommandResult({"methods": rows}, tables(rows, details=bool(self.name)))


@dataclass(frozen=True, kw_only=True)
class Devices(Printed):
    """GPUs, other devices and links by name: memory, bandwidths and speeds, with the source of each."""

    example: ClassVar[str] = "dure devices v100"

    name: Positional[str] = ""
    """A part of the name, such as v100; all if left out."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Return the entries and their tables."""
        from dure.cli.devices import rows, tables
        from dure.core.devices import found

        devices, links = found(self.name)
        return CommandResult(rows(devices, links), tables(devices, links))


@dataclass(frozen=True, kw_only=True)
class Train(Layered, Emission, TrainConfig):
    """One run of a job under one strategy."""

    example: ClassVar[str] = "dure train digits-mlp --sync ssp:bound=3 --on virtual --workers 8"
    layers: ClassVar[type[Options]] = TrainConfig

    within: Seconds = 30.0
    """Real seconds in which --strategy auto chooses a strategy, by a plan (`dure plan`)."""
    nodes: Count | None = None
    """With --emit: machines, with equal numbers of workers. If left out: those of a cluster file, else 1."""

    def __post_init__(self) -> None:
        """Check the values alone: options of a launch elsewhere are not those of a run here."""
        Checked.__post_init__(self)

    @property
    def started_outside(self) -> bool:
        """Whether another program starts a process for each rank."""
        return is_started_outside(self.on)

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run the job; return its summary as values and as a table. With `emit`, return the text alone."""
        check_emission(self, self.nodes)
        if self.emit is not None and not self.print_config:
            return self._emitted()
        config = self.only(TrainConfig)
        if self.print_config:
            if config.resume is None and AUTO not in (config.strategy, config.sync):
                config.chosen()
            return _configuration(config)
        _require_job(config)
        with _fork_server(config.on or DEFAULT) as fork_server:
            # A wrong strategy is an error before torch is imported. That of a resumed run is in its record.
            if AUTO in (config.strategy, config.sync):
                config = _decided(config, self.within)
            strategy = config.chosen() if config.resume is None else None
            from dure.run.prebuilt import Prebuilt
            from dure.run.train import run

            finished = run(config, Prebuilt(strategy=strategy, fork_server=fork_server, interruption=interruption))
        said, status = _lacking([finished])
        return CommandResult(finished.summary(), [_run_table(finished)], _lines(_unwritten([finished]), said), status)

    def _emitted(self) -> CommandResult:
        """The text that starts this run elsewhere."""
        _require_job(self)
        options = {option.name: getattr(self, option.name) for option in fields(TrainConfig)}
        if AUTO in (self.strategy, self.sync):
            decided = _decided(TrainConfig(**{**options, "key_file": None}), self.within)
            options |= {name: getattr(decided, name) for name in ("strategy", "sync", "batch_size", "workers")}
        from dure.run.emit_targets import emitted

        assert self.emit is not None
        text = emitted(self.emit, launch_of_train(self.emit, options, self.nodes, self.image))
        return CommandResult({"emit": self.emit, "text": text}, [text])


@dataclass(frozen=True, kw_only=True)
class Compare(Layered, CompareConfig):
    """The same job under several strategies: a table and a report."""

    example: ClassVar[str] = "dure compare digits-mlp --strategy bsp --strategy ssp --on virtual"
    layers: ClassVar[type[Options]] = CompareConfig

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run the strategies; return the summaries and their table."""
        config = self.only(CompareConfig)
        if self.print_config:
            return _configuration(config)
        _require_job(config)
        _check_outputs(config.report)
        with _fork_server(*(config.on or (DEFAULT,))) as fork_server:
            from dure.report.comparison import FittedComparison
            from dure.run.compare import run_all
            from dure.run.prebuilt import Prebuilt

            comparison = run_all(config, Prebuilt(fork_server=fork_server, interruption=interruption))
        table = FittedComparison(comparison.runs, self.goal)
        said, status = _lacking(comparison.runs)
        if all("diverged" in run.figures for run in comparison.runs):
            status = 1
        lines = _lines(_written(comparison.report, config.report), _unwritten(comparison.runs), said)
        failed = comparison.report is None and (config.report is not None or extra_is_there("report"))
        return CommandResult(comparison.summary(), [table], lines, FAILED if failed else status)


@dataclass(frozen=True, kw_only=True)
class Report(Printed, ComparedTarget):
    """A report of finished runs."""

    example: ClassVar[str] = "dure report runs/demo --out demo.html"

    folders: Positional[tuple[Path, ...]]
    """Folders of runs, or folders with folders of runs in them."""
    out: Path | None = None
    """File of the report. If left out: report.html, or the first of report-2.html, report-3.html, ... that is free."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Write the report; return the summaries and their table."""
        from dure.report.comparison import FittedComparison
        from dure.report.html import DEFAULT, free, write_report
        from dure.report.run import read_run

        _check_outputs(self.out)
        import_extra("report", "dure report")
        runs = [read_run(path) for folder in self.folders for path in _runs_in(folder)]
        target, path = self.goal, self.out or free(DEFAULT)
        said = _failure(path, lambda: write_report(path, runs, title=f"{len(runs)} runs", target=target))
        values = {"runs": [run.summary() for run in runs], "report": None if said else str(path)}
        table = FittedComparison(runs, target)
        return CommandResult(values, [table], said or _written(path, self.out), FAILED if said else 0)


@dataclass(frozen=True, kw_only=True)
class Reproduce(Printed):
    """Tables and figures of papers, made again; without a name, the list of them."""

    example: ClassVar[str] = "dure reproduce sharding"

    name: Positional[str] = ""
    """Name of the result, as in the rows; `dure reproduce NAME --help` has its flags. Without a name, the rows of all
    papers with their commands."""
    all: bool = False
    """Run the commands of all rows, two at a time, and write one report of their output."""
    quick: bool = False
    """A reduced form, that shows that the command works: fewer rounds and seeds, for most."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Reproduce the result; return its rows and their table. Without a name, list what can be reproduced."""
        from dure.cli.reproduce import find, papers

        own = [option.name for option in fields(Reproduce)]
        flags = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in own}
        _check_outputs(flags.get("out"))
        if self.all:
            return self._all(papers("all"), flags)
        if self.quick and not self.name:
            raise UsageError("--quick belongs to one result: name it, as in dure reproduce pipelines.")
        study = find(self.name) if self.name else papers("rows")
        result = study.reproduce(**flags)
        return CommandResult(result, [study.table(result)])

    def _all(self, every: PaperStudy, flags: Mapping[str, Any]) -> CommandResult:
        if self.name:
            raise UsageError(f"--all runs every row; it has no use for {self.name}.")
        result = every.reproduce(os.environ, quick=self.quick, **flags)
        return CommandResult(result, [every.table(result)], status=0 if not result["failed"] else 1)


@dataclass(frozen=True, kw_only=True)
class Probe(Printed):
    """Measure this machine, or under torchrun these hosts and their links, and write a cluster file."""

    example: ClassVar[str] = "dure probe mnist-mlp --workers 8"

    job: Positional[str] = ""
    """A job whose steps are timed; products of matrices if left out."""
    workers: Workers = 4
    """Workers that share this machine, if it is the only one."""
    codec: Repeated[tuple[str, ...]] = ()
    """A codec whose cost is measured too, on the job's gradients; the flag may be repeated."""
    data: Path | None = None
    """Folder of data sets."""
    key_file: Path | None = None
    """Under torchrun: file with the key that lets the hosts measure each other, as for train."""
    gpu: str = ""
    """Measure this machine's accelerators beside the figures of this one (dure devices); no file is written."""
    out: Path = Path("cluster.yaml")
    """Where to write the cluster file."""

    @property
    def started_outside(self) -> bool:
        """Whether another program, as torchrun, starts a process for each rank: every rank measures."""
        return bool(os.environ.get("RANK"))

    def execute(self, interruption: Interruption) -> CommandResult:
        """Measure and write the cluster file; return its constants, the measurements, and their table."""
        import torch

        from dure.job.job import load_job
        from dure.job.validation import validate_job
        from dure.planner.probe.advice import table
        from dure.planner.probe.probe import probe

        if self.gpu:
            return self._accelerators()
        _check_outputs(self.out)
        torch.set_num_threads(1)  # as workers compute
        job = load_job(self.job, self.data) if self.job else None
        if job is not None:
            validate_job(job, self.job, rows=job.batch_size)
        found = probe(
            job, workers=self.workers, codecs=self.codec, name=self.job, data=self.data, key_file=self.key_file
        )
        if found is None:
            return CommandResult({})
        cluster = found.pop("cluster")
        text = cluster.to_yaml()
        said = _failure(self.out, lambda: self.out.write_text(text, encoding="utf-8"))
        written = None if said else str(self.out)
        values = {"out": written, "cluster": cluster.model_dump(mode="json", by_alias=True), **found}
        return CommandResult(values, [table(cluster, found)], said or f"cluster: {self.out}", FAILED if said else 0)

    def _accelerators(self) -> CommandResult:
        from dure.core.devices import device
        from dure.planner.probe.device import probe_devices, table_of, values_of
        from dure.runtime.launch.rendezvous import RankEnvironment, place

        entry, here = device(self.gpu), place() or RankEnvironment()
        if self.job or self.codec:
            raise UsageError("--gpu measures accelerators alone: leave the job and --codec out, or leave --gpu out.")
        values = values_of(entry, probe_devices(here, entry))
        return CommandResult({} if here.rank else values, [] if here.rank else [table_of(values)])


@dataclass(frozen=True, kw_only=True)
class Plan(Printed, Emission, PlanOptions):
    """The strategies that suit a job on a cluster, the best first, with reasons. Seconds are predicted."""

    example: ClassVar[str] = "dure plan mnist-cnn --on examples/lab.yaml"

    def execute(self, interruption: Interruption) -> CommandResult:
        """Plan; return the strategies and their table. With `emit`, return the text that starts the best."""
        from dure.cli.plan import advice

        check_emission(self)
        values, shown, said = advice(self.only(PlanOptions), self)
        return CommandResult(values, shown, said)


@dataclass(frozen=True, kw_only=True)
class Rl(Printed, RlOptions):
    """Distributed reinforcement learning: Ape-X, Gorila, or plain DQN."""

    example: ClassVar[str] = "dure rl apex --env CartPole-v1 --actors 4 --seconds 120"

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run actors and learners; return the figures of the run and their table."""
        config = self.only(RlOptions).config()
        _check_outputs(self.report)
        if self.report is not None:
            import_extra("report", "--report")
        with _fork_server(config.on or DEFAULT) as fork_server:
            from dure.run.prebuilt import Prebuilt
            from dure.run.train import run

            finished = run(config, Prebuilt(fork_server=fork_server, interruption=interruption))
        failure, written = "", ""
        if (report := self.report) is not None:
            failure = _failure(report, lambda: finished.report(report, title=finished.config["job"]))
            written = failure or f"report: {report}"
        said, status = _lacking([finished])
        lines = _lines(written, _unwritten([finished]), said)
        return CommandResult(values_of(finished), [_run_table(finished)], lines, FAILED if failure else status)


@dataclass(frozen=True, kw_only=True)
class Scale(Printed):
    """The number of workers of an elastic run: of one that was started with a range, as in --workers 2..8."""

    example: ClassVar[str] = "dure scale runs/elastic 6"

    folder: Positional[Path] = Path()
    """The folder (--out) of the run."""
    workers: Positional[Workers | None] = None
    """Workers that shall run; if left out, nothing changes, and the present number is shown."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Ask the run's driver; return the size of the run."""
        from dure.run.scaling import ask, scale_of

        scale = scale_of(self.folder) if self.workers is None else ask(self.folder, self.workers, interruption)
        said = f"{len(scale.run)} workers run of {scale.target}; the run may have {scale.least} to {scale.most}."
        return CommandResult(asdict(scale), said=said)


@dataclass(frozen=True, kw_only=True)
class Watch(Printed):
    """The progress, loss, accuracy, workers, bytes and seconds of a run that is going on, until it is over."""

    example: ClassVar[str] = "dure watch runs/demo"

    folder: Positional[Path] = Path()
    """The folder (--out) of the run."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Show the run until it is over; return its figures."""
        from dure.cli.watch import watch
        from dure.report.record import require_run

        require_run(self.folder)
        values: dict[str, Any] = {}
        return CommandResult(
            values, [lambda console: values.update(watch(self.folder, interruption, console).summary())]
        )


@dataclass(frozen=True, kw_only=True)
class Export(Printed):
    """The model of a run, from its newest checkpoint, for other programs."""

    example: ClassVar[str] = "dure export runs/demo --to safetensors"

    folder: Positional[Path] = Path()
    """The folder (--out) of the run: one of bsp over collectives, with or without a partition."""
    to: Literal["safetensors", "dcp"] = "safetensors"
    """safetensors: the model's state_dict, for load_state_dict. dcp: model and optimizer, for a script that reads
    torch.distributed.checkpoint, as with fully_shard."""
    out: Path | None = None
    """File or folder to write; model.safetensors or dcp in the run's folder if left out."""
    trust: bool = False
    """Run the code that the run names also where it has changed since, as for train --resume."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Write the model; return its path and its step."""
        from dure.report.record import require_run
        from dure.run.export import export

        require_run(self.folder)
        done = export(self.folder, self.to, self.out, trust=self.trust)
        what = "the model and the state of its optimizer" if done.optimizer else "the model"
        values = {"out": str(done.path), "step": done.step, "optimizer": done.optimizer}
        return CommandResult(values, said=f"{done.path}: {what} after step {done.step}.")


@dataclass(frozen=True, kw_only=True)
class Import(Printed):
    """A model of another program, as one more checkpoint of a run: train --resume goes on from it."""

    example: ClassVar[str] = "dure import runs/demo/dcp runs/demo --trust"

    source: Positional[Path] = Path()
    """A file of safetensors, or a folder of torch.distributed.checkpoint."""
    folder: Positional[Path] = Path()
    """The folder (--out) of a run of the same model that has a checkpoint."""
    step: Count | None = None
    """Step of the run that the model is after; the steps of the optimizer if left out, else those of the run."""
    trust: bool = False
    """Read a folder of torch.distributed.checkpoint, which can run code of its author; and run the code that the run
    names also where it has changed since, as for train --resume."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Write the checkpoint; return its step."""
        from dure.report.record import require_run
        from dure.run.export import bring

        require_run(self.folder)
        done = bring(self.source, self.folder, self.step, trust=self.trust)
        without = "" if done.optimizer else " The optimizer begins anew: its state is not there."
        values = {"folder": str(done.folder), "step": done.step, "optimizer": done.optimizer}
        said = f"{done.folder} has a checkpoint of step {done.step}: dure train --resume {done.folder}.{without}"
        return CommandResult(values, said=said)


Command = Methods | Devices | Train | Compare | Report | Reproduce | Probe | Plan | Rl | Scale | Watch | Export | Import
COMMANDS: Mapping[str, type[Command]] = {kind.__name__.lower(): kind for kind in get_args(Command)}


# ---- parts of commands


@contextmanager
def _fork_server(*places: str) -> Iterator[ForkServer | None]:
    """Start a fork server if a run in one of `places` can use it: it imports torch while this process does."""
    if not any(map(has_early_fork_server, places)):
        yield None
        return
    from dure.runtime.launch.fork_server import ForkServer

    with ForkServer() as fork_server:
        yield fork_server


def _require_job(config: Options) -> None:
    if not config.job and getattr(config, "resume", None) is None:
        command = "compare" if isinstance(config, CompareConfig) else "train"
        raise UsageError(f"no job is named. Write, for example, dure {command} digits-mlp.")


def _decided(config: TrainConfig, within: float) -> TrainConfig:
    """The options with the strategy that a plan chooses, which is said."""
    from dure.cli.plan import PlanProgress
    from dure.planner.auto import decided

    progress = PlanProgress()
    try:
        config, said = decided(config, within, say=progress)
    finally:
        progress.end()
    say(said)
    return config


def _configuration(config: Options) -> CommandResult:
    import yaml

    return CommandResult(config.plain(), [yaml.safe_dump(config.plain(), sort_keys=False)])


def _lines(*said: str) -> str:
    return "\n".join(filter(None, said))


def _written(report: Path | None, asked: Path | None) -> str:
    from dure.report.html import DEFAULT

    if report is None:
        return (
            "dure: the report is not written. Make it with dure report from the folders of the runs, if they have some."
        )
    kept = f" ({DEFAULT} was there already and stays)" if asked is None and report != DEFAULT else ""
    return f"report: {report}{kept}"


def _check_outputs(*paths: Path | None) -> None:
    """Raise `UsageError`, before anything is computed, for a file that could not be written."""
    from dure.core.regular_file import check_output

    for path in paths:
        if path is not None:
            check_output(path)


def _failure(path: Path, write: Callable[[], object]) -> str:
    """Write the file at `path`; the line that says why it is not written, or nothing. The result is shown anyway."""
    try:
        write()
    except OSError as error:
        return f"dure: {path} is not written ({error.strerror or error})."
    return ""


def _lacking(runs: Sequence[Run]) -> tuple[str, int]:
    """The last line, with the workers of `runs` that have not done all their work, and the exit status."""
    lines = []
    for run in runs:
        missing = run.summary().get("unfinished", {})
        if missing:
            causes = "; ".join(f"{name} ({cause})" for name, cause in missing.items())
            lines.append(f"dure: the run has ended without all the work of {causes}.")
    return "\n".join(lines), LACKING if lines else 0


def _unwritten(runs: Sequence[Run]) -> str:
    """A line with the files that are missing or incomplete in the records of `runs`."""
    lines = []
    for run in runs:
        causes = "; ".join(f"{name} ({cause})" for name, cause in run.summary().get("unwritten", {}).items())
        if causes:
            lines.append(f"dure: the record in {run.path} is not whole: {causes}. The result is as shown.")
    return "\n".join(lines)


def _runs_in(folder: Path) -> list[Path]:
    """The run in `folder`, or the runs in its subfolders if `folder` is no run itself."""
    from dure.report.record import CONFIG

    inside = sorted(found.parent for found in folder.glob(f"*/{CONFIG}"))
    return inside if inside and not (folder / CONFIG).exists() else [folder]


def _run_table(run: Run) -> Any:
    from rich.table import Table

    from dure.core.target import Target
    from dure.report.comparison import SPEED_UP, entries, figure_rows

    found = entries([run], target=Target())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("Strategy", found[0].label)
    for _, group in figure_rows(found, target=Target()):
        for row in group:
            if row.name != SPEED_UP:
                table.add_row(row.name, row.cells[0])
    return table


def say(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{printable(line)}\n")
