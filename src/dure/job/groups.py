"""Parameter groups of a job: hyper-parameters that differ between parameters, as segments of the flat parameters.

`Job.groups(name, parameter)` returns the hyper-parameters that differ for a parameter, for example
`{"weight_decay": 0.0}` for biases. Parameters with equal differences form a group. Groups are numbered from 1; group 0
holds the parameters without differences. A step with a schedule has one rate per group, in the order of the numbers
(`FlatOptimizer.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import nn

from dure.core.spec_text import names, nearest
from dure.core.user_code import explain_user_errors
from dure.errors import StrategyError, UsageError
from dure.job.optimizer import OF_GROUPS, GroupRange, OptimizerSpec
from dure.job.replica import Layer
from dure.job.schedule import Schedule, factor_at

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
