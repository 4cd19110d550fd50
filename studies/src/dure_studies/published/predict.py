"""The prediction of a published figure: a timing-only run of its setting in virtual time.

    predicted = samples per second of a worker / those of one worker alone (`one`), or of a worker in another setting

Of two models, a row may compare the operations of these samples per second.

The interval spans what the source leaves open. Each open fact is tried alone. Then those values that make the ratio
smallest are taken together, and those that make it largest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from dure.core.spec_text import parse_member
from dure.errors import UsageError
from dure.job.job import load_job
from dure.partition.blocks import blocks_of
from dure.planner.candidates import Scene
from dure.planner.open_facts import extremes
from dure.planner.timing import timed
from dure.run.step_shape import device_seconds, referred
from dure.runtime.virtual.cluster import Cluster
from dure_studies.published.constants import Values, fitted_from

if TYPE_CHECKING:
    from dure.job.job import Job
    from dure_studies.published.rows import Figure, PublishedRow, Source

JOB, STRATEGY = "job.", "strategy."


@dataclass(frozen=True)
class Prediction:
    """A predicted ratio with its interval. `decides` is the open fact that alone changes it most; empty if none is."""

    predicted: float
    low: float
    high: float
    decides: str
    fitted_from: tuple[str, ...]


def predict(source: Source, row: PublishedRow, figure: Figure) -> Prediction:
    """The prediction of a figure. Raises `UsageError` for a setting that cannot be timed."""
    facts = next((each for each in (figure.open, row.open) if each is not None), source.open)

    def having(values: Values) -> float:
        return ratio(source, row, figure, values)

    assumed = having({})
    tried = {name: [(having({fact.at: value}), value) for value in fact.values] for name, fact in facts.items()}
    lowest, highest, changes = extremes(assumed, tried)
    ends = [{facts[name].at: value for name, value in end.items()} for end in (lowest, highest)]
    found = [assumed, *(having(values) for values in ends if values)]
    decides = max(changes, key=lambda name: changes[name]) if changes and max(changes.values()) > 0 else ""
    return Prediction(assumed, min(found), max(found), decides, fitted_from(cluster_in(source, row, figure)))


def ratio(source: Source, row: PublishedRow, figure: Figure, values: Values, *, by_parameters: bool = False) -> float:
    """The ratio of a figure, with other `values` in the cluster or the job.

    `by_parameters`: blocks take seconds by the number of their parameters, not by operations and bytes.
    """
    described = _described(source, row)

    def rate(at: Mapping[str, Any], one: float | None, job: str, strategy: str, values: Values) -> float:
        return _rate(at, one, job, strategy, values, by_parameters)

    own, than = row.set | figure.set | values, figure.compared(row)
    if than is None:
        return rate(described, figure.one, figure.job, figure.strategy, own) / (figure.one or 1.0)
    one, job, strategy = than.one or figure.one, than.job or figure.job, than.strategy or figure.strategy
    at = described if than.cluster is None else than.cluster
    shared = row.set | than.set | _shared(values, figure) if than.cluster is None else dict(than.set)
    other = rate(at, one, job, strategy, shared)
    counts_samples = row.counted == "samples"
    if counts_samples and figure.one is not None:  # each setting relative to its own worker alone
        found = rate(described, figure.one, figure.job, figure.strategy, own) / figure.one
        return found / (other / (one or figure.one))
    alone = figure.one or (None if one is None else _in_proportion(figure.job, job, one, described))
    found = rate(described, alone, figure.job, figure.strategy, own) / other
    return found if counts_samples else found * _operations(figure.job) / _operations(job)


def _in_proportion(job: str, known: str, one: float, described: Mapping[str, Any]) -> float:
    """The rate of `job` on one worker, whose rate of a `known` job is `one`, in proportion to those of its device."""
    name = Cluster(**described).machines[0].gpu
    if name is None:
        raise UsageError("`than` has a rate `one` of another job, and the cluster names no gpu: name it.")
    rate, other = (_job(text).batch_size / device_seconds(_job(text), name) for text in (job, known))
    return one * rate / other


def _operations(job: str) -> float:
    """The operations of a sample."""
    return _job(job).flops_per_sample


def cluster_in(source: Source, row: PublishedRow, figure: Figure) -> Cluster:
    """The cluster of a figure, as its source has it."""
    return cluster_of(_described(source, row), row.set | figure.set, figure.job, figure.one)


def _shared(values: Values, figure: Figure) -> Values:
    """Values of open facts that the other setting has, too: not those in which the two differ."""
    return {at: value for at, value in values.items() if at not in figure.set}


def _rate(
    described: Mapping[str, Any], one: float | None, job: str, strategy: str, values: Values, by_parameters: bool
) -> float:
    """Samples per second of a worker."""
    text = with_parameters(job, _under(JOB, values))
    strategy = " ".join(with_own(member, _under(STRATEGY, values)) for member in strategy.split())
    rest = {at: value for at, value in values.items() if not at.startswith((JOB, STRATEGY))}
    return rate_of(json.dumps(_with_values(described, rest, text, one)), text, strategy, by_parameters)


@cache
def rate_of(described: str, job: str, strategy: str, by_parameters: bool) -> float:
    """Samples per second of a worker in a cluster, which is described in JSON."""
    cluster, known = Cluster(**json.loads(described)), _scene(job, by_parameters)
    batch = known.job.batch_size * cluster.workers
    scene = Scene(known.job, referred(cluster, known.job), batch)
    scene.__dict__["model"] = known.model  # sizes and shapes of steps, for all clusters
    return batch / timed(scene, strategy).seconds / cluster.workers


def with_parameters(job: str, changed: Mapping[str, Any]) -> str:
    """The text of a job with other parameters.

    >>> with_parameters("resnet50:batch=64", {"precision": "fp16"})
    'resnet50:batch=64,precision=fp16'
    """
    name, own = parse_member(job)
    parameters = ",".join(f"{key}={value}" for key, value in ({**own} | {**changed}).items())
    return f"{name}:{parameters}" if parameters else name


def with_own(member: str, changed: Mapping[str, Any]) -> str:
    """The text of a member of a strategy with other values of those parameters that it has.

    >>> with_own("gpipe:stages=2,micro=4", {"micro": 8, "ways": 2}), with_own("bsp", {"micro": 8})
    ('gpipe:stages=2,micro=8', 'bsp')
    """
    own = parse_member(member)[1]
    return with_parameters(member, {key: value for key, value in changed.items() if key in own})


def _under(prefix: str, values: Values) -> Values:
    """The values at places that begin so, by the rest of their names."""
    return {at.removeprefix(prefix): each for at, each in values.items() if at.startswith(prefix)}


@cache
def _job(text: str) -> Job:
    return load_job(text)


@cache
def _scene(text: str, by_parameters: bool) -> Scene:
    job = _job(text)
    return Scene(_by_parameters(job) if by_parameters else job, Cluster.uniform(1), 1)


def _by_parameters(job: Job) -> Job:
    """`job` that states seconds of its blocks by the number of their parameters: backward is twice forward."""
    blocks = blocks_of(job, job.build(0))
    counts = [float(sum(each.numel() for each in block.parameters())) for block in blocks]
    return replace(job, block_seconds=[(count, 2 * count) for count in counts])


def _described(source: Source, row: PublishedRow) -> Mapping[str, Any]:
    return source.cluster if row.cluster is None else row.cluster


def cluster_of(described: Mapping[str, Any], values: Values, job: str, one: float | None) -> Cluster:
    """The cluster `described` with other `values`, whose worker alone makes `one` samples of `job` in a second.

    If that is None, seconds are those of the device that the cluster names.
    """
    return Cluster(**_with_values(described, values, job, one))


def _with_values(described: Mapping[str, Any], values: Values, job: str, one: float | None) -> dict[str, Any]:
    found = deepcopy(dict(described))
    for at, value in values.items():
        _put(found, at, deepcopy(value))
    if one is not None:
        seconds = _job(job).batch_size / one
        for kind in found.get("machines", []):
            kind["compute"] = {**kind.get("compute", {}), "seconds": seconds}
    return found


def _put(described: dict[str, Any], at: str, value: Any) -> None:
    """Put a value at a place; of a list the first element is meant."""
    *path, last = at.split(".")
    place: Any = described
    for key in path:
        place = place.setdefault(key, {})
        place = place[0] if isinstance(place, list) else place
        if not isinstance(place, dict):
            raise UsageError(f"{at}: {key} is no mapping in the cluster: write a place such as machines.card.share.")
    place[last] = value
