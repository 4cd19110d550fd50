"""The network of virtual time: the seconds of messages, and how messages share network cards.

Each direction of each machine's network card is a *processor-sharing queue*: the transfers in it, of all nodes on the
machine, share its bandwidth at every moment, in proportion to their weights. A message occupies the outgoing side of
its sender's card and the incoming side of its receiver's card at once, each at the rate that its own queue gives. The
message has left when both sides are done. It then takes `alpha + bytes * beta` seconds of a core at both hosts, and
arrives one latency later:

    one message                   latency + alpha + bytes * (beta + 1 / bandwidth)
    K messages into one card      the 1 / bandwidth part of the last one takes exactly K times as long

The weight of a message is drawn once: log-normal, of median 1 and sigma `Cluster.unfairness`. TCP shares a link only
on average, and its irregularity spreads workers that began together. Where `unfairness` is 0, the default, all
weights are 1: shares are equal, and the K messages above end together.

All rules:

- a message has the given bytes and a header, by default the cluster's, on the wire;
- a message of at most `small` bytes (4 KiB) on the wire does not queue: it is one event and takes latency + alpha +
  bytes / bandwidth. Its bytes are counted but slow no other message;
- messages from one node to another arrive in the order in which they were sent. They follow one another on the wire, as
  on one connection, so a pair of nodes has one share of a queue, however many messages wait;
- a message between machines of different racks or sites also occupies the shared links on its way
  (`runtime.virtual.fabric`), and has left when all its sides are done;
- messages between a worker and the nodes beside it use no link: they take alpha + bytes / memory bandwidth, one after
  another per pair;
- messages between workers of one machine do not use the card. Each worker has a link inside the machine, with a queue
  in each direction as that of a card. Alone, a message takes the inner latency + alpha + bytes / inner bandwidth;
- machines of accelerators have `card.count` cards, and neighbors share one. Messages between their workers take no
  core: they take the start of the engine and the hop of the card;
- bytes that stay within a machine are counted separately, as `bytes_local`;
- where the cluster is one `host`, nodes are processes that share its cores (`runtime.virtual.sharing`): a message takes
  alpha + bytes * beta in the process of its sender, then the latency of the link, then as much in the process of its
  receiver;
- a message from a node that has crashed arrives if it had left the node's card entirely, else it is lost. Messages on
  their way to that node are lost.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Protocol

import numpy as np

from dure.core import accelerator_cost
from dure.core.accelerator_cost import LeveledCost, Levels, LinkLevel
from dure.core.collective_cost import COLLECTIVES, Cost, HostedRanks, Path, Paths, SharedLink
from dure.core.deployment import WORKER
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.kernel import Kernel
from dure.runtime.virtual.sharing import EGRESS, INGRESS, SIDES, Cores, Process, Processor, SharingQueue, Transfer

_BLOCK = 512  # weights drawn at once


@dataclass(frozen=True, slots=True)
class NetworkCounters:
    """Counts of one node: bytes over its card, with headers; bytes sent within its machine; messages sent."""

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    messages: int


class Message(Protocol):
    """A message of `wire` bytes, header included, over the connection `pair`.

    It is for the incarnation `life` of its receiver: `Network.carry` sets that. `arrive` is called at the time of its
    arrival, and asks `Network.received` whether the message is lost.
    """

    pair: Pair
    wire: int
    life: int

    def arrive(self) -> None: ...


class PlainMessage:
    """A message whose arrival calls `deliver`."""

    __slots__ = ("_deliver", "_network", "life", "pair", "wire")

    def __init__(self, network: Network, pair: Pair, wire: int, deliver: Callable[[], None]) -> None:
        self._network = network
        self._deliver = deliver
        self.pair = pair
        self.wire = wire
        self.life = 0

    def arrive(self) -> None:
        if self._network.received(self):
            self._deliver()


class Pair:
    """The connection from one node to another; keeps messages in order. `back` is the one in the other direction."""

    __slots__ = ("alpha", "arrived", "back", "backlog", "beta", "current", "dst", "dst_cpu", "egress", "ingress",
                 "latency", "local", "queues", "shared", "src", "src_cpu", "start", "stretch")  # fmt: skip

    def __init__(self, src: int, dst: int) -> None:
        self.src = src
        self.dst = dst
        self.back: Pair | None = None  # set when `Network.reverse` first looks it up
        self.local = True  # within one machine
        self.queues = False  # over links, where large messages queue
        self.start = 0.0  # constant seconds of a message that does not queue
        self.stretch = 0.0  # its seconds per byte
        self.latency = 0.0
        self.alpha = 0.0  # seconds of a core per message that queues
        self.beta = 0.0  # seconds of a core per byte of it
        self.arrived = 0.0  # time at which the last message arrives or arrived
        self.current: Transfer | None = None
        self.backlog: deque[Message] | None = None  # made when a message first has to wait
        self.egress: SharingQueue
        self.ingress: SharingQueue
        self.shared: tuple[SharingQueue, ...] = ()  # of racks and sites
        self.src_cpu: Processor
        self.dst_cpu: Processor


def weights(unfairness: float, rng: np.random.Generator | None = None) -> Iterator[float]:
    """Endless weights of messages: log-normal of median 1 and sigma `unfairness`; all 1.0 where that is 0."""
    if not unfairness:
        yield from repeat(1.0)
    rng = rng or np.random.default_rng(0)
    while True:
        yield from np.exp(unfairness * rng.standard_normal(_BLOCK)).tolist()


class Network:
    """The cards, cores and messages of `cluster`, in the time of `kernel`.

    `places` maps each node to its place in the cluster; see `Cluster.placed`. Methods take a node by name, or by number
    in the order of `places`. `rng` draws the weights of messages where the cluster has an `unfairness`. `algorithm` is
    that of an all-reduce of accelerators (`accelerator_cost.ALL_REDUCES`).
    """

    def __init__(
        self,
        cluster: Cluster,
        kernel: Kernel,
        places: Mapping[str, int],
        rng: np.random.Generator | None = None,
        algorithm: str = "engine",
    ) -> None:
        self.cluster = cluster
        self._algorithm = algorithm
        self.kernel = kernel
        self.names = tuple(places)
        self.ids = {name: i for i, name in enumerate(places)}
        self._alpha, self._beta = cluster.alpha, cluster.beta
        self._header, self._small = cluster.header, cluster.small
        self._place = list(places.values())
        self._workers = [i for i, name in enumerate(places) if name.startswith(WORKER)]
        self._machine = [cluster.machine_of(place) for place in self._place]
        self._cards: dict[tuple[int, int], tuple[SharingQueue, SharingQueue]] = {}
        self._processors: dict[int, Processor] = {}
        for machine in dict.fromkeys(self._machine):
            self._processors[machine] = Processor(cluster.cores_of(machine))
        self._inner: dict[int, tuple[SharingQueue, SharingQueue]] = {}  # of places whose worker has used it
        self._shared: dict[SharedLink, SharingQueue] = {}  # of racks and sites, of links that a pair has used
        self._pairs: dict[tuple[int, int], Pair] = {}
        self._constants: dict[float, float] = {}  # of pairs: equal ones are one object, as pairs are many
        shared = None if cluster.host is None else Cores(kernel, cluster.host.cores)
        self.processes = None if shared is None else tuple(Process(shared) for _ in places)
        self._weights = weights(cluster.unfairness, rng)
        self._gone: set[int] = set()
        self._life = [0] * len(places)  # crashes of each node: a message to an earlier incarnation is lost
        self.bytes_sent = [0] * len(places)
        self.bytes_received = [0] * len(places)
        self.bytes_local = [0] * len(places)
        self.messages = [0] * len(places)

    def send(
        self, src: str | int, dst: str | int, nbytes: int, deliver: Callable[[], None], header: int | None = None
    ) -> None:
        """Send `nbytes` bytes and a header. `deliver` is called on arrival; never, if the message is lost."""
        wire = nbytes + (self._header if header is None else header)
        self.carry(PlainMessage(self, self.route(src, dst), wire, deliver))

    def carry(self, message: Message) -> None:
        """Send `message`. It arrives, or is lost, as in `send`."""
        pair, wire = message.pair, message.wire
        node = pair.src
        if self._gone and node in self._gone:
            return
        self.messages[node] += 1
        (self.bytes_local if pair.local else self.bytes_sent)[node] += wire
        if self._gone and pair.dst in self._gone:
            return
        # A message is for the present incarnation of its receiver: one that has crashed since does not get it.
        message.life = self._life[pair.dst]
        if self.processes is not None:
            self._hand_over(self.processes, message)
        elif not pair.queues:
            now = max(self.kernel.now, pair.arrived)
            self._arrive_at(now + pair.start + wire * pair.stretch, message)
        # One connection: a message waits behind the one on the wire even if it is small, or it would overtake it.
        elif pair.current is not None:
            if pair.backlog is None:
                pair.backlog = deque()
            pair.backlog.append(message)
        elif wire <= self._small:
            time = self.kernel.now + pair.start + wire * pair.stretch
            if time < pair.arrived:  # inlined `_arrive_at`, to save a call
                time = pair.arrived
            else:
                pair.arrived = time
            self.kernel.at(time, message.arrive)
        else:
            self._transfer(message)

    def received(self, message: Message) -> bool:
        """Count a message that arrives. False if it is lost, as its receiver has crashed since it was sent."""
        pair = message.pair
        if message.life != self._life[pair.dst]:
            return False
        if not pair.local:
            self.bytes_received[pair.dst] += message.wire
        return True

    def drop(self, node: str | int) -> None:
        """Crash `node`: lose the messages that had not left it and those on their way to it, until `restore`.

        Requests for cores of its machine are dropped too, unless another node runs on it.
        """
        index = self.node(node)
        self._gone.add(index)
        self._life[index] += 1
        if self.processes is not None:
            self.processes[index].clear()
        for pair in self._pairs.values():
            if index in (pair.src, pair.dst):
                pair.backlog = None
                transfer = pair.current
                # What has left the sender's card entirely arrives, though the sender is gone; the rest leaves all
                # queues.
                if transfer is not None and (pair.dst == index or transfer.pending & EGRESS):
                    pair.current = None
                    for queue in (pair.egress, pair.ingress, *pair.shared):
                        if transfer.pending & queue.bit:
                            queue.remove(transfer)
        machine = self._machine[index]
        if all(i in self._gone for i, m in enumerate(self._machine) if m == machine):
            self._processors[machine].clear()

    def last_arrival(self, node: str | int) -> float:
        """Arrival time of the last message from `node` that has left its card."""
        index = self.node(node)
        return max((pair.arrived for pair in self._pairs.values() if pair.src == index), default=0.0)

    def life(self, node: int) -> int:
        """The crashes of a node so far: the number of its incarnation."""
        return self._life[node]

    def machine(self, node: int) -> int:
        """The machine of a node."""
        return self._machine[node]

    def restore(self, node: str | int) -> None:
        """Start a new incarnation of `node`: it sends and receives again. Earlier messages stay lost."""
        self._gone.discard(self.node(node))

    def node(self, name: str | int) -> int:
        """The number of a node that is given by name or number."""
        return name if isinstance(name, int) else self.ids[name]

    def counters(self, node: str | int) -> NetworkCounters:
        """The counts of `node` so far."""
        i = self.node(node)
        return NetworkCounters(self.bytes_sent[i], self.bytes_received[i], self.bytes_local[i], self.messages[i])

    def count(self, cost: Cost | LeveledCost, indices: Sequence[int]) -> None:
        """Count the bytes and messages of a collective among the nodes `indices`."""
        for i, sent, received, messages in zip(indices, cost.sent, cost.received, cost.messages, strict=True):
            self.bytes_sent[i] += sent
            self.bytes_received[i] += received
            self.messages[i] += messages
        if isinstance(cost, LeveledCost):
            for i, sent, received in zip(indices, cost.local, cost.local_received, strict=True):
                self.bytes_local[i] += sent
                self.bytes_sent[i] -= sent
                self.bytes_received[i] -= received

    def count_inside(self, cost: Cost | LeveledCost, indices: Sequence[int]) -> None:
        """Count the bytes and messages of a collective among the nodes `indices` of one machine."""
        for i, sent, messages in zip(indices, cost.sent, cost.messages, strict=True):
            self.bytes_local[i] += sent
            self.messages[i] += messages

    def cost(
        self, kind: str, nbytes: int, nodes: Sequence[str | int], itemsize: int = 4, *, gradient: bool = False
    ) -> Cost | LeveledCost:
        """Cost of a collective among `nodes`, from the arrival of the last member on.

        `kind` is a key of `collective_cost.COLLECTIVES`; `nbytes` is the size of one member's tensor, of elements of
        `itemsize` bytes. The root of a broadcast is the first of `nodes`. `gradient`: it leaves during backward.
        """
        numel = nbytes // itemsize
        if self.cluster.accelerated:
            return accelerator_cost.cost(kind, numel, self.levels(nodes), itemsize, self._algorithm)
        return COLLECTIVES[kind](numel, len(nodes), self.paths(nodes, gradient=gradient), itemsize)

    def levels(self, nodes: Sequence[str | int]) -> Levels:
        """The levels of links between `nodes`, workers on machines of accelerators.

        Groups of the run's other workers on the same machines are taken to use the cards at the same time.
        """
        cluster, hosts = self.cluster, [self._machine[self.node(node)] for node in nodes]
        own, present = Counter(hosts), Counter(self._machine[i] for i in self._workers)
        # a rank alone on its host uses no link inside
        rings = [(cluster.inside_of(host), ranks) for host, ranks in own.items() if ranks > 1]
        inside = min((link.ring(ranks) for link, ranks in rings), default=math.inf)
        hop_inside = max((link.latency for link, _ in rings), default=0.0)
        rates, hops = [], []
        for host, ranks in own.items():
            card = cluster.card_of(host)
            assert card is not None  # of accelerators
            rates.append(card.count * cluster.bandwidth_of(host) * ranks / present[host])
            hops.append(card.hop)
        ring = zip(own, [*own][1:] + [*own][:1], strict=True)
        ways = [(host, way) for host, after in ring if (way := cluster.transit(host, after)) is not None]
        sharing = Counter(link for _, way in ways for link in way.links)
        rates += [
            link.bandwidth / sharing[link] * own[host] / present[host] for host, way in ways for link in way.links
        ]
        latencies = tuple(way.latency for _, way in ways)
        across = LinkLevel(min(rates), max(hops))
        return Levels(hosts, cluster.engine.start, LinkLevel(inside, hop_inside), across, latencies)

    def paths(self, nodes: Sequence[str | int], *, gradient: bool = False) -> Paths:
        """The costs of the rounds of a collective among `nodes`, in the order of ranks."""
        return paths_of(self.cluster, [self._place[self.node(node)] for node in nodes], gradient=gradient)

    def path(self, nodes: Sequence[str | int], *, gradient: bool = False) -> Path:
        """The slowest link between the machines of `nodes`, which bounds a round of a collective."""
        return path_of(self.cluster, [self._machine[self.node(node)] for node in nodes], gradient=gradient)

    def route(self, src: str | int, dst: str | int) -> Pair:
        """The connection from `src` to `dst`, one object for each pair of nodes."""
        key = (self.node(src), self.node(dst))
        pair = self._pairs.get(key)
        if pair is None:
            pair = self._pairs[key] = Pair(*key)
            self._connect(pair)
        return pair

    def _connect(self, pair: Pair) -> None:
        """Choose the queues and the constants of `pair`: over the cards, inside a machine, or within memory."""
        ends = pair.src, pair.dst
        here, there = (self._machine[i] for i in ends)
        one, other = (self._place[i] for i in ends)
        pair.src_cpu, pair.dst_cpu = self._processors[here], self._processors[there]
        pair.egress, pair.ingress = self._card(one)[0], self._card(other)[1]
        pair.local, pair.queues = here == there, one != other
        if not pair.queues:
            start, stretch = self._alpha, 1.0 / self.cluster.memory_bandwidth
        else:
            pair.alpha = self._alpha
            if pair.local:
                pair.egress, pair.ingress = self._inside(one)[0], self._inside(other)[1]
                pair.latency = self.cluster.inside_of(here).latency
            else:
                pair.latency = self.cluster.latency(here, there)
                pair.beta = self._beta
                transit = self.cluster.transit(here, there)
                pair.shared = () if transit is None else tuple(map(self._shared_queue, transit.links))
            if self.cluster.accelerated and all(self.names[i].startswith(WORKER) for i in ends):
                pair.latency += self.cluster.engine.start  # the device and the card handle it, and no core
                pair.alpha = pair.beta = 0.0
            start = pair.latency + pair.alpha
            stretch = 1.0 / min(queue.bandwidth for queue in (pair.egress, pair.ingress, *pair.shared))
        constants = self._constants
        pair.start, pair.stretch = constants.setdefault(start, start), constants.setdefault(stretch, stretch)

    def _card(self, place: int) -> tuple[SharingQueue, SharingQueue]:
        """The two directions of the network card of the node at `place`."""
        machine = self.cluster.machine_of(place)
        key = machine, self.cluster.card_number(place)
        if key not in self._cards:
            self._cards[key] = self._both_directions(self.cluster.bandwidth_of(machine))
        return self._cards[key]

    def _inside(self, place: int) -> tuple[SharingQueue, SharingQueue]:
        """The two directions of the link of the worker at `place` to the others on its machine."""
        if place not in self._inner:
            bandwidth = self.cluster.inside_of(self.cluster.machine_of(place)).bandwidth
            self._inner[place] = self._both_directions(bandwidth)
        return self._inner[place]

    def _shared_queue(self, link: SharedLink) -> SharingQueue:
        if link not in self._shared:
            self._shared[link] = SharingQueue(self.kernel, link.bandwidth, SIDES[link.kind], self._left)
        return self._shared[link]

    def _both_directions(self, bandwidth: float) -> tuple[SharingQueue, SharingQueue]:
        return (
            SharingQueue(self.kernel, bandwidth, EGRESS, self._left),
            SharingQueue(self.kernel, bandwidth, INGRESS, self._left),
        )

    def reverse(self, pair: Pair) -> Pair:
        """The connection in the other direction, kept as `pair.back`."""
        back = pair.back = self.route(pair.dst, pair.src)
        return back

    def _hand_over(self, processes: Sequence[Process], message: Message) -> None:
        """Carry a message between two processes of the host."""
        pair, life = message.pair, message.life
        seconds = self._alpha + message.wire * self._beta

        def receive() -> None:
            if life == self._life[pair.dst]:
                processes[pair.dst].run(seconds, message.arrive)

        def sent() -> None:
            pair.arrived = self.kernel.now + self.cluster.link.latency
            self.kernel.at(pair.arrived, receive)

        processes[pair.src].run(seconds, sent)

    def _transfer(self, message: Message) -> None:
        """Start to send a message that queues at both cards, and at the links that machines share."""
        pair = message.pair
        transfer = pair.current = Transfer(message, next(self._weights))
        pair.egress.add(transfer)
        pair.ingress.add(transfer)
        if pair.shared:
            for queue in pair.shared:
                transfer.pending |= queue.bit
                queue.add(transfer)

    def _left(self, transfer: Transfer) -> None:
        """End `transfer`, whose sides are done: the cores handle it, and the next message of its pair starts."""
        message = transfer.message
        pair = message.pair
        now = self.kernel.now
        handled = now
        # Both hosts handle the message at once, pipelined: the later of the two ends counts.
        cost = pair.alpha + transfer.nbytes * pair.beta
        if cost > 0.0:
            handled = max(pair.src_cpu.reserve(now, cost), pair.dst_cpu.reserve(now, cost))
        self._arrive_at(handled + pair.latency, message)
        pair.current = None
        backlog = pair.backlog
        while backlog:
            message = backlog.popleft()
            if message.wire > self._small:
                self._transfer(message)
                return
            self._arrive_at(now + pair.start + message.wire * pair.stretch, message)

    def _arrive_at(self, time: float, message: Message) -> None:
        """Deliver at `time`, but not before the previous message of this pair."""
        pair = message.pair
        if time < pair.arrived:
            time = pair.arrived
        else:
            pair.arrived = time
        self.kernel.at(time, message.arrive)


def path_of(cluster: Cluster, machines: Iterable[int], *, gradient: bool = False) -> Path:
    """The slowest link between `machines`, which bounds a round of a collective."""
    host = cluster.host
    if host is not None:
        round_ = host.gradient if gradient else host.all_reduce
        return Path(0.0, round_.start, math.inf, round_.byte)
    links = [cluster.link_of(machine) for machine in set(machines)]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    return Path(latency, cluster.alpha, bandwidth, cluster.beta, cluster.gamma, cluster.header)


def paths_of(cluster: Cluster, places: Sequence[int], *, gradient: bool = False) -> Paths:
    """The costs of the rounds of a collective among `places` (`Cluster.placed`), in the order of ranks.

    `gradient`: its tensor leaves during backward.
    """
    machines = [cluster.machine_of(place) for place in places]
    path = path_of(cluster, machines, gradient=gradient)
    fabric = cluster.fabric
    apart = fabric is not None and len(set(map(fabric.rack_of, machines))) > 1
    if len(set(machines)) == len(set(places)) and not apart:
        return path
    inside = {each: cluster.inside_of(each) for each in machines}
    return HostedRanks(
        machines,
        {each: path._replace(**cluster.link_of(each).model_dump()) for each in machines},
        {
            each: path._replace(beta=0.0, bandwidth=link.bandwidth, latency=link.latency)
            for each, link in inside.items()
        },
        cluster.transit if apart else None,
    )
