"""Seconds of messages that leave together, by the load of links and cores: no message is simulated.

Messages over the cards of two machines load one direction of each card; those between workers of a machine load the
inner links. The last message arrives after the busiest direction, the work of the cores for messages that end together,
and a latency:

    seconds  =  max over directions of (bytes / bandwidth) + ceil(messages / cores) * (alpha + bytes * beta) + latency

On one host, processes share its cores and work alpha + bytes * beta seconds for each message, at both ends:

    seconds  =  max(busiest sender, all / cores) + latency + max(busiest receiver, all / cores)

A message of at most `small` bytes does not queue. Messages that leave at their own times need at least the seconds of
the busiest direction, or of the cores of a machine for all of them (`busiest`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dure.core.collective_cost import Path

if TYPE_CHECKING:
    from dure.runtime.virtual.cluster import Cluster


class Flow(NamedTuple):
    """A message of `nbytes` from one node to another, by name."""

    source: str
    target: str
    nbytes: int


class Transfers:
    """Messages between the nodes at `places` (`Cluster.placed`) of `cluster`."""

    def __init__(self, cluster: Cluster, places: Mapping[str, int]) -> None:
        self.cluster = cluster
        self.places = places
        self._machines = {place: cluster.machine_of(place) for place in set(places.values())}

    def crowding(self, processes: int) -> float:
        """The factor on computations of so many processes at once: on one host they share the cores."""
        host = self.cluster.host
        return 1.0 if host is None else max(1.0, processes / host.cores)

    def path(self, flow: Flow) -> Path:
        """The costs of a message without others: over cards, inside a machine, or beside its sender."""
        cluster, (here, there) = self.cluster, self._ends(flow)
        path = Path(0.0, cluster.alpha, cluster.memory_bandwidth, header=cluster.header, small=cluster.small)
        if self.places[flow.source] == self.places[flow.target]:
            return path
        if here == there:
            return path._replace(**cluster.inside_of(here).model_dump())
        bandwidth = min(cluster.link_of(machine).bandwidth for machine in (here, there))
        return path._replace(latency=cluster.latency(here, there), bandwidth=bandwidth, beta=cluster.beta)

    def message(self, flow: Flow) -> float:
        """Seconds of a message without others."""
        if self.cluster.host is None:
            return self.path(flow).message(flow.nbytes)
        return 2 * self._core_seconds(flow) + self.cluster.link.latency

    def seconds(self, flows: Iterable[Flow]) -> float:
        """Seconds until the last of `flows`, which leave together, has arrived; 0 if all stay at their nodes."""
        sent = [flow for flow in flows if flow.source != flow.target]
        if not sent:
            return 0.0
        if self.cluster.host is None:
            return max(self._queued(sent), *map(self.message, sent))
        return self._on_cores(sent, "source") + self.cluster.link.latency + self._on_cores(sent, "target")

    def busiest(self, flows: Sequence[Flow], computing: float) -> float:
        """Seconds of the busiest direction, or of the cores of a machine, if all `flows` go at their own times.

        On one host, its cores also have the seconds of `computing`.
        """
        if self.cluster.host is not None:
            works = 2 * sum(map(self._core_seconds, flows)) + computing
            return works / self.cluster.host.cores
        large = [flow for flow in flows if self._queues(flow)]
        cores: defaultdict[int, float] = defaultdict(float)
        for flow in large:
            for machine in self._ends(flow):
                cores[machine] += self._handling(flow)
        busy = [seconds / self.cluster.cores_of(machine) for machine, seconds in cores.items()]
        return max([*self._directions(large).values(), *busy], default=0.0)

    def _queued(self, flows: Sequence[Flow]) -> float:
        large = [flow for flow in flows if self._queues(flow)]
        if not large:
            return 0.0
        ends = Counter(machine for flow in large for machine in self._ends(flow))
        rounds = max(-(-count // self.cluster.cores_of(machine)) for machine, count in ends.items())
        latency = max(self.path(flow).latency for flow in large)
        return max(self._directions(large).values()) + rounds * max(map(self._handling, large)) + latency

    def _handling(self, flow: Flow) -> float:
        """Seconds of a core at either end of a large message."""
        path = self.path(flow)
        return path.alpha + (flow.nbytes + path.header) * path.beta

    def _directions(self, flows: Iterable[Flow]) -> Mapping[tuple[str, int], float]:
        """Seconds for which each direction of a card, by machine, or of an inner link, by place, is busy."""
        found: defaultdict[tuple[str, int], float] = defaultdict(float)
        cluster, places = self.cluster, self.places
        for flow in flows:
            (here, there), wire = self._ends(flow), flow.nbytes + cluster.header
            if here != there:
                found["out", here] += wire / cluster.link_of(here).bandwidth
                found["in", there] += wire / cluster.link_of(there).bandwidth
            else:
                found["out inside", places[flow.source]] += wire / cluster.inside_of(here).bandwidth
                found["in inside", places[flow.target]] += wire / cluster.inside_of(here).bandwidth
        return found

    def _queues(self, flow: Flow) -> bool:
        """Whether a message goes over links, and is large."""
        beside = self.places[flow.source] == self.places[flow.target]
        return not beside and flow.nbytes + self.cluster.header > self.cluster.small

    def _ends(self, flow: Flow) -> tuple[int, int]:
        """The machines of a message's sender and receiver."""
        return self._machines[self.places[flow.source]], self._machines[self.places[flow.target]]

    def _core_seconds(self, flow: Flow) -> float:
        """Seconds of a core, on one host, at one end of a message."""
        return self.cluster.alpha + (flow.nbytes + self.cluster.header) * self.cluster.beta

    def _on_cores(self, flows: Iterable[Flow], end: str) -> float:
        """Seconds in which the processes at one end of `flows` do their work for them, on one host."""
        assert self.cluster.host is not None
        works: defaultdict[str, float] = defaultdict(float)
        for flow in flows:
            works[getattr(flow, end)] += self._core_seconds(flow)
        return max(*works.values(), sum(works.values()) / self.cluster.host.cores)
