"""A method with remedies for stale gradients joined to it: `downpour+dc-asgd:lambda=0.04`, in text or in Python.

    dure.Downpour() + dure.DCASGD(lambda_=0.04) + dure.StalenessLR()

A remedy is a frozen dataclass beside the methods. It acts at the shards, in one of two places, and costs no message:

    update of worker m, computed on version b
      -> Correction.correct      its gradient, given how stale it is and what m had read; in the order of joining
      -> mean or sum of a group
      -> Retuning.retuned        the servers' optimizer, whose hyper-parameters suit so many independent workers
      -> the next version

A remedy joins a method whose servers apply gradients computed on older versions (`stale_gradients = True`); any other
is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from dure.core.catalogue import combines, name_of
from dure.errors import StrategyError
from dure.sync.base import ServerRule, Traits, server_rule_of, traits_of
from dure.topology.correction import Correction

if TYPE_CHECKING:
    from dure.job.optimizer import OptimizerSpec

STALE = ("downpour", "ssp", "k-async", "k-batch-async")
"""The methods that remedies join: those with `stale_gradients`."""


@runtime_checkable
class Retuning(Protocol):
    """A remedy that changes the servers' optimizer, where `groups` of workers act independently."""

    def retuned(self, optimizer: OptimizerSpec, groups: float) -> OptimizerSpec: ...


@dataclass(frozen=True, slots=True)
class Corrected:
    """A `method` with `remedies`. Every attribute without a definition here is the method's."""

    method: Any
    remedies: tuple[Correction | Retuning, ...]

    def adapted(self) -> Traits:
        """The method's traits, over servers alone."""
        return replace(traits_of(self.method), needs=("servers",))

    def server_rule(self, optimizer: OptimizerSpec) -> ServerRule:
        """Return the method's rule, without the remedies."""
        return server_rule_of(self.method, optimizer)

    def __getattr__(self, name: str) -> Any:
        # `copy` and `pickle` look names up before `method` is set, which would call this without end.
        if name == "method" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.method, name)


def with_remedy(method: Any, remedy: Correction | Retuning) -> Any:
    """Join one more remedy to `method`. Raises `StrategyError` if no gradient of the method is stale."""
    inner, remedies = parts(method)
    if type(remedy) in map(type, remedies):
        raise StrategyError(f"{_name(remedy)} is joined twice to {_name(inner)}: once is enough.")
    if not traits_of(inner).stale_gradients:
        raise StrategyError(_refusal(inner, remedy))
    return Corrected(inner, (*remedies, remedy))


def parts(method: Any) -> tuple[Any, tuple[Correction | Retuning, ...]]:
    """Split `method` into the method itself and the remedies joined to it."""
    return (method.method, method.remedies) if isinstance(method, Corrected) else (method, ())


def corrections(method: Any) -> tuple[Correction, ...]:
    """Return the remedies that correct each gradient at the shards, in the order of joining."""
    return tuple(remedy for remedy in parts(method)[1] if isinstance(remedy, Correction))


def compares(method: Any) -> bool:
    """Whether the shards must keep the version that each worker has pulled."""
    return any(correction.compares for correction in corrections(method))


def server_optimizer(method: Any, optimizer: OptimizerSpec, workers: int) -> OptimizerSpec:
    """Return the optimizer of the servers, given the job's: the method's choice, changed by each `Retuning`."""
    rule = server_rule_of(method, optimizer)
    chosen = rule.optimizer
    for remedy in parts(method)[1]:
        if isinstance(remedy, Retuning):
            chosen = remedy.retuned(chosen, max(1.0, workers / rule.averaged(workers)))
    return chosen


def _refusal(method: Any, remedy: Correction | Retuning) -> str:
    name = _name(remedy)
    cure = "a parameter server's stale gradients"
    because = "its servers apply no gradient that is older than their model"
    if {"servers", "coordinator"}.isdisjoint(traits_of(method).needs):
        because = "it runs without a parameter server"
    works = combines(type(remedy)) or STALE
    if _name(method) in works:
        return (
            f"{name} remedies {cure}, and {_name(method)} as it is here has none: {because}. Leave its parameters out."
        )
    text = f"{works[0]}+{name}"
    return f'{name} remedies {cure}, and {_name(method)} has none: {because}. It joins {", ".join(works)}, as "{text}".'


def _name(part: Any) -> str:
    from dure.sync import CATALOGUE, REMEDIES

    return name_of(type(part), REMEDIES if isinstance(part, (Correction, Retuning)) else CATALOGUE)
