"""Figures of one worker of a pipeline: staleness, versions of weights, micro-batches in flight, and bytes of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StageCounts:
    """Figures of one worker of a pipeline, for the record of a run.

    `staleness` counts updates by the number of updates between their forward and them. `most_versions` is the largest
    number of weights kept at once, the newest included; `most_sets` that of micro-batches between forward and backward,
    and `most_activation_nbytes` that of the bytes kept for these backwards. `collectives` counts those between workers
    that share layers, by kind, and `collective_nbytes` the bytes of their payloads.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    most_versions: int = 1
    most_sets: int = 0
    most_activation_nbytes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    collective_nbytes: Counter[str] = field(default_factory=Counter)

    def count_collective(self, kind: str, nbytes: int) -> None:
        """Count a collective with a payload of `nbytes`."""
        self.collectives[kind] += 1
        self.collective_nbytes[kind] += nbytes

    def plain(self) -> dict[str, Any]:
        """The figures as values that JSON has."""
        found = {
            "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
            "versions": self.most_versions,
            "sets": self.most_sets,
            "activation_bytes": self.most_activation_nbytes,
        }
        if self.collectives:
            found["collectives"] = dict(sorted(self.collectives.items()))
            found["collective_bytes"] = dict(sorted(self.collective_nbytes.items()))
        return found

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Go on from the figures of `plain`."""
        self.staleness = Counter({int(behind): int(count) for behind, count in plain["staleness"].items()})
        self.most_versions, self.most_sets = plain["versions"], plain["sets"]
        self.most_activation_nbytes = plain["activation_bytes"]
        self.collectives = Counter(plain.get("collectives", {}))
        self.collective_nbytes = Counter(plain.get("collective_bytes", {}))
