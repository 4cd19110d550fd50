"""Durations of computations in virtual time: distributions, and streams of draws from them.

A step takes

    (overhead + flops / flops_per_second) * factor / speed        or, with `seconds` given,
    (call + (seconds - call) * flops / reference) * factor / speed

`reference` is the key `flops`. `factor` is drawn for each step and has mean one. `speed` is constant for each worker.

    distribution         factor                                            parameters
    constant             1
    shifted-exponential  shift + (1 - shift) * exponential of mean 1       shift, from 0 up to 1
    lognormal            exp(sigma * normal - sigma^2 / 2)                 sigma
    pareto               (tail - 1) / tail * Pareto(tail), at least that   tail, above 1; finite variance above 2
    trace                the recorded durations, in their order            durations, or file
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from dure.core import units
from dure.core.regular_file import read_regular
from dure.core.text import quoted
from dure.core.units import Flops, PositiveSeconds, Seconds
from dure.core.validated import FieldError, Validated

Factors = NDArray[np.float64]


def _of_moderate_size(value: float) -> float:
    """Return `value`. Raises `ValueError` for one with which durations would not be finite or above zero."""
    if not 1e-9 <= value <= 1e9:
        raise ValueError(f"{value:g} must be from 1e-09 to 1e+09")
    return value


Factor = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(_of_moderate_size)]
Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]

_BLOCK = 64  # draws at a time; small, since every worker keeps a block
_ONES = (1.0,) * _BLOCK


class _Compute(Validated):
    """Common part of all distributions: the mean of a step, given by `seconds` or by the operations of the work."""

    seconds: PositiveSeconds | None = None
    """Mean duration of a step of `flops` operations. Without it, operations set the duration."""
    flops: Positive | None = None
    """Operations of the step that takes `seconds`. Default: those of the job's own mini-batch, also where
    `--batch-size` changes it.
    """
    flops_per_second: Flops = 20e9
    """Effective speed of a machine of speed 1, if `seconds` is left out."""
    overhead: Seconds = 0.2e-3
    """Part of a step that does not depend on its work, if `seconds` is left out."""
    call: Seconds | None = None
    """Part of a step that a call of the model takes, whatever the number of samples; a pipeline pays it for each
    micro-batch. Default: `overhead`; with `seconds`, 0.
    """

    @property
    def assumes_speed(self) -> bool:
        """Whether the duration of a step follows from the default speed."""
        return self.seconds is None and self.flops_per_second == type(self).model_fields["flops_per_second"].default

    @model_validator(mode="after")
    def _operations_of_seconds(self) -> Self:
        if self.flops is not None and self.seconds is None:
            raise FieldError(
                ("flops",), "it has the operations of the step of `seconds`: state seconds, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _call_within_step(self) -> Self:
        limit = self.overhead if self.seconds is None else self.seconds
        if self.call is not None and self.call > limit:
            whole = "overhead" if self.seconds is None else "seconds"
            problem = (
                f"{units.as_seconds(self.call)} is a part of `{whole}`, {units.as_seconds(limit)}: write at most that"
            )
            raise FieldError(("call",), problem)
        return self

    @property
    def of_call(self) -> float:
        """Seconds of a call of the model, whatever the number of samples: a pipeline pays them for each micro-batch."""
        if self.call is not None:
            return self.call
        return self.overhead if self.seconds is None else 0.0

    def mean(self, flops: float) -> float:
        """Mean seconds of a step of `flops` operations on a machine of speed 1."""
        if self.seconds is None:
            return self.overhead + flops / self.flops_per_second
        if self.flops is None:
            return self.seconds
        return self.of_call + (self.seconds - self.of_call) * (flops / self.flops)

    def referred(self, flops: float) -> Self:
        """These durations, whose `seconds` are those of a step of `flops` operations where the file does not say."""
        return self if self.seconds is None or self.flops is not None else self.changed(flops=flops)

    def blocks(self, rng: np.random.Generator) -> Iterator[Sequence[float]]:
        """Endless blocks of factors drawn from `rng`."""
        while True:
            yield self.factors(rng, _BLOCK).tolist()

    @abstractmethod
    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        """Draw `count` independent factors of mean one."""

    def draw(self, rng: np.random.Generator, flops: float = 0.0) -> float:
        """Draw the seconds of a single step; `Durations` gives a stream."""
        return self.mean(flops) * float(self.factors(rng, 1)[0])


class Constant(_Compute):
    """Distribution in which every step takes the mean."""

    distribution: Literal["constant"] = "constant"
    """Each step takes the mean."""

    def blocks(self, rng: np.random.Generator) -> Iterator[Sequence[float]]:
        return repeat(_ONES)

    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        return np.ones(count)


class ShiftedExponential(_Compute):
    """A constant part, `shift` of the mean, plus an exponential part."""

    distribution: Literal["shifted-exponential"] = "shifted-exponential"
    """A constant part, and an exponential part."""
    shift: float = Field(default=0.5, ge=0, lt=1)
    """The constant part, as a share of the mean."""

    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        return self.shift + (1.0 - self.shift) * rng.standard_exponential(count)


class LogNormal(_Compute):
    """Log-normal durations."""

    distribution: Literal["lognormal"] = "lognormal"
    """Log-normal durations."""
    sigma: float = Field(default=0.3, ge=0, le=10, allow_inf_nan=False)
    """Standard deviation of the logarithm of a duration."""

    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        return np.exp(self.sigma * rng.standard_normal(count) - 0.5 * self.sigma**2)


class Pareto(_Compute):
    """Heavy-tailed durations."""

    distribution: Literal["pareto"] = "pareto"
    """A heavy tail: P(duration > t) falls as t^-tail."""
    tail: float = Field(default=2.5, gt=1, allow_inf_nan=False)
    """Exponent of the tail. The variance is finite above 2."""

    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        return (self.tail - 1.0) / self.tail * (1.0 + rng.pareto(self.tail, count))


class Trace(_Compute):
    """Recorded durations of steps, replayed in order and repeated."""

    distribution: Literal["trace"] = "trace"
    """Recorded durations, replayed in order and repeated. The operations of the work do not matter."""
    durations: tuple[PositiveSeconds, ...] = Field(min_length=1)
    """Recorded durations of steps, a list. In its place, `file` names a file with one duration on each line (`#` begins
    a comment).
    """
    start: Literal["random", "first"] = "random"
    """Where the replay starts: at a random place for each worker, or at the first duration for all."""

    @model_validator(mode="before")
    @classmethod
    def _from_file(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "file" not in values:
            return values
        if "durations" in values:
            raise ValueError("has both 'durations' and 'file': write one of them")
        rest = {key: value for key, value in values.items() if key != "file"}
        return rest | {"durations": _read_durations(Path(values["file"]))}

    @field_validator("seconds")
    @classmethod
    def _no_mean(cls, given: float | None) -> float | None:
        if given is not None:
            raise ValueError(f"{given!r} makes no sense beside a trace, which has its own durations: leave it out")
        return given

    def mean(self, flops: float) -> float:
        return float(np.mean(self.durations))

    def blocks(self, rng: np.random.Generator) -> Iterator[Sequence[float]]:
        block = np.asarray(self.durations) / self.mean(0.0)
        if self.start == "random":
            block = np.roll(block, -int(rng.integers(len(block))))
        return repeat(block.tolist())

    def factors(self, rng: np.random.Generator, count: int) -> Factors:
        return rng.choice(np.asarray(self.durations), count) / self.mean(0.0)


def _read_durations(path: Path) -> list[float]:
    """Read the durations of a trace file, in seconds."""
    try:
        lines = read_regular(path).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"the trace file {quoted(str(path))} cannot be read ({reason}): give one duration per line"
        ) from None
    return [units.seconds(text) for line in lines if (text := line.partition("#")[0].strip())]


def _tag(value: Any) -> Any:
    """Name of the distribution; `constant` if none is given. Of another value its text, which names none."""
    if isinstance(value, dict):
        return value.get("distribution", "constant")
    return getattr(value, "distribution", str(value))


Compute = Annotated[
    Annotated[Constant, Tag("constant")]
    | Annotated[ShiftedExponential, Tag("shifted-exponential")]
    | Annotated[LogNormal, Tag("lognormal")]
    | Annotated[Pareto, Tag("pareto")]
    | Annotated[Trace, Tag("trace")],
    Discriminator(_tag),
]


class LogNormalSpeeds(Validated):
    """Log-normal speeds of machines, with median 1."""

    distribution: Literal["lognormal"]
    """Log-normal speeds, with median 1."""
    sigma: float = Field(default=0.2, ge=0, le=10, allow_inf_nan=False)
    """Standard deviation of the logarithm of a speed."""

    def speed(self, rng: np.random.Generator) -> float:
        return float(np.exp(self.sigma * rng.standard_normal()))


class UniformSpeeds(Validated):
    """Speeds of machines, uniform from `low` to `high`."""

    distribution: Literal["uniform"]
    """Speeds from `low` to `high`, all equally likely."""
    low: Factor = 0.5
    """Lowest speed."""
    high: Factor = 1.0
    """Highest speed."""

    @model_validator(mode="after")
    def _in_order(self) -> UniformSpeeds:
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}: write the smaller one as low")
        return self

    def speed(self, rng: np.random.Generator) -> float:
        return float(rng.uniform(self.low, self.high))


def _speed_tag(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return "number"
    return "list" if isinstance(value, (list, tuple)) else _tag(value)


Speed = Annotated[
    Annotated[Factor, Tag("number")]
    | Annotated[tuple[Factor, ...], Tag("list")]
    | Annotated[LogNormalSpeeds, Tag("lognormal")]
    | Annotated[UniformSpeeds, Tag("uniform")],
    Discriminator(_speed_tag),
]


class Durations:
    """Stream of the durations of one worker's steps: the same for the same (compute, speed, seed).

    Factors are drawn ahead in blocks, without effect on the stream. `drawn` counts the durations given: a resumed run
    makes the same stream again and calls `skip(drawn)`.
    """

    __slots__ = ("_blocks", "_factors", "_flops", "_mean", "compute", "drawn", "speed")

    def __init__(self, compute: Compute, speed: float, rng: np.random.Generator) -> None:
        self.compute = compute
        self.speed = speed
        self.drawn = 0
        self._blocks = compute.blocks(rng)
        self._factors: Iterator[float] = iter(())
        self._flops = self._mean = math.nan  # operations of the last step, and the mean of their time

    def draw(self, flops: float = 0.0) -> float:
        """Draw the seconds of the next step, which makes `flops` floating-point operations."""
        self.drawn += 1
        if flops != self._flops:
            self._flops, self._mean = flops, self.compute.mean(flops)
        return self._mean * self._next() / self.speed

    def draw_about(self, seconds: float) -> float:
        """Draw the seconds of other work, which takes `seconds` on a machine of speed 1 in the mean."""
        self.drawn += 1
        return seconds * self._next() / self.speed

    def skip(self, count: int) -> None:
        """Skip `count` draws."""
        for _ in range(count):
            self._next()
        self.drawn += count

    def _next(self) -> float:
        factor = next(self._factors, None)
        if factor is None:
            self._factors = iter(next(self._blocks))
            factor = next(self._factors)
        return factor
