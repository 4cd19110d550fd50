"""The workers of a virtual run: which take part, how far they are, and the events of the cluster that change it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster, Event
    from dure.runtime.virtual.runtime import VirtualNode, VirtualRuntime


@dataclass(slots=True)
class Attendance:
    """Ranks of a virtual run by their state; a checkpoint holds all of it.

    `away` workers have been evicted and may come back. `deaths` has the reasons of quarantines. `refused` gradients of
    workers that have ended held NaN or infinity. `done` counts steps of all workers, also those made in vain; `passed`
    counts their step boundaries. `at` has the last step boundary of each worker, `steps` the steps of crashed ones.
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
    steps: dict[int, int] = field(default_factory=dict)

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
            steps=dict(plain.get("steps", ())),
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
            "steps": sorted(self.steps.items()),
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


@dataclass(frozen=True, slots=True)
class ClusterEvents:
    """Applies the events of `cluster`. `crash` and `join` apply theirs to a rank. `names` are the nodes by number.

    All events but a join are left out for a node that takes no part: `is_there` says whether it does.

    The segment begins at `started` seconds; `resumed`, if earlier segments have seen the events until then.
    """

    cluster: Cluster
    runtime: VirtualRuntime
    started: float
    resumed: bool
    crash: Callable[[int], None]
    join: Callable[[int], None]
    is_there: Callable[[int], bool]
    names: Sequence[str]

    def schedule(self) -> None:
        """Schedule all events that are still to come, and apply what lasts of earlier ones."""
        for event in sorted(self.cluster.events, key=lambda event: event.at):
            if event.at <= self.started and self.resumed:
                self._apply_past(event)
            else:
                self.runtime.kernel.external_event(event.at, lambda e=event: self._happen(e))  # type: ignore[misc]

    def _node(self, event: Event) -> VirtualNode:
        return self.runtime.nodes[self.names[event.worker]]

    def _apply_past(self, event: Event) -> None:
        """Bring what an event of an earlier segment still does into this one."""
        node = self._node(event)
        if event.kind == "slow":
            self._begin_slow(node, event)
        elif event.kind == "pause" and event.until > self.started:
            node.pause(event.until - self.started)
        elif event.kind == "join":
            node.paused_until = 0.0

    def _begin_slow(self, node: VirtualNode, event: Event) -> None:
        self._slow_down(node, event.worker)
        if self.runtime.kernel.now < event.until < math.inf:
            self.runtime.kernel.external_event(event.until, lambda: self._slow_down(node, event.worker))

    def _slow_down(self, node: VirtualNode, number: int) -> None:
        """Set the slowness that the cluster has now, all events that overlap taken together."""
        factor = self.cluster.slowness(number, self.runtime.kernel.now)
        if factor != node.slowness:
            node.slow_down(factor)

    def _happen(self, event: Event) -> None:
        node = self._node(event)
        if event.kind == "join":
            self.join(event.worker)
        elif not self.is_there(event.worker):
            return
        elif event.kind == "crash":
            self.crash(event.worker)
        elif event.kind == "pause":
            assert event.duration is not None
            node.pause(event.duration)
        elif event.kind == "slow":
            self._begin_slow(node, event)
