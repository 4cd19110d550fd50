"""Which workers of a virtual run take part, and how far they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Attendance:
    """Ranks of a virtual run by what has become of them; a checkpoint holds all of it.

    `away` workers have been evicted and may come back. `deaths` has the reasons of quarantines. `refused` gradients of
    workers that have ended held NaN or infinity. `done` counts steps of all workers, also those made in vain; `passed`
    counts their step boundaries. `at` has the last step boundary of each worker.
    """

    crashed: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    deaths: dict[str, str] = field(default_factory=dict)
    refused: int = 0
    done: int = 0
    at: dict[int, int] = field(default_factory=dict)
    passed: int = 0
    away: set[int] = field(default_factory=set)

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Attendance:
        """From the plain values of a checkpoint; at the start of a run it has none."""
        return cls(
            crashed=set(plain.get("crashed", ())),
            joined=set(plain.get("joined", ())),
            finished=set(plain.get("finished", ())),
            deaths=dict(plain.get("deaths", ())),
            refused=plain.get("refused", 0),
            done=plain.get("done", 0),
            at=dict(plain.get("at", ())),
            passed=plain.get("passed", 0),
            away=set(plain.get("away", ())),
        )

    def plain(self) -> dict[str, Any]:
        """The values that `of` reads back."""
        return {
            "crashed": sorted(self.crashed),
            "joined": sorted(self.joined),
            "finished": sorted(self.finished),
            "deaths": sorted(self.deaths.items()),
            "refused": self.refused,
            "done": self.done,
            "at": sorted(self.at.items()),
            "passed": self.passed,
            "away": sorted(self.away),
        }

    def works(self, rank: int) -> bool:
        """Whether a worker that was there has neither crashed nor finished."""
        return rank not in self.crashed and rank not in self.finished

    def slowest(self, default: int) -> int:
        """The step that every worker has made, crashed and evicted workers apart; `default` if none is left."""
        return min((clock for rank, clock in self.at.items() if rank not in self.away), default=default)

    def forget(self, rank: int) -> None:
        """Leave a crashed worker out of `slowest`."""
        self.at.pop(rank, None)
        self.away.discard(rank)
