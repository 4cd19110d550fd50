"""The rates of a step: learning-rate schedules, and the parameter groups of a job.

A schedule is a factor for every learning rate, as a function of the step:

    | text                                        | factor at step t = 0, 1, ...                                      |
    |---------------------------------------------|-------------------------------------------------------------------|
    | `cosine:steps=1000,warmup=100,floor=0.1`    | floor + (1 - floor) (1 + cos(pi p)) / 2                           |
    | `linear:steps=1000,warmup=100,floor=0.1`    | 1 - (1 - floor) p                                                 |
    | `step:every=100,factor=0.1`                 | factor^floor(t / every), as `torch.optim.lr_scheduler.StepLR`     |

p = (t - warmup) / (steps - warmup), at most 1. While t < warmup the factor of `cosine` and `linear` is
(t + 1) / warmup. Any other function of the step is a schedule too, such as one that `torch.optim.lr_scheduler.LambdaLR`
takes. A schedule has no state, so a resumed run continues it.

Cosine: Loshchilov & Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", ICLR 2017, without restarts.

A parameter group is a set of segments of the flat parameters with hyper-parameters of its own.
`Job.groups(name, parameter)` returns the hyper-parameters that differ for a parameter, for example
`{"weight_decay": 0.0}` for biases. Parameters with equal differences form a group. Groups are numbered from 1; group 0
holds the parameters without differences. A step with a schedule has one rate per group, in the order of the numbers
(`FlatOptimizer.apply`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from dure.core.spec_text import names, nearest, parameters, parse_members, typed
from dure.core.user_code import explain_user_errors
from dure.errors import StrategyError, UsageError
from dure.job.optimizer import OF_GROUPS, GroupRange, OptimizerSpec
from dure.job.replica import Layer

# ---- schedules

Schedule = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine from 1 to `floor`, after a linear warm-up."""

    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_decay("cosine", self.steps, self.warmup, self.floor)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        share = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True, slots=True)
class Linear:
    """A line from 1 to `floor`, after a linear warm-up."""

    steps: int
    warmup: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _check_decay("linear", self.steps, self.warmup, self.floor)

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        return 1 - (1 - self.floor) * min(1.0, (step - self.warmup) / (self.steps - self.warmup))


@dataclass(frozen=True, slots=True)
class Step:
    """Multiply by `factor` after each `every` steps."""

    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        if self.every < 1 or not 0 <= self.factor < math.inf:
            raise UsageError(
                f"step needs every >= 1 and a finite factor >= 0, got every={self.every}, factor={self.factor}. "
                "Use step:every=100,factor=0.1."
            )

    def __call__(self, step: int) -> float:
        return float(self.factor ** (step // self.every))


SCHEDULES: Mapping[str, type[Cosine] | type[Linear] | type[Step]] = {"cosine": Cosine, "linear": Linear, "step": Step}


def schedule_of(given: Any) -> Schedule | None:
    """The schedule that a function or a text specifies; None for None.

    >>> schedule_of("step:every=10")
    Step(every=10, factor=0.1)

    Raises `UsageError` that suggests the nearest valid text.
    """
    if isinstance(given, str):
        return _parse(given)
    of_torch = isinstance(given, type) or hasattr(given, "optimizer")
    if given is None or (callable(given) and not of_torch):
        return given  # type: ignore[no-any-return]
    kind = given if isinstance(given, type) else type(given)
    raise UsageError(
        f"Job.schedule must be a function of the step or a text such as {_TEXT}, got {kind.__name__}. A "
        "scheduler of torch.optim belongs to one optimizer in one process: give the function that LambdaLR takes."
    )


def factor_at(schedule: Schedule, step: int) -> float:
    """The factor of `schedule` at `step`. Raises `UsageError` for anything but a finite number >= 0."""
    with explain_user_errors(f"Job.schedule raised at step {step}:"):
        factor: Any = schedule(step)
    try:
        number = float(factor)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(f"Job.schedule must return a finite factor >= 0 of the rate; at step {step} it is {factor!r}.")
    return number


_TEXT = '"cosine:steps=1000,warmup=100"'


def _parse(text: str) -> Schedule:
    call, *more = parse_members(text.strip())
    if call.name not in SCHEDULES or more:
        known = names(SCHEDULES)
        raise UsageError(
            f'no schedule is called "{text}": there are {known}, and any function of the step.'
            f"{nearest(call.name, SCHEDULES)}"
        )
    kind = SCHEDULES[call.name]
    given = typed(call, kind)
    missing = [each.name for each in parameters(kind) if each.field not in given and each.field in ("steps", "every")]
    if missing:
        raise UsageError(f"{call.name} needs {missing[0]}: write {call.name}:{missing[0]}=1000.")
    return kind(**given)


def _check_decay(name: str, steps: int, warmup: int, floor: float) -> None:
    if not 0 <= warmup < steps:
        raise UsageError(f"{name} needs steps above warmup, both whole numbers >= 0, got {steps=}, {warmup=}.")
    if not 0 <= floor <= 1:
        raise UsageError(f"{name}: floor is a share of the rate, from 0 to 1, got {floor}.")


# ---- parameter groups

Groups = Callable[[str, nn.Parameter], Mapping[str, Any] | None]


@dataclass(frozen=True)
class Rates:
    """The optimizer `spec` of a job with its groups and schedule; `differences[g - 1]` are the overrides of group g."""

    spec: OptimizerSpec
    segments: Sequence[GroupRange] = ()
    differences: Sequence[Mapping[str, Any]] = ()
    schedule: Schedule | None = None

    def __bool__(self) -> bool:
        """Whether the job has a group or a schedule."""
        return bool(self.segments) or self.schedule is not None

    def at(self, step: int) -> float | list[float]:
        """The rate at `step`; if the job has groups, one rate per group."""
        factor = 1.0 if self.schedule is None else factor_at(self.schedule, step)
        rates = [rate * factor for rate in self._rates]
        return rates if self.segments else rates[0]

    @cached_property
    def _rates(self) -> list[float]:
        return [self.spec.lr, *(each.get("lr", self.spec.lr) for each in self.differences)]

    def seen_by(self, rule: Callable[[OptimizerSpec], OptimizerSpec]) -> list[GroupRange]:
        """The segments for servers, which use the optimizer `rule(spec)` in place of a worker's `spec`."""
        found = []
        for segment in self.segments:
            own = rule(replace(self.spec, **segment.overrides))
            found.append(segment._replace(overrides={name: getattr(own, name) for name in OF_GROUPS}))
        return found


def rates_of(
    spec: OptimizerSpec,
    groups: Groups | None,
    schedule: Schedule | None,
    layers: Sequence[Layer],
    parameters: Sequence[nn.Parameter],
) -> Rates:
    """The rates of a job whose flat parameters have `layers`. Raises `UsageError` for an invalid group."""
    if groups is None:
        return Rates(spec, schedule=schedule)
    differences: list[Mapping[str, Any]] = [{}]
    segments: list[GroupRange] = []
    for layer, parameter in zip(layers, parameters, strict=True):
        own = _difference(spec, groups, layer.name, parameter)
        if own not in differences:
            differences.append(own)
        number = differences.index(own)
        if segments and segments[-1].group == number and segments[-1].stop == layer.start:
            segments[-1] = segments[-1]._replace(stop=layer.stop)
        elif number:
            segments.append(GroupRange(layer.start, layer.stop, own, number))
    return Rates(spec, segments, differences[1:], schedule)


def scaled(groups: Groups, factor: float) -> Groups:
    """`groups` with every learning rate in it multiplied by `factor`."""

    def times(name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
        own = dict(groups(name, parameter) or {})
        return {**own, "lr": own["lr"] * factor} if "lr" in own else own

    return times


def _difference(spec: OptimizerSpec, groups: Groups, name: str, parameter: nn.Parameter) -> Mapping[str, Any]:
    with explain_user_errors(f"its groups({name!r}, parameter) raised"):
        found: Any = groups(name, parameter)
    own = {} if found is None else found
    if not isinstance(own, Mapping):
        raise UsageError(
            f"Job.groups must return a mapping of what differs for a parameter, and gave {own!r} for {name}. "
            'Write {"weight_decay": 0.0}, or {} for nothing.'
        )
    for key in own:
        if key not in OF_GROUPS:
            raise UsageError(
                f"Job.groups sets {key!r} for {name}, which is no hyper-parameter of an optimizer: there are "
                f"{names(OF_GROUPS)}.{nearest(str(key), OF_GROUPS)}"
            )
    try:
        replace(spec, **own)
    except (StrategyError, TypeError) as error:
        raise UsageError(f"Job.groups gives {name} invalid hyper-parameters: {error}") from error
    return dict(own)
