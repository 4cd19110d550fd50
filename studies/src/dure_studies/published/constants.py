"""Constants and rules of the model that were fitted or chosen in sight of published rows.

Predictions of these rows are not blind. Every other number of the engine has an origin that is no row: a data sheet,
the tables of NCCL, the defaults of a library, or what is usual in measurements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster

Values = dict[str, Any]
"""Values by their places in a cluster file, in a job (`job.precision`) or in a strategy (`strategy.micro`)."""

ALL_SOURCES = ("H", "T", "D", "L", "G", "N", "U")
"""The letters of the rows with scored figures."""


@dataclass(frozen=True)
class ChosenConstant:
    """A constant, or a rule, that was chosen in sight of the rows with the letters `rows`.

    `value` is None for a rule. Where these rows must not be seen, `without` takes its place, values in a cluster, or
    `rules`, keys of the library's `Library`. `fitted` by search; otherwise chosen once.
    """

    rows: tuple[str, ...]
    value: float | None
    meaning: str
    without: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, float] = field(default_factory=dict)
    fitted: bool = False


CHOSEN = {
    "spread": ChosenConstant(ALL_SOURCES, 0.02, "`engine.spread`", fitted=True),
    "contention": ChosenConstant(("H",), 0.10, "`engine.contention`", {"engine.contention": 0.0}),
    "tick": ChosenConstant(("H",), None, "cycles of Horovod wait for an idle network"),
    "start": ChosenConstant(("D",), 40e-6, "`engine.start`, seconds", {"engine.start": 8.4e-6}),  # NCCL's tuning.cc
    "tensor": ChosenConstant(("D",), 25e-6, "DDP, seconds for each tensor", rules={"tensor": 0.0}),
    "mesh": ChosenConstant(("G",), 22e9, "a link of a `mesh`, bytes/s", {"machines.inside.bandwidth": 25e9}),
    "process": ChosenConstant(("T",), 1e9, "`servers.process`, bytes/s", {"servers.process": 0.95e9}),
    "threads": ChosenConstant(("T",), None, "processes pack a variable on each core (`servers.threads`)"),
    "early pushes": ChosenConstant(("T",), None, "pushes during backward (`servers.overlap`)"),
    "early pulls": ChosenConstant(("T",), None, "a variable is pulled once all have pushed it (`servers.early_pulls`)"),
}
"""By name. Without rows, a start has NCCL's own seconds, a link of a mesh the bandwidth of its data sheet, and a
process the middle of the usual range. Rules follow the sources of Horovod and TensorFlow, but were built in sight of
rows; nothing takes their place."""


def used_by(cluster: Cluster) -> list[str]:
    """The names of those that a prediction for `cluster` depends on."""
    if cluster.accelerated:
        library = cluster.engine.library
        found = ["spread", "contention", "start"]
        found += ["tensor"] if library == "ddp" else ["tick"] if library == "horovod" else []
        return found + (["mesh"] if cluster.inside_of(0).kind == "mesh" else [])
    if cluster.servers.process is None:
        return []
    found = ["spread", "process"]
    found += ["threads"] if cluster.servers.threads > 1 else []
    found += ["early pushes"] if cluster.servers.overlap else []
    return found + (["early pulls"] if cluster.servers.early_pulls else [])


def fitted_from(cluster: Cluster) -> tuple[str, ...]:
    """The letters of the rows in sight of which constants of `cluster` were chosen."""
    return tuple(sorted({letter for name in used_by(cluster) for letter in CHOSEN[name].rows}))


def chosen_from(letters: Iterable[str]) -> list[str]:
    """The names of those, but for `spread`, that have other values without the rows with one of `letters`."""
    replaced = {name: each for name, each in CHOSEN.items() if each.without or each.rules}
    return [name for name, each in replaced.items() if set(letters) & set(each.rows)]


def without_rows(name: str, cluster: Cluster) -> Values:
    """The values of `cluster` that take the place of a constant. The links of a mesh keep their number or kind."""
    chosen = CHOSEN[name]
    if name == "mesh":
        assert chosen.value is not None  # no rule
        return {at: cluster.inside_of(0).bandwidth * link / chosen.value for at, link in chosen.without.items()}
    return dict(chosen.without)
