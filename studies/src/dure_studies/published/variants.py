"""Scored figures without the rows in sight of which constants were chosen, and without parts of the model.

    sources   For each file of rows: constants chosen in sight of its rows take the values that they have without them
              (`constants.CHOSEN`), `spread` is fitted anew on the other files, and the scored figures of the file are
              predicted with all that.
    parts     Each part of the model is left out in turn, and all scored figures are predicted.

`spread` is fitted on a grid, on the scored figures of collectives: the value with most near figures, of these that
with the smallest median error. On all figures that is the value in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.errors import UsageError
from dure.runtime.virtual.accelerators import LIBRARIES
from dure_studies.published.constants import CHOSEN, chosen_from, used_by, without_rows
from dure_studies.published.predict import cluster_in, rate_of, ratio
from dure_studies.published.score import RatioPair, score, scored, with_loss

if TYPE_CHECKING:
    from dure_studies.output import Row
    from dure_studies.published.constants import Values
    from dure_studies.published.rows import Figure, PublishedRow, Source

GRID = (0.01, 0.015, 0.02, 0.025, 0.03)
"""Values of `spread` among which is fitted: its usual range."""


@dataclass(frozen=True)
class ModelVariant:
    """A change of predictions: of clusters with accelerators, of clusters with servers, and of libraries' rules.

    `algorithm`: of the all-reduces of accelerators. `by_parameters`: blocks take seconds by their parameters.
    """

    accelerators: Mapping[str, Any] = field(default_factory=dict)
    servers: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, float] = field(default_factory=dict)
    algorithm: str = ""
    by_parameters: bool = False

    def changes(self, *, accelerated: bool) -> bool:
        """Whether it changes predictions for clusters with accelerators, or for those with servers."""
        if accelerated:
            return bool(self.accelerators or self.rules or self.algorithm or self.by_parameters)
        return bool(self.servers or self.by_parameters)


def of_spread(value: float) -> ModelVariant:
    """The model with another `spread`."""
    return ModelVariant({"engine.spread": value}, {"machines.compute.sigma": value})


PARTS = {
    "nothing": ModelVariant(),
    "spread of ranks": of_spread(0.0),
    "overlap": ModelVariant({"engine.overlap": False}, {"servers.overlap": False, "servers.early_pulls": False}),
    "links inside hosts": ModelVariant(
        {"machines.inside": {"bandwidth": "1000 TB/s"}}, {"inside.bandwidth": "1000 TB/s"}
    ),
    "times of blocks": ModelVariant(by_parameters=True),
    "ring": ModelVariant(algorithm="hierarchical"),
    "share of cards": ModelVariant({"machines.card.share": 1.0}, {"link.bandwidth": "10 Gbit/s"}),
    "software of libraries": ModelVariant(rules={"tensor": 0.0, "cycle": 0.0, "negotiation": 0.0}),
    "software of servers": ModelVariant(servers={"servers.process": None, "servers.variable": 0.0}),
    "starts and hops": ModelVariant(
        {"engine.start": 0.0, "machines.card.hop": 0.0, "machines.inside.latency": 0.0},
        {"link.latency": 0.0, "inside.latency": 0.0},
    ),
    "contention": ModelVariant({"engine.contention": 0.0}),
}
"""By the part that is left out. Hosts without links have two levels no more; the ring becomes two levels, blocks take
seconds by the number of their parameters, and cards have their nominal bandwidth."""


class ScoredFigure(NamedTuple):
    """A figure that is scored, with its row and its file."""

    source: Source
    row: PublishedRow
    figure: Figure

    @property
    def is_accelerated(self) -> bool:
        """Whether its cluster has accelerators, which sum gradients by collectives."""
        return cluster_in(*self).accelerated

    def predicted(self, variant: ModelVariant, without: Iterable[str] = ()) -> float:
        """The prediction of a variant, in which the constants `without` have the values of no rows; 0 if it fails."""
        cluster = cluster_in(*self)
        names = [name for name in used_by(cluster) if name in without]
        values: Values = dict(variant.accelerators if cluster.accelerated else variant.servers)
        rules = dict(variant.rules)
        for name in names:
            values |= without_rows(name, cluster)
            rules |= CHOSEN[name].rules
        figure = self.figure
        if variant.algorithm and cluster.accelerated and figure.strategy == "bsp":
            figure = figure.model_copy(update={"strategy": f"bsp collective:algorithm={variant.algorithm}"})
        with _library_rules(rules):
            try:
                return ratio(self.source, self.row, figure, values, by_parameters=variant.by_parameters)
            except UsageError:
                return 0.0

    def pair(self, predicted: float) -> RatioPair:
        """A prediction beside the measurement."""
        assert self.figure.measured is not None  # figures of class A have one
        return RatioPair(predicted, self.figure.measured)


@contextmanager
def _library_rules(changed: Mapping[str, float]) -> Iterator[None]:
    """All libraries with `changed` rules; rates that were predicted with others are forgotten."""
    if not changed:
        yield
        return
    kept = dict(LIBRARIES)
    LIBRARIES.update({name: rules._replace(**changed) for name, rules in kept.items()})
    rate_of.cache_clear()
    try:
        yield
    finally:
        LIBRARIES.update(kept)
        rate_of.cache_clear()


def scored_figures(sources: Sequence[Source]) -> list[ScoredFigure]:
    """The figures of `figures.yaml`."""
    listed = scored()
    return [
        ScoredFigure(source, row, figure)
        for source in sources
        for row in source.rows
        for figure in row.figures
        if figure.name in listed.get(row.id, ())
    ]


def without_parts(sources: Sequence[Source]) -> list[Row]:
    """The scores of all scored figures without each part of the model."""
    figures = scored_figures(sources)
    whole = [each.predicted(ModelVariant()) for each in figures]
    return [
        _scores(
            part,
            [
                each.pair(each.predicted(variant) if variant.changes(accelerated=each.is_accelerated) else usual)
                for each, usual in zip(figures, whole, strict=True)
            ],
        )
        for part, variant in PARTS.items()
    ]


def without_sources(sources: Sequence[Source]) -> list[Row]:
    """The scores of each file's figures with the constants of the others, and of all of them together."""
    figures = scored_figures(sources)
    together: list[RatioPair] = []
    found: list[Row] = []
    tried: dict[tuple[Any, ...], float] = {}

    def predicted(each: ScoredFigure, spread: float, without: Sequence[str]) -> RatioPair:
        names = tuple(name for name in used_by(cluster_in(*each)) if name in without)
        key = (each.row.id, each.figure.name, spread, names)
        if key not in tried:
            tried[key] = each.predicted(of_spread(spread), names)
        return each.pair(tried[key])

    for source in [each for each in sources if any(figure.source is each for figure in figures)]:
        own = [each for each in figures if each.source is source]
        others = [each for each in figures if each.source is not source and each.is_accelerated]
        letters = {each.row.id.rstrip("0123456789") for each in own}
        without = chosen_from(letters)
        spread = min(GRID, key=lambda value: _badness([predicted(each, value, without) for each in others]))
        pairs = [predicted(each, spread, without) for each in own]
        together += pairs
        found.append({**_scores(" and ".join(sorted(letters)), pairs), "spread": spread, "without": ", ".join(without)})
    return [*found, {**_scores("each by the others", together), "spread": None, "without": ""}]


def _badness(pairs: Sequence[RatioPair]) -> tuple[float, float]:
    found = score(pairs)
    return -found.near, found.median_error


def _scores(left_out: str, pairs: Sequence[RatioPair]) -> Row:
    lossy = score(with_loss(pairs))
    return {"left_out": left_out, **score(pairs)._asdict(), "loss": lossy.median_error}
