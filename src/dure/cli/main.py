"""The command line: makes objects of text and of the environment.

    defaults  <  file (--config)  <  environment (DURE_WORKERS=8)  <  flags

Standard output has the result alone: the table, or with `--json` one JSON object on one line. All other output goes to
standard error, that of user code too. Exit status: 0 done, 1 failed, 2 wrong usage, 3 done although some worker has not
done all its work, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TextIO, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction

from dure import __version__
from dure.cli.reproduce import PaperStudy, with_flags
from dure.cli.rl import RlOptions, values_of
from dure.core.packages import extra_is_there, import_extra
from dure.core.regular_file import CHECKPOINTS, LATEST
from dure.core.text import printable, sentence
from dure.core.user_code import explain_user_errors
from dure.errors import DureError, UsageError
from dure.planner.options import PlanOptions
from dure.run.config import CompareConfig, Count, Options, TrainConfig, Workers, checked, goal
from dure.run.emit import Emission, check_emission, launch_of_train
from dure.run.places import DEFAULT, has_early_fork_server, is_started_outside
from dure.runtime.launch.interruption import Interrupted, Interruption
from dure.runtime.launch.relay import STDERR, STDOUT, flush, ready_streams

if TYPE_CHECKING:
    from dure.report.run import Run
    from dure.runtime.launch.fork_server import ForkServer

O = TypeVar("O", bound=Options)  # noqa: E741  (options)

AUTO = "auto"
"""The strategy that a plan chooses."""

FAILED = 1
"""Exit status of a command that has not written a file that it should write."""

LACKING = 3
"""Exit status of a run in which some worker has not done all its work."""

PREFIX = "DURE_"

WIDTH = 140
"""Columns of a table that is written to a file."""


@dataclass(frozen=True)
class CommandResult:
    """The result of a command: `values` for `--json`, `shown` (tables, text) for people, `said` on standard error.

    `status` is the exit status.
    """

    values: dict[str, Any]
    shown: Sequence[Any] = ()
    said: str = ""
    status: int = 0


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Every method, topology, codec and partition; or all about one of them."""

    example: ClassVar[str] = "dure methods ssp"

    name: Positional[str] = ""
    """Which one; all if left out. Of gossip also a graph, as in gossip:graph=ring."""
    workers: int | None = None
    """How many gossip with each other; 8, 16 and 64 if left out."""
    draw: tuple[Path, ...] | None = None
    """Draw a method over time, as in ssp --draw FILE.svg, or the timetable of a partition, as in pipedream:stages=4: as
    text and, in the file, in color."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Return the rows and their tables."""
        from dure.cli.methods import members, tables

        if self.draw is not None:
            from dure.cli.drawing import draw, shown

            drawing = draw(self.name, self.draw)
            return CommandResult({"drawing": drawing.row}, shown(drawing))
        if self.workers is not None:
            from pydantic import TypeAdapter

            checked("workers", self.workers, TypeAdapter(Workers))
        rows = members(self.name, self.workers)
        return CommandResult({"methods": rows}, tables(rows, details=bool(self.name)))


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig, Emission):
    """One run of a job under one strategy."""

    example: ClassVar[str] = "dure train digits-mlp --sync ssp:bound=3 --on virtual --workers 8"

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    within: float = 30.0
    """Real seconds in which --strategy auto chooses a strategy, by a plan (`dure plan`)."""
    nodes: Count | None = None
    """With --emit: machines, with equal numbers of workers. If left out: those of a cluster file, else 1."""
    config: Path | None = None
    """YAML file of options, by the names of the flags with _ for -."""
    json: bool = False
    """Print one JSON object as the last line."""
    print_config: bool = False
    """Print the options that would be used, as YAML, and do nothing."""

    def __post_init__(self) -> None:
        """Check nothing: values are checked once all layers are merged."""

    @property
    def started_outside(self) -> bool:
        """Whether another program starts a process for each rank."""
        return is_started_outside(self.on)

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run the job; return its summary as values and as a table. With `emit`, return the text alone."""
        check_emission(self, self.nodes)
        if self.emit is not None and not self.print_config:
            return self._emitted()
        config = _as(TrainConfig, self)
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
        text = emitted(self.emit, launch_of_train(options, self.nodes, self.image))
        return CommandResult({"emit": self.emit, "text": text}, [text])


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """The same job under several strategies: a table and a report."""

    example: ClassVar[str] = "dure compare digits-mlp --strategy bsp --strategy ssp --on virtual"

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    strategies: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="strategy")] = ()
    """A whole strategy in one text, as in "ssp:bound=3 ps:shards=2". Repeat it. If left out: bsp, averaging:period=8,
    ssp:bound=3 and downpour."""
    on: UseAppendAction[tuple[str, ...]] = ()
    """local, virtual, or a cluster file. Repeat it to compare places. local if left out."""
    config: Path | None = None
    """YAML file of options, by the names of the flags with _ for -; a list for strategies and on."""
    json: bool = False
    """Print one JSON object as the last line."""
    print_config: bool = False
    """Print the options that would be used, as YAML, and do nothing."""

    def __post_init__(self) -> None:
        """Check nothing: values are checked once all layers are merged."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run the strategies; return the summaries and their table."""
        config = _as(CompareConfig, self)
        if self.print_config:
            return _configuration(config)
        _require_job(config)
        _check_outputs(config.report)
        with _fork_server(*(config.on or (DEFAULT,))) as fork_server:
            from dure.report.comparison import FittedComparison
            from dure.run.compare import run_all
            from dure.run.prebuilt import Prebuilt

            comparison = run_all(config, Prebuilt(fork_server=fork_server, interruption=interruption))
        table = FittedComparison(comparison.runs, goal(config.target, config.target_loss))
        said, status = _lacking(comparison.runs)
        if all("diverged" in run.figures for run in comparison.runs):
            status = 1
        lines = _lines(_written(comparison.report, config.report), _unwritten(comparison.runs), said)
        failed = comparison.report is None and (config.report is not None or extra_is_there("report"))
        return CommandResult(comparison.summary(), [table], lines, FAILED if failed else status)


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of finished runs."""

    example: ClassVar[str] = "dure report runs/demo --out demo.html"

    folders: Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold such."""
    out: Path | None = None
    """File of the report. If left out: report.html, or the first of report-2.html, report-3.html, ... that is free."""
    target: float | None = None
    """Test accuracy whose time is compared; 0.95 if left out."""
    target_loss: float | None = None
    """Loss whose time is compared, in place of an accuracy."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Write the report; return the summaries and their table."""
        from dure.report.comparison import FittedComparison
        from dure.report.html import DEFAULT, free, write_report
        from dure.report.run import read_run

        _check_outputs(self.out)
        import_extra("report", "dure report")
        runs = [read_run(path) for folder in self.folders for path in _runs_in(folder)]
        target, path = goal(self.target, self.target_loss), self.out or free(DEFAULT)
        said = _failure(path, lambda: write_report(path, runs, title=f"{len(runs)} runs", target=target))
        values = {"runs": [run.summary() for run in runs], "report": None if said else str(path)}
        table = FittedComparison(runs, target)
        return CommandResult(values, [table], said or _written(path, self.out), FAILED if said else 0)


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """Tables and figures of papers, made again; without a name, the list of them."""

    example: ClassVar[str] = "dure reproduce sharding"

    name: Positional[str] = ""
    """Name of the result, as in the rows; `dure reproduce NAME --help` has its flags. Without a name, the rows of all
    papers with their commands."""
    all: bool = False
    """Run the commands of all rows, two at a time, and write one report of their output."""
    quick: bool = False
    """A reduced form, that shows that the command works: fewer rounds and seeds, for most."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Reproduce the result; return its rows and their table. Without a name, list what can be reproduced."""
        from dure.cli.reproduce import find, papers

        flags = {each.name: getattr(self, each.name) for each in fields(self)[len(fields(Reproduce)) :]}
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
class Probe:
    """Measure this machine, or under torchrun these hosts and their links, and write a cluster file."""

    example: ClassVar[str] = "dure probe mnist-mlp --workers 8"

    job: Positional[str] = ""
    """A job whose steps are timed; products of matrices if left out."""
    workers: int = 4
    """How many workers share this machine, where it is alone."""
    codec: UseAppendAction[tuple[str, ...]] = ()
    """What a codec costs is measured too, on the job's gradients; once for each."""
    data: Path | None = None
    """Folder of data sets."""
    key_file: Path | None = None
    """Under torchrun: file with the key that lets the hosts measure each other, as for train."""
    out: Path = Path("cluster.yaml")
    """Where to write the cluster file."""
    json: bool = False
    """Print one JSON object as the last line."""

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


@dataclass(frozen=True, kw_only=True)
class Plan(PlanOptions, Emission):
    """The strategies that suit a job on a cluster, the best first, with reasons. Seconds are predicted."""

    example: ClassVar[str] = "dure plan mnist-cnn --on examples/lab.yaml"

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    json: bool = False
    """Print one JSON object as the last line."""

    def __post_init__(self) -> None:
        """Check nothing: `execute` does."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Plan; return the strategies and their table. With `emit`, return the text that starts the best."""
        from dure.cli.plan import advice

        check_emission(self)
        options = PlanOptions(**{each.name: getattr(self, each.name) for each in fields(PlanOptions)})
        values, shown, said = advice(options, self)
        return CommandResult(values, shown, said)


@dataclass(frozen=True, kw_only=True)
class Rl(RlOptions):
    """Distributed reinforcement learning: Ape-X, Gorila, or plain DQN."""

    example: ClassVar[str] = "dure rl apex --env CartPole-v1 --actors 4 --seconds 120"

    json: bool = False
    """Print one JSON object as the last line."""

    def __post_init__(self) -> None:
        """Check nothing: `execute` does."""

    def execute(self, interruption: Interruption) -> CommandResult:
        """Run actors and learners; return the figures of the run and their table."""
        options = RlOptions(**{each.name: getattr(self, each.name) for each in fields(RlOptions)})
        config = options.config()
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


Command = Methods | Train | Compare | Report | Reproduce | Probe | Plan | Rl
COMMANDS: Mapping[str, type[Command]] = {kind.__name__.lower(): kind for kind in get_args(Command)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in `arguments` (those of this process if None), and return its exit status."""
    given, arguments = arguments, sys.argv[1:] if arguments is None else arguments
    if given is None:
        ready_streams()
    interruption = Interruption()
    command: Command | None = None
    try:
        if list(arguments) == ["--version"]:
            _write(sys.stdout, f"{__version__}\n")
            return 0
        with interruption.heard():
            command = parse(arguments, os.environ)
            with _results(for_good=given is None) as out:
                with explain_user_errors("your own code raised", DureError, only=True):
                    done = command.execute(interruption)
                if _speaks(command):
                    _tell(done, out, as_json=command.json)
            return done.status
    except DureError as error:
        _say(f"dure: {sentence(str(error))}")
        if interruption.number is not None:
            return _interrupted(interruption.number, command)
        return 2 if isinstance(error, UsageError) else 1
    except Interrupted as end:
        return _interrupted(end.number, command)
    except MemoryError as error:
        _say(f"dure: the memory of this machine is too small for this: {sentence(str(error)) or 'MemoryError'}")
        return 1
    except BrokenPipeError:  # the reader has closed the pipe
        pass
    return 0


@contextmanager
def _results(*, for_good: bool) -> Iterator[TextIO]:
    """Yield the stream of results. While open, all other output, of C code too, goes to standard error.

    With `for_good` this holds until the process ends, also for output of user code at exit.
    """
    flush()
    before = os.dup(STDOUT)
    standard = sys.stdout is sys.__stdout__
    out = os.fdopen(before, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) if standard else sys.stdout
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield out
    finally:
        flush()
        if not for_good:
            os.dup2(before, STDOUT)
        with suppress(OSError):  # already raised by the write
            out.close() if standard else os.close(before)


def _tell(done: CommandResult, out: TextIO, *, as_json: bool) -> None:
    """Show a result to people, and with `as_json` write its JSON to `out`."""
    with _refused_writes():
        for each in done.shown:
            _show(each, sys.stderr if as_json else out)
        out.flush()
    if done.said:
        _say(done.said)
    if as_json:
        from dure.report.files import to_json

        _write(out, f"{to_json(done.values)}\n")


def _write(stream: TextIO, text: str) -> None:
    with _refused_writes():
        stream.write(text)
        stream.flush()


@contextmanager
def _refused_writes() -> Iterator[None]:
    """Within the context, raise `DureError` where standard output cannot be written, as on a full disk."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise DureError(f"standard output cannot be written ({error.strerror or error}).") from error


def _interrupted(number: int, command: Command | None) -> int:
    """Report that a signal has ended `command`, and how to resume its run; returns the exit status."""
    _say("dure: interrupted" if number == signal.SIGINT else "dure: terminated")
    folder = (command.resume or command.out) if isinstance(command, Train | Rl) and _speaks(command) else None
    if folder is not None and (folder / CHECKPOINTS / LATEST).exists():
        launch = "torchrun, its options as before, -m " if "TORCHELASTIC_RUN_ID" in os.environ else ""
        name = "rl" if isinstance(command, Rl) else "train"
        _say(f"resume with: {launch}dure {name} --resume {shlex.quote(str(folder))}")
    return 128 + number


@contextmanager
def _fork_server(*places: str) -> Iterator[ForkServer | None]:
    """Start a fork server if a run in one of `places` can use it: it imports torch while this process does."""
    if not any(map(has_early_fork_server, places)):
        yield None
        return
    from dure.runtime.launch.fork_server import ForkServer

    with ForkServer() as fork_server:
        yield fork_server


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Parse the command in `arguments`, over file and environment. Wrong flags end the process with status 2."""
    name = arguments[0] if arguments else ""
    if {"-h", "--help"} & {*arguments}:
        _write(sys.stdout, f"example: {COMMANDS.get(name, Train).example}\n\n")
    reproduce = with_flags(Reproduce, arguments[1:]) if name == "reproduce" else Reproduce
    if name in COMMANDS:
        _check_numbers(reproduce if name == "reproduce" else COMMANDS[name], arguments[1:])
    train = layered(Train, TrainConfig, arguments, environ) if name == "train" else Train()
    compare = layered(Compare, CompareConfig, arguments, environ) if name == "compare" else Compare()
    commands = (
        Annotated[Methods, tyro.conf.subcommand("methods")]
        | Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Compare, tyro.conf.subcommand("compare", default=compare)]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[reproduce, tyro.conf.subcommand("reproduce")]  # type: ignore[valid-type]
        | Annotated[Probe, tyro.conf.subcommand("probe")]
        | Annotated[Plan, tyro.conf.subcommand("plan")]
        | Annotated[Rl, tyro.conf.subcommand("rl")]
    )
    style = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    about = "Train one PyTorch model on many machines: every way of doing it, in virtual and in real time."
    about += " dure --version says which version this is."
    return tyro.cli(commands, prog="dure", description=about, args=list(arguments), config=style)


def _check_numbers(kind: type, arguments: Sequence[str]) -> None:
    """Raise `UsageError` for a flag that needs a number and has another value, as for the environment."""
    hints = get_type_hints(kind, include_extras=True)
    for option in fields(kind):
        number, text = _number(hints[option.name]), _flag(arguments, f"--{option.name.replace('_', '-')}")
        if number is None or text is None or text.startswith("--"):
            continue
        try:
            number(text)
        except ValueError:
            from pydantic import TypeAdapter

            checked(option.name, text, TypeAdapter(hints[option.name]))


def _number(hint: Any) -> Callable[[str], float] | None:
    """`int` or `float` if an option has that type, with or without bounds and None."""
    if hint in (int, float):
        return hint  # type: ignore[no-any-return]
    inside = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if get_origin(hint) not in (Annotated, Union, UnionType):
        return None
    return next((found for found in map(_number, inside) if found is not None), None)


def layered(kind: type[O], config: type[Options], arguments: Sequence[str], environ: Mapping[str, str]) -> O:
    """The command `kind` without its flags: defaults, then the file of `--config`, then the environment."""
    values: dict[str, Any] = {}
    path = _flag(arguments, "--config")
    if path is not None:
        values |= _read(Path(path), config)
    values |= {
        option.name: environ[f"{PREFIX}{option.name.upper()}"]
        for option in fields(config)
        if environ.get(f"{PREFIX}{option.name.upper()}") and not str(option.type).startswith("tuple")
    }
    checked = config.of(values)
    return kind(**{name: getattr(checked, name) for name in values})


def _read(path: Path, config: type[Options]) -> dict[str, Any]:
    from dure.core.yaml_text import read_yaml_file

    try:
        values = read_yaml_file(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}. Give a YAML file of options as KEY: VALUE lines.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold options as KEY: VALUE lines, it holds {type(values).__name__}.")
    values = {"on" if key is True else key: value for key, value in values.items()}  # YAML 1.1 reads the word as true
    try:
        config.of(values)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
    return values


def _flag(arguments: Sequence[str], name: str) -> str | None:
    for position, argument in enumerate(arguments):
        if argument == name and position + 1 < len(arguments):
            return arguments[position + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return None


def _speaks(command: Command) -> bool:
    """Whether this process reports results: of ranks that another program has started, only the first does."""
    return not getattr(command, "started_outside", False) or os.environ.get("RANK", "0") == "0"


def _as(kind: type[O], command: Options) -> O:
    return kind(**{option.name: getattr(command, option.name) for option in fields(kind)})


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
    _say(said)
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
    from dure.report.comparison import entries, figure_rows

    found = entries([run], target=Target())
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("Strategy", " ".join(run.summary()["strategy"].values()))
    for _, group in figure_rows(found, target=Target()):
        for row in group:
            table.add_row(row.name, row.cells[0])
    return table


def _show(what: Any, stream: TextIO) -> None:
    from rich.console import Console

    if isinstance(what, str):
        stream.write(printable(what) if stream.isatty() else what)  # a file gets the exact text
        return
    console = Console(file=stream)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(file=stream, width=WIDTH)
    console.print(_Printable(what))


@dataclass(frozen=True)
class _Printable:
    """Shows `what` with control characters in its text escaped: they come from records and files."""

    what: Any

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self.what, options):
            yield Segment(text if control else printable(text), style, control)


def _say(line: str) -> None:
    sys.stderr.write(f"{printable(line)}\n")
