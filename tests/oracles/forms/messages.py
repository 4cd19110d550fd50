"""Seconds of messages, alone and of several that leave together, by the load of links and cores: none is simulated.

A message over the cards of two machines loads one direction of each card, and of each link of racks and sites on its
way; one between workers of a machine loads the inner links. The last message arrives after the busiest direction, the
work of the cores for messages that end together, and a latency:

    seconds  =  max over directions of (bytes / bandwidth) + ceil(messages / cores) * (alpha + bytes * beta) + latency

On one host, processes share its cores and work alpha + bytes * beta seconds for each message, at both ends:

    seconds  =  max(busiest sender, all / cores) + latency + max(busiest receiver, all / cores)

A message of at most `small` bytes does not queue. Messages that leave at their own times need at least the seconds of
the busiest direction, or of the cores of a machine for all of them (`busiest`).
"""

from collections import Counter, defaultdict
from typing import NamedTuple

from dure.core.collective_cost import HEADER, SMALL


class Wire(NamedTuple):
    """Costs of a message: `Path` of the library, and the bytes with header up to which it neither queues nor costs
    `beta`. So `Wire(*path, cluster.small)` is the wire of a path.
    """

    latency: float
    alpha: float
    bandwidth: float
    beta: float = 0.0
    gamma: float = 0.0
    header: int = HEADER
    small: int = SMALL

    def message(self, nbytes=0):
        """Seconds of a message of `nbytes` and a header without other traffic."""
        wire = nbytes + self.header
        return self.latency + self.alpha + wire * (1 / self.bandwidth + (self.beta if wire > self.small else 0.0))


class Flow(NamedTuple):
    """A message of `nbytes` from one node to another, by name."""

    source: str
    target: str
    nbytes: int


class Transfers:
    """Messages between the nodes at `places` (`Cluster.placed`) of `cluster`."""

    def __init__(self, cluster, places):
        self.cluster, self.places = cluster, places
        self._machines = {place: cluster.machine_of(place) for place in set(places.values())}

    def crowding(self, processes):
        """The factor on computations of so many processes at once: on one host they share the cores."""
        host = self.cluster.host
        return 1.0 if host is None else max(1.0, processes / host.cores)

    def wire(self, flow):
        """The costs of a message: over cards, inside a machine, or beside its sender."""
        cluster, (here, there) = self.cluster, self._ends(flow)
        beside = Wire(0.0, cluster.alpha, cluster.memory_bandwidth, header=cluster.header, small=cluster.small)
        if self.places[flow.source] == self.places[flow.target]:
            return beside
        if here == there:
            inside = cluster.inside_of(here)
            return beside._replace(bandwidth=inside.bandwidth, latency=inside.latency)
        costs = {"latency": cluster.latency(here, there), "bandwidth": cluster.bandwidth(here, there)}
        return beside._replace(beta=cluster.beta, **costs)

    def message(self, flow):
        """Seconds of a message without others."""
        if self.cluster.host is None:
            return self.wire(flow).message(flow.nbytes)
        return 2 * self._core_seconds(flow) + self.cluster.link.latency

    def seconds(self, flows):
        """Seconds until the last of `flows`, which leave together, has arrived; 0 if all stay at their nodes."""
        sent = [flow for flow in flows if flow.source != flow.target]
        if not sent:
            return 0.0
        if self.cluster.host is None:
            return max(self._queued(sent), *map(self.message, sent))
        return self._on_cores(sent, "source") + self.cluster.link.latency + self._on_cores(sent, "target")

    def busiest(self, flows, computing):
        """Seconds of the busiest direction, or of the cores of a machine, if all `flows` go at their own times.

        On one host, its cores also have the seconds of `computing`.
        """
        if self.cluster.host is not None:
            return (2 * sum(map(self._core_seconds, flows)) + computing) / self.cluster.host.cores
        large = [flow for flow in flows if self._queues(flow)]
        cores = defaultdict(float)
        for flow in large:
            for machine in self._ends(flow):
                cores[machine] += self._handling(flow)
        busy = [seconds / self.cluster.cores_of(machine) for machine, seconds in cores.items()]
        return max([*self._directions(large).values(), *busy], default=0.0)

    def _queued(self, flows):
        large = [flow for flow in flows if self._queues(flow)]
        if not large:
            return 0.0
        ends = Counter(machine for flow in large for machine in self._ends(flow))
        rounds = max(-(-count // self.cluster.cores_of(machine)) for machine, count in ends.items())
        latency = max(self.wire(flow).latency for flow in large)
        return max(self._directions(large).values()) + rounds * max(map(self._handling, large)) + latency

    def _handling(self, flow):
        """Seconds of a core at either end of a large message."""
        wire = self.wire(flow)
        return wire.alpha + (flow.nbytes + wire.header) * wire.beta

    def _directions(self, flows):
        """Seconds of each direction of a card, by machine, of an inner link, by place, and of each shared link."""
        found, cluster = defaultdict(float), self.cluster
        for flow in flows:
            (here, there), nbytes = self._ends(flow), flow.nbytes + cluster.header
            if here != there:
                found["out", here] += nbytes / cluster.link_of(here).bandwidth
                found["in", there] += nbytes / cluster.link_of(there).bandwidth
                transit = cluster.transit(here, there)
                for link in () if transit is None else transit.links:
                    found[link] += nbytes / link.bandwidth
            else:
                found["out inside", self.places[flow.source]] += nbytes / cluster.inside_of(here).bandwidth
                found["in inside", self.places[flow.target]] += nbytes / cluster.inside_of(here).bandwidth
        return found

    def _queues(self, flow):
        """Whether a message goes over links, and is large."""
        beside = self.places[flow.source] == self.places[flow.target]
        return not beside and flow.nbytes + self.cluster.header > self.cluster.small

    def _ends(self, flow):
        """The machines of a message's sender and receiver."""
        return self._machines[self.places[flow.source]], self._machines[self.places[flow.target]]

    def _core_seconds(self, flow):
        """Seconds of a core, on one host, at one end of a message."""
        return self.cluster.alpha + (flow.nbytes + self.cluster.header) * self.cluster.beta

    def _on_cores(self, flows, end):
        """Seconds in which the processes at one end of `flows` do their work for them, on one host."""
        works = defaultdict(float)
        for flow in flows:
            works[getattr(flow, end)] += self._core_seconds(flow)
        return max(*works.values(), sum(works.values()) / self.cluster.host.cores)
