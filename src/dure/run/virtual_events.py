"""Crashes, joins, pauses and slowdowns that a cluster file schedules, in one segment of a virtual run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster, Event
    from dure.runtime.virtual.runtime import VirtualNode, VirtualRuntime


@dataclass(frozen=True, slots=True)
class ClusterEvents:
    """Applies the events of `cluster`: `crash` and `join` are called for a rank, `is_there` is asked before the others.
    `names` are the nodes that events name by number.

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
