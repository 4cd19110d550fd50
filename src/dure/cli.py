"""The command line. The only place where text and the environment become objects.

    defaults  <  file (--config)  <  environment (DURE_WORKERS=8)  <  flags

Standard output is for the result: with `--json`, exactly one JSON object, its last line. Everything else goes to
standard error. Exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional, UseAppendAction

from dure import __version__
from dure.config import CompareConfig, Options, TrainConfig, checked
from dure.errors import DureError, UsageError
from dure.own_file import blamed

if TYPE_CHECKING:
    from dure.report.record import Run
    from dure.runtime.launch.nursery import Nursery

O = TypeVar("O", bound=Options)  # noqa: E741  (options)

PREFIX = "DURE_"

WIDTH = 140
"""Columns of a table that goes to a file."""


@dataclass(frozen=True, kw_only=True)
class Methods:
    """Every method, topology, codec and partition; or all about one of them."""

    name: Positional[str] = ""
    """Which one; all if left out. Of gossip also a graph, as in gossip:graph=ring."""
    workers: int | None = None
    """How many gossip with each other; 8, 16 and 64 if left out."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self) -> dict[str, Any]:
        """Print the table and return what is in it."""
        from dure.methods import described, tables

        rows = described(self.name, self.workers)
        for table in tables(rows, details=bool(self.name)):
            _show(table, to_error=self.json)
        return {"methods": rows}


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig):
    """One run of a job under one strategy."""

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job."""
    config: Path | None = None
    """YAML file of options, by the names of the flags with _ for -."""
    json: bool = False
    """Print one JSON object as the last line."""
    print_config: bool = False
    """Print the options that would be used, as YAML, and do nothing."""

    def __post_init__(self) -> None:
        """Nothing: values are checked when all layers are together."""

    def execute(self) -> dict[str, Any]:
        """Run it, print its row and return its summary."""
        config = _as(TrainConfig, self)
        if config.resume is None:  # a part of what a resumed run has may make no sense alone
            config.chosen()
        if self.print_config:
            return _print_config(config, self.json)
        _require_job(config)
        with _nursery(config.on or "local") as nursery:
            from dure.train import AtHand, run

            finished = run(config, AtHand(nursery=nursery))
        if _speaks(self):
            _show_run(finished, to_error=self.json)
        return finished.summary()


@dataclass(frozen=True, kw_only=True)
class Compare(CompareConfig):
    """The same job under several strategies: a table and a report."""

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job."""
    strategies: Annotated[UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="strategy")] = ()
    """A whole strategy in one text, as in "ssp:bound=3 ps:shards=2". Repeat it. Every method if left out."""
    on: UseAppendAction[tuple[str, ...]] = ()
    """local, virtual, or a cluster file. Repeat it to compare places. local if left out."""
    config: Path | None = None
    """YAML file of options, by the names of the flags with _ for -; a list for strategies and on."""
    json: bool = False
    """Print one JSON object as the last line."""
    print_config: bool = False
    """Print the options that would be used, as YAML, and do nothing."""

    def __post_init__(self) -> None:
        """Nothing: values are checked when all layers are together."""

    def execute(self) -> dict[str, Any]:
        """Run them, print the table and return the summaries."""
        config = _as(CompareConfig, self)
        if self.print_config:
            return _print_config(config, self.json)
        _require_job(config)
        with _nursery(*(config.on or ("local",))) as nursery:
            from dure.compare import run_all

            comparison = run_all(config, nursery=nursery)
        _show_runs(comparison.runs, to_error=self.json, target=config.target)
        _say(f"report: {comparison.report}")
        return comparison.summary()


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report of finished runs."""

    folders: Positional[tuple[Path, ...]]
    """Folders of runs, or folders that hold such."""
    out: Path = Path("report.html")
    """Where to write the report."""
    target: float = 0.95
    """Test accuracy whose time is compared."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self) -> dict[str, Any]:
        """Write the report, print the table and return the summaries."""
        from dure.report.html import write_report
        from dure.report.record import read_run

        runs = [read_run(path) for folder in self.folders for path in _runs_in(folder)]
        path = write_report(self.out, runs, title=f"{len(runs)} runs")
        _show_runs(runs, to_error=self.json, target=self.target)
        _say(f"report: {path}")
        return {"runs": [run.summary() for run in runs], "report": str(path)}


@dataclass(frozen=True, kw_only=True)
class Reproduce:
    """A table or figure of a paper, made again."""

    name: Positional[str]
    """What to reproduce: sharding, it-signsgd or byzantine. Each has some of the flags below."""
    on: str | None = None
    """sharding: virtual, or namespaces: for real, on hosts with slow links that root can make of this machine."""
    dataset: str | None = None
    """it-signsgd: mnist, cifar10, or both with a comma."""
    rounds: int | None = None
    """it-signsgd, byzantine: steps of every run."""
    seeds: int | None = None
    """it-signsgd, byzantine: how often everything is done."""
    data: Path | None = None
    """it-signsgd: folder of data sets; else DURE_DATA, else the user's cache."""
    out: Path | None = None
    """it-signsgd: where to draw the curves, as SVG."""
    json: bool = False
    """Print one JSON object as the last line."""

    def execute(self) -> dict[str, Any]:
        """Make it, print its table and return its rows."""
        from dure.reproduce import check, find

        module = find(self.name)
        asked = ((each.name, getattr(self, each.name)) for each in fields(self) if each.name not in ("name", "json"))
        flags = {name: value for name, value in asked if value is not None}
        check(self.name, module, flags)
        result: dict[str, Any] = module.reproduce(**flags)
        _show(module.table(result), to_error=self.json)
        return result


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure this machine, or under torchrun these hosts and their links, and write a cluster file."""

    job: Positional[str] = ""
    """A job whose steps are timed too; none if left out."""
    workers: int = 4
    """How many machines like this one to describe, where it is alone."""
    codec: UseAppendAction[tuple[str, ...]] = ()
    """What a codec costs is measured too, on the job's gradients; once for each."""
    data: Path | None = None
    """Folder of data sets."""
    out: Path = Path("cluster.yaml")
    """Where to write the cluster file."""
    json: bool = False
    """Print one JSON object as the last line."""

    @property
    def on(self) -> str:
        """Under torchrun every rank measures."""
        return "torchrun" if os.environ.get("RANK") else ""

    def execute(self) -> dict[str, Any]:
        """Measure, write the file, print the constants and return what they were made of."""
        import torch

        from dure.job import load_job
        from dure.probe import probe, table
        from dure.trial import try_out

        if not self.out.parent.is_dir():  # said before anything is measured
            raise UsageError(f"cannot write {self.out}: there is no folder {self.out.parent}.")
        torch.set_num_threads(1)  # as workers compute
        job = load_job(self.job, self.data) if self.job else None
        if job is not None:
            try_out(job, self.job, rows=job.batch_size)
        found = probe(job, workers=self.workers, codecs=self.codec)
        if found is None:
            return {}
        cluster = found.pop("cluster")
        text = cluster.to_yaml()
        try:
            self.out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {self.out}: {error.strerror}.") from error
        _show(table(cluster, found), to_error=self.json)
        _say(f"cluster: {self.out}")
        return {"out": str(self.out), "cluster": cluster.model_dump(mode="json", by_alias=True), **found}


Command = Methods | Train | Compare | Report | Reproduce | Probe
COMMANDS: Mapping[str, type[Command]] = {kind.__name__.lower(): kind for kind in get_args(Command)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what `arguments` (those of this process if None) say; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(__version__)  # noqa: T201
        return 0
    try:
        command = parse(arguments, os.environ)
        with _ended_by_sigterm(), blamed("your own code raised", DureError, only=True):
            result = command.execute()
        if command.json and _speaks(command):
            from dure.report.files import to_json

            print(to_json(result), flush=True)  # noqa: T201
    except DureError as error:
        _say(f"dure: {' '.join(str(error).split())}")
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        _say("dure: interrupted")
        return 128 + signal.SIGINT
    except _Terminated:
        _say("dure: terminated")
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # the reader has seen enough; nothing more may be written, also at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class _Terminated(BaseException):
    """SIGTERM came."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While open, SIGTERM ends the work as Ctrl-C does: what was started is ended, what was begun is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def end(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _nursery(*places: str) -> Iterator[Nursery | None]:
    """The process that starts those of runs on this machine; it imports torch while this one does."""
    if "local" not in places:
        yield None
        return
    from dure.runtime.launch.nursery import Nursery

    with Nursery() as nursery:
        yield nursery


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Command:
    """The command in `arguments`, file and environment underneath. Wrong flags end the process with status 2."""
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        _check_numbers(COMMANDS[name], arguments[1:])
    train = layered(Train, TrainConfig, arguments, environ) if name == "train" else Train()
    compare = layered(Compare, CompareConfig, arguments, environ) if name == "compare" else Compare()
    commands = (
        Annotated[Methods, tyro.conf.subcommand("methods")]
        | Annotated[Train, tyro.conf.subcommand("train", default=train)]
        | Annotated[Compare, tyro.conf.subcommand("compare", default=compare)]
        | Annotated[Report, tyro.conf.subcommand("report")]
        | Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
        | Annotated[Probe, tyro.conf.subcommand("probe")]
    )
    style = (tyro.conf.DisallowNone, tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)
    about = "Train one PyTorch model on many machines: every way of doing it, in virtual and in real time."
    about += " dure --version says which version this is."
    return tyro.cli(commands, prog="dure", description=about, args=list(arguments), config=style)


def _check_numbers(kind: type, arguments: Sequence[str]) -> None:
    """Raises `UsageError` for a flag whose value is no number and must be: in one sentence, as for the environment."""
    hints = get_type_hints(kind, include_extras=True)
    for option in fields(kind):
        number, text = _number(hints[option.name]), _flag(arguments, f"--{option.name.replace('_', '-')}")
        if number is None or text is None or text.startswith("--"):
            continue
        try:
            number(text)
        except ValueError:
            checked(option.name, text, hints[option.name])


def _number(hint: Any) -> Callable[[str], float] | None:
    """`int` or `float` where an option is one of them, maybe bounded, maybe None."""
    if hint in (int, float):
        return hint  # type: ignore[no-any-return]
    inside = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    if get_origin(hint) not in (Annotated, Union, UnionType):
        return None
    return next((found for found in map(_number, inside) if found is not None), None)


def layered(kind: type[O], config: type[Options], arguments: Sequence[str], environ: Mapping[str, str]) -> O:
    """The command `kind` before its flags: defaults, then the file named by `--config`, then the environment."""
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
    import yaml

    from dure.yaml_text import read_yaml

    try:
        values = read_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no YAML: {error}.") from error
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
    """Under torchrun every rank is here, and the first speaks for all."""
    return getattr(command, "on", "") != "torchrun" or os.environ.get("RANK", "0") == "0"


def _as(kind: type[O], command: Options) -> O:
    return kind(**{option.name: getattr(command, option.name) for option in fields(kind)})


def _require_job(config: Options) -> None:
    if not config.job and getattr(config, "resume", None) is None:
        raise UsageError("no job is named. Write, for example, dure train digits-mlp.")


def _print_config(config: Options, as_json: bool) -> dict[str, Any]:
    import yaml

    if not as_json:
        sys.stdout.write(yaml.safe_dump(config.plain(), sort_keys=False))
    return config.plain()


def _runs_in(folder: Path) -> list[Path]:
    """`folder` itself, or the runs in it where it holds some and is none."""
    from dure.report.record import CONFIG

    inside = sorted(found.parent for found in folder.glob(f"*/{CONFIG}"))
    return inside if inside and not (folder / CONFIG).exists() else [folder]


def _show_run(run: Run, *, to_error: bool) -> None:
    from rich.table import Table

    from dure.report.comparison import entries, lines

    found = entries([run], target=0.95)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("Strategy", " ".join(run.summary()["strategy"].values()))
    for _, group in lines(found, target=0.95):
        for line in group:
            table.add_row(line.name, line.cells[0])
    _show(table, to_error=to_error)


def _show_runs(runs: Sequence[Run], *, to_error: bool, target: float = 0.95) -> None:
    from dure.report.table import comparison_table

    _show(comparison_table(runs, target=target), to_error=to_error)


def _show(what: Any, *, to_error: bool) -> None:
    from rich.console import Console

    console = Console(stderr=to_error)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(stderr=to_error, width=WIDTH)
    console.print(what)


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
