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
    and `most_activation_nbytes` that of the bytes kept for these backwards.
    """

    staleness: Counter[int] = field(default_factory=Counter)
    most_versions: int = 1
    most_sets: int = 0
    most_activation_nbytes: int = 0

    def plain(self) -> dict[str, Any]:
        """The figures as values that JSON has."""
        return {
            "staleness": {str(behind): count for behind, count in sorted(self.staleness.items())},
            "versions": self.most_versions,
            "sets": self.most_sets,
            "activation_bytes": self.most_activation_nbytes,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> StageCounts:
        """The figures of `plain`."""
        staleness = Counter({int(behind): int(count) for behind, count in plain["staleness"].items()})
        return cls(staleness, plain["versions"], plain["sets"], plain["activation_bytes"])
