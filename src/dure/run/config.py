"""The configuration of a run: every option of `train` and `compare`, as one checked value.

An option is declared once, as a field: its name, type, range and default, its help below, and its use (`OptionUse`)
where that differs from `--name VALUE`. The command line (`cli.flags`), the environment, the file of options, `--emit`
(`run.emit`), a record and a resumed run (`run.resume`) read these declarations.

Options are plain values, so that a record can hold them and a run can be repeated from its record. Objects that
replace a text (a job, a method) are passed beside the configuration (`prebuilt.Prebuilt`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from inspect import get_annotations
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from dure.core.deployment import check_workers
from dure.core.regular_file import is_regular
from dure.core.spec_text import WIDEST, MemberSpec, machines_in_line, nearest, typed
from dure.core.target import Target
from dure.core.text import quoted
from dure.errors import UsageError
from dure.run.devices import check_form
from dure.run.places import DEFAULT, LAUNCHERS, check_address, is_real, is_started_outside, takes_address
from dure.run.reservation import check_device, reservations
from dure.run.strategy import AXES, Strategy, by_axis

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec

T = TypeVar("T")
C = TypeVar("C", bound="Checked")


class OptionUse(Enum):
    """How an option is used; part of the option's type."""

    POSITIONAL = "a word without a flag"
    REPEATED = "a flag for each value"
    CHANGES = "a resumed run may have another value"


class FlagName(NamedTuple):
    """The flag of an option with another name than the option; part of the option's type."""

    name: str


Positional = Annotated[T, OptionUse.POSITIONAL]
Repeated = Annotated[T, OptionUse.REPEATED]
Changes = Annotated[T, OptionUse.CHANGES]


def _no_switch(value: Any) -> Any:
    """Refuse true and false, which pydantic takes for 1 and 0."""
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "Input should be a valid number")
    return value


def _within_float32(value: float) -> float:
    """Refuse numbers with which no run can compute."""
    if value > LARGEST:
        raise PydanticCustomError("less_than_number", "Input should be less than 3.4e+38")
    return value


LARGEST = 3.4e38
"""A little less than the largest number of float32."""

Integer = Annotated[int, BeforeValidator(_no_switch)]
Number = Annotated[float, BeforeValidator(_no_switch)]

RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class WorkerRange:
    """The numbers of workers that an elastic run may have, from `least` to `most`, written as in 2..8.

    A run that is resumed goes on with `first` workers; None: as many as before.
    """

    least: int
    most: int
    first: int | None = None

    def beginning(self, workers: int) -> WorkerRange:
        """This range, for a run that goes on with so many workers. Raises `UsageError` for a number outside."""
        if not self.least <= workers <= self.most:
            raise UsageError(
                f"{workers} workers were asked for, and the run was started with --workers {self}. Ask for a number "
                f"from {self.least} to {self.most}."
            )
        return replace(self, first=workers)

    def __str__(self) -> str:
        return f"{self.least}..{self.most}"


def _worker_range(value: Any) -> Any:
    """Read the text of a range of workers. Raises `ValueError` for a range that is none."""
    found = RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return value
    least, most = map(int, found.groups())
    if not 1 <= least < most:
        raise ValueError(f"the range {value} goes from fewer workers, at least 1, to more, as in 2..8")
    return WorkerRange(least, check_workers(most))


Count = Annotated[Integer, Field(ge=1, lt=WIDEST)]
Workers = Annotated[Count, AfterValidator(check_workers)]
WorkersOrRange = Annotated[Workers | WorkerRange, BeforeValidator(_worker_range)]
Finite = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(_no_switch)]
Seconds = Annotated[Finite, Field(gt=0), AfterValidator(_within_float32)]
NonNegative = Annotated[Finite, Field(ge=0), AfterValidator(_within_float32)]
Accuracy = Annotated[Number, Field(gt=0, le=1)]
Seed = Annotated[Integer, Field(ge=0, lt=WIDEST)]
Texts = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""Several texts; one may stand alone."""

PLACES = (*LAUNCHERS, "virtual")

FEW = ("bsp", "averaging:period=8", "ssp:bound=3", "downpour")
"""Strategies that are compared if none is named: synchronous, periodic, bounded staleness, asynchronous."""
_RATES: Mapping[str, float] = {"adagrad": 0.01, "adam": 0.001, "adamw": 0.001, "rmsprop": 0.001}


class Checked:
    """A dataclass of options. Values other than the defaults are checked: a wrong one raises `UsageError`."""

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            value = getattr(self, option.name)
            if value is not option.default:
                object.__setattr__(self, option.name, self.checked(option.name, value))

    @classmethod
    def of(cls: type[C], values: Mapping[str, Any]) -> C:
        """Make options of names and values. Raises `UsageError` for an unknown name."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raise `UsageError` for a name that no option has."""
        for name in names:
            if name not in cls.types():
                raise UsageError(f'there is no option "{name}".{nearest(str(name), list(cls.types()))}')

    @classmethod
    def types(cls) -> Mapping[str, Any]:
        """The types of the options by name, with ranges and uses."""
        found: Any = cls
        return _types(found)

    @classmethod
    def used(cls, use: OptionUse) -> list[str]:
        """The names of the options with this use."""
        return [name for name, kind in cls.types().items() if use in getattr(kind, "__metadata__", ())]

    @classmethod
    def checked(cls, name: str, value: Any) -> Any:
        """Convert `value` to the type of the option `name`. Raises `UsageError` if it does not fit."""
        owner: Any = next(base for base in cls.__mro__ if name in get_annotations(base))
        try:
            return _adapter(owner, name).validate_python(value)
        except ValidationError as error:
            found = error.errors()[0]
            if found["type"] == "value_error":
                raise UsageError(f"{name}: {found['ctx']['error']}.") from error
            reason = found["msg"].removeprefix("Input ")
            shown = quoted(value)
            if "than" in found["type"] or "finite" in found["type"]:
                shown = shown.strip("'")  # the text of a flag is a number, but out of range
            raise UsageError(f"{name} {reason[:1].lower()}{reason[1:]}, got {shown}.") from error

    def only(self, kind: type[C]) -> C:
        """The options of the base class `kind`."""
        return kind(**{name: getattr(self, name) for name in kind.types()})

    def plain(self) -> dict[str, Any]:
        """The options as values of JSON and YAML, which `of` reads."""
        return {name: _plain(getattr(self, name)) for name in self.types()}

    def written(self) -> list[str]:
        """The names of the options whose values are not the defaults."""
        return [option.name for option in fields(self) if getattr(self, option.name) != option.default]  # type: ignore[arg-type]


@cache
def _types(kind: type[Checked]) -> Mapping[str, Any]:
    found = get_type_hints(kind, include_extras=True)
    return {option.name: found[option.name] for option in fields(kind)}  # type: ignore[arg-type]


@cache
def _adapter(owner: type[Checked], name: str) -> TypeAdapter[Any]:
    """The check of an option; the class that declares it has one for all subclasses."""
    return TypeAdapter(get_type_hints(owner, include_extras=True)[name])


@dataclass(frozen=True, kw_only=True)
class RunOptions(Checked):
    """Options of every command that carries out runs."""

    checkpoint_every: Changes[Count | None] = None
    """Steps per worker between checkpoints; none if left out. Needs --out."""
    trace: Changes[bool] = False
    """Write trace.json, which Perfetto opens: the times at which each worker computed, sent and waited. Needs --out."""
    tensorboard: Changes[bool] = False
    """Write TensorBoard events: --sink tensorboard. Needs --out."""
    sinks: Annotated[Changes[Repeated[Texts]], FlagName("sink")] = ()
    """Write the history also as wandb (an offline run of W&B), mlflow (a SQLite file), tensorboard, or by your own
    FILE.py:CLASS. Repeat it. Needs --out."""
    device: Changes[str | None] = None
    """Device of the replicas: cpu, cuda (workers take the GPUs in turn), cuda:1 (all workers on this one), or auto:
    accelerators if PyTorch finds some, else cpu. cpu if left out. Servers and actors stay on the CPU; a virtual run is
    on one device."""
    warn_after: Changes[Seconds | None] = None
    """Seconds without a heartbeat, or without a step, after which the progress line names a process of a real run; a
    third of frozen_after if left out."""
    frozen_after: Changes[Seconds] = 30.0
    """Seconds without a heartbeat after which a process of a real run counts as frozen: the others go on without it, or
    the run ends. A link between hosts that is down for less ends nothing."""
    replace: Changes[bool] = True
    """Start a worker of a real run again after it was killed, if the others go on without it: --no-replace leaves it
    out. A worker that has raised an error is not started again, nor one that dies six times without a step."""
    reserve: Changes[str | None] = None
    """With ray: the processors and GPUs that Ray reserves for each process, by its kind, as in "worker:cpus=4,gpus=1
    server:cpus=2". If left out: a GPU for each worker with --device cuda, else a place on some machine."""
    insecure: Changes[bool] = False
    """With ray: run also on a cluster of several machines that asks for no token, where everyone who reaches a port of
    Ray can execute code and read the run's key."""
    preemption_notice: Changes[str | None] = None
    """File or URL by which a cloud warns before it takes a machine away: file:/run/preempted, or
    http://169.254.169.254/latest/meta-data/spot/instance-action. A worker that is warned leaves; if the launcher's
    machine is, the run ends as after SIGTERM (docs/how-to/spot.md)."""
    grace: Changes[NonNegative] = 10.0
    """Seconds that a real run with checkpoints has after Ctrl-C or SIGTERM, to write a last one; 0 for none."""
    out: Path | None = None
    """Folder for the run's record; nothing is written if left out."""

    def __post_init__(self) -> None:
        Checked.__post_init__(self)
        if self.device is not None:
            check_form(self.device)
        if self.preemption_notice is not None:
            from dure.runtime.launch.preemption import check_source  # its client of HTTP takes 14 ms of each start

            check_source(self.preemption_notice)
        if self.warn_after is not None and self.warn_after > self.frozen_after:
            raise UsageError(
                f"warn_after={self.warn_after:g} names a frozen process after frozen_after={self.frozen_after:g}, when "
                "it has been given up. Give fewer seconds than that."
            )
        for name in ("checkpoint_every", "trace", "tensorboard", "sinks"):
            if getattr(self, name) and self.out is None and getattr(self, "resume", None) is None:
                raise UsageError(f"{name} writes files, and there is no folder for them. Give out as well.")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Checked):
    """Options of a training: its job, workers, lengths and data."""

    job: Positional[str] = ""
    """A built-in job, or FILE.py:FUNCTION that returns a dure.Job; parameters follow, as in mnist-mlp:depth=7."""
    workers: WorkersOrRange | None = None
    """Workers; 4 locally and on a uniform virtual cluster, else what the cluster or torchrun says. 2..8: a real run
    over servers, gossip or shared memory with 2 workers, and up to 8 if the launcher has room; `dure scale` changes
    their number."""
    batch_size: Count | None = None
    """Samples per mini-batch of one worker; the job's if left out."""
    batch_sizes: tuple[Count, ...] = ()
    """Samples per mini-batch of each worker, one number per worker, if workers differ."""
    lr: NonNegative | None = None
    """Learning rate; the job's if left out."""
    scale_lr: bool = False
    """Multiply the rate by K where K workers' gradients are averaged (bsp, averaging): a sample then counts for as
    much as where they are added up (ssp, downpour). Linear scaling, Goyal et al. 2017."""
    optimizer: str | None = None
    """sgd, momentum, adagrad, adam, adamw or rmsprop, with parameters as in momentum:momentum=0.9; the job's if left
    out. sgd is without momentum unless it gives one; other parameters are the job's where they are not given."""
    steps: Changes[Count | None] = None
    """Mini-batches per worker. A run ends at the first of steps, epochs and seconds; with none, at the job's steps."""
    epochs: Changes[Seconds | None] = None
    """Passes over the training data, all workers together."""
    seconds: Changes[Seconds | None] = None
    """Seconds, virtual or real as the run is."""
    seed: Seed | None = None
    """Decides initial values, data order and, in virtual time, everything else; 0 if left out."""
    data: Changes[Path | None] = None
    """Folder of data sets; else DURE_DATA, else the user's cache."""
    split: str | None = None
    """How samples go to workers: iid, whole, striped, dirichlet:alpha=0.1; the job's if left out."""
    dtype: Literal["float32", "float64"] | None = None
    """Type of parameters and data; float32 if left out."""
    eval_every: Count | None = None
    """Steps per worker between evaluations; a twentieth of the run if left out."""
    eval_samples: Count | None = None
    """Samples of an evaluation, a fixed random choice. If left out: all test samples; where the job has no test set,
    1,000 of its training set."""


@dataclass(frozen=True, kw_only=True)
class Options(RunOptions, TrainingOptions):
    """Options that `train` and `compare` share."""

    exact: bool = False
    """Evaluate gradients one at a time on one thread (virtual time)."""
    timing_only: bool = False
    """Compute the seconds of the run alone, without tensors (virtual time)."""

    @property
    def elastic(self) -> WorkerRange | None:
        """The numbers of workers that an elastic run may have; None for a fixed number."""
        return self.workers if isinstance(self.workers, WorkerRange) else None

    @property
    def most_workers(self) -> int | None:
        """The number of workers, in an elastic run the largest; None if it is left out."""
        return self.workers.most if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def seeded(self) -> int:
        """`seed`, or 0 if it is left out."""
        return self.seed or 0

    def optimizer_over(self, base: OptimizerSpec, averaged: int = 1) -> OptimizerSpec:
        """The optimizer of the run: that of the job, changed by `optimizer`, `lr` and `scale_lr`.

        If the rule differs from the job's, some rules have a default rate: 0.01 for Adagrad, 0.001 for Adam, AdamW and
        RMSProp. sgd has the momentum of its text only. Other parameters that the text leaves out are the job's. With
        `scale_lr` the rate is multiplied by `averaged`, the number of workers whose mean an update is.
        """
        from dure.job.optimizer import optimizer_member  # it imports torch

        asked = optimizer_member(self.optimizer) if self.optimizer else MemberSpec(base.name, {})
        changes: dict[str, Any] = {"name": asked.name}
        if asked.name != base.name and asked.name in _RATES:
            changes["lr"] = _RATES[asked.name]
        if self.optimizer and asked.name == "sgd":
            changes |= {"momentum": 0.0, "nesterov": False}
        changes |= typed(asked, type(base))
        if self.lr is not None:
            changes["lr"] = self.lr
        chosen = replace(base, **changes)
        return replace(chosen, lr=chosen.lr * averaged) if self.scale_lr else chosen


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """One run of one job under one strategy."""

    strategy: str = ""
    """A whole strategy in one text, as in "ssp:bound=3 ps:shards=2"; the four options below override its parts."""
    sync: str | None = None
    """When replicas agree (`dure methods`); bsp if left out."""
    topology: str | None = None
    """Which nodes communicate; the method's first choice if left out."""
    codec: str | None = None
    """How a message is encoded; fp32 if left out."""
    partition: str | None = None
    """How the model is split; none if left out."""
    on: str = ""
    """local, torchrun, ray (a Ray of this run's own), ray:HOST:PORT or ray:auto (a running Ray), virtual (a uniform
    cluster in virtual time), a cluster file, or machines as "4x8 v100-sxm2-16gb @ 100 Gbit/s" (4 with 8 GPUs each):
    virtual as well. local if left out."""
    key_file: Changes[Path | None] = None
    """Under torchrun: file with the run's key, at least 32 random bytes, of mode 0600, the same at every rank. If left
    out, rank 0 draws a key and hands it out through torchrun's store."""
    integrity: Changes[Literal["mac", "checksum"]] = "mac"
    """How tensors between machines are protected: by an authentication code under the run's key (mac), or by a checksum
    alone, for private networks. Headers always have an authentication code."""
    resume: Path | None = None
    """Folder of a run to continue from its last complete checkpoint. Its options hold; steps, epochs, seconds, device
    and some others may change, with bsp over collectives the partition and the workers too (docs/how-to/resume.md)."""
    trust: bool = False
    """Run the code that the resumed run names as FILE.py:NAME also where the file has changed since the run began, lies
    elsewhere, or lies in the run's folder."""

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.seed is None and self.resume is None:  # a run that is resumed has its seed
            object.__setattr__(self, "seed", 0)
        if not self.on:
            if self.resume is not None:
                return  # a run that is resumed has its place
            object.__setattr__(self, "on", DEFAULT)
        check_address(self.on)
        if self.key_file is not None and not is_started_outside(self.on):
            raise UsageError(
                f"key_file={str(self.key_file)!r} is for ranks that torchrun starts. A run on this machine draws a "
                "key, and a virtual one needs none: leave it out."
            )
        if takes_address(self.on):
            check_device(self.on, self.device)
            reservations(self.reserve, self.device)
        described = not self.virtual or self.on == "virtual" or machines_in_line(self.on) is not None
        if not described and not is_regular(Path(self.on)):
            raise UsageError(
                f'"{self.on}" is no place and no file: write {", ".join(PLACES)}, the path of a cluster file, or '
                f'machines as "4x8 v100-sxm2-16gb @ 100 Gbit/s".{nearest(self.on, PLACES)}'
            )

    def plain(self) -> dict[str, Any]:
        """The options as in `Options.plain`, without `trust`, which is given anew for each resumption."""
        return {name: value for name, value in Options.plain(self).items() if name != "trust"}

    @property
    def virtual(self) -> bool:
        """Whether the run is in virtual time."""
        return not is_real(self.on)

    def for_workers(self, workers: int) -> TrainConfig:
        """Set `workers` to the number of started ranks. Raises `UsageError` if another number was asked for."""
        if self.workers not in (None, workers):
            raise UsageError(
                f"workers={self.workers} was asked for, and torchrun has started {workers} ranks, each of them one. "
                "Leave "
                f"workers out, or start torchrun with {self.workers} ranks."
            )
        return replace(self, workers=workers)

    def members(self) -> dict[str, str]:
        """The texts of the members that are named, by axis. Raises `StrategyError`."""
        asked = {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) is not None}
        return by_axis(self.strategy) | asked

    def chosen(self, objects: Mapping[str, Any] = MappingProxyType({})) -> Strategy:
        """Make the strategy; `objects`, by axis, replace texts. Raises `StrategyError`."""
        return Strategy.of(**{**self.members(), **objects})


@dataclass(frozen=True, kw_only=True)
class ComparedTarget(Checked):
    """The accuracy or the loss whose time a report compares."""

    target: Accuracy | None = None
    """Test accuracy whose time is compared; 0.95 if left out."""
    target_loss: Finite | None = None
    """Loss whose time is compared, in place of an accuracy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.goal

    @property
    def goal(self) -> Target:
        """The target. Raises `UsageError` if both are given."""
        return goal(self.target, self.target_loss)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(ComparedTarget, Options):
    """One job under several strategies, in one or more places."""

    strategies: Annotated[Repeated[Texts], FlagName("strategy")] = ()
    """A whole strategy in one text, as in "ssp:bound=3 ps:shards=2". Repeat it. If left out: bsp, averaging:period=8,
    ssp:bound=3 and downpour."""
    on: Repeated[Texts] = ()
    """local, ray, ray:HOST:PORT, virtual, or a cluster file. Repeat it to compare places. local if left out."""
    report: Path | None = None
    """File of the report. If left out: report.html, or the first of report-2.html, report-3.html, ... that is free."""

    def runs(self) -> Iterator[TrainConfig]:
        """One configuration per place and strategy, each with a numbered folder of its own under `out`."""
        if any(map(is_started_outside, self.on)):
            raise UsageError(
                "compare starts the processes of its runs itself, and on=torchrun leaves that to torchrun. Run "
                "torchrun --nproc-per-node N -m dure train --on torchrun --out DIR once per strategy, then dure report "
                "DIR DIR ..."
            )
        shared = {option.name: getattr(self, option.name) for option in fields(Options)}
        choices = [(on, text) for on in self.on or (DEFAULT,) for text in self.strategies or FEW]
        for number, (on, text) in enumerate(choices, start=1):
            folder = re.sub(r"[^A-Za-z0-9._=-]+", "-", f"{number:02d} {Path(on).stem} {text}")
            out = None if self.out is None else self.out / folder
            yield TrainConfig(**{**shared, "out": out}, strategy=text, on=on)


def goal(target: float | None, target_loss: float | None) -> Target:
    """The accuracy or the loss whose time is compared. Raises `UsageError` if both are given."""
    if target is not None and target_loss is not None:
        raise UsageError(f"target={target:g} and target_loss={target_loss:g} are two targets. Give one of them.")
    return Target(0.95 if target is None else target) if target_loss is None else Target(target_loss, "loss")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path | WorkerRange) else value
