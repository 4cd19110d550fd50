"""Seconds of an exchange among the copies of a model, or of a stage, by closed forms: collectives, codecs, servers.

K workers have n bytes each, a server has s of them; a is a message without bytes. `way` has the seconds of messages
that leave together (`messages`), m(n) the bytes of a codec's message of n bytes.

    engine's all-reduce     R(n), `steps.ring`
    other all-reduces       `collectives`
    codec, stripes          encode n, way of m(n / K) from all to all, combine K of n / K and encode the result, way of
                            m(n / K) from all to all, decode n
    codec, gathered         encode n, way of m(n) from all to all, a, combine K of n
    one server              encode n, way of m(n) from all workers, decode K of n, K n g, way of n to all workers
    several servers         as one, and 2 a + max(2 a - K s g, a): acknowledgement, report to the clock, admission, and
                            the question for the version, during which the servers apply the updates
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from oracles.forms.collectives import form_of
from oracles.forms.messages import Flow, Transfers, Wire
from oracles.forms.steps import ring

from dure.codec.coder import SliceLayout
from dure.codec.cost import cost_of
from dure.codec.exchange import combining
from dure.core.node import CodecWork, Ghost
from dure.core.vectors import equal_ranges, size
from dure.run.setup import Setup
from dure.run.strategy import codec_name, own_cost
from dure.runtime.virtual.network import path_of, paths_of
from dure.topology.collective.algorithms import hosts_of
from dure.topology.collective.choice import HOSTED, Collective
from dure.topology.collective.message_group import machines_of
from dure.topology.parameter_server.choice import ParameterServer


@dataclass(frozen=True)
class Copies:
    """The `workers` and `servers` of a run, by name, with copies of the model of `setup`: all, or those of a stage.

    `speed` is that of the slowest of their machines.
    """

    setup: Setup
    transfers: Transfers
    workers: Sequence[str]
    servers: Sequence[str]
    speed: float

    @property
    def count(self):
        return len(self.workers)

    @property
    def nbytes(self):
        return self.setup.replica.params.nbytes

    @property
    def itemsize(self):
        return self.setup.replica.params.element_size()

    @cached_property
    def places(self):
        """The place of each worker."""
        return [self.transfers.places[name] for name in self.workers]

    @cached_property
    def ranges(self):
        """The ranges of the model at each server."""
        return self.setup.topology.ranges

    @property
    def largest(self):
        """Elements of the largest shard."""
        return max(map(size, self.ranges))

    @property
    def applying(self):
        """Seconds in which the server of the largest shard decodes an update and applies it."""
        return self.largest * self.itemsize * self.transfers.cluster.gamma + self.decoding

    @property
    def decoding(self):
        """Seconds in which the server of the largest shard decodes an update."""
        return self._cost(CodecWork("decode", self.largest)) if self.setup.codec is not None else 0.0

    @property
    def encoding(self):
        """Seconds in which the slowest worker encodes an update for servers."""
        works = (CodecWork("encode", size(ranges)) for ranges in self.ranges)
        return self.coding(*works) if self.setup.codec is not None else 0.0

    def coding(self, *works):
        """Seconds of a codec's work at the slowest worker."""
        return self._cost(*works) / self.speed * self.transfers.crowding(self.setup.workers)

    def _cost(self, *works):
        codec = self.setup.strategy.codec
        return cost_of(codec_name(codec), self.transfers.cluster.codecs, own_cost(codec)).seconds(works)

    def message_nbytes(self, ranges):
        """Bytes of a message of `ranges` of the model."""
        plain = Ghost(size(ranges), self.itemsize)
        if self.setup.codec is None:
            return plain.nbytes
        return self.setup.codec.coder(SliceLayout.of(self.setup.replica.layers, ranges)).encode(plain).nbytes

    def pushes(self, workers):
        """The messages of an update of each of `workers`."""
        sizes = [self.message_nbytes(ranges) for ranges in self.ranges]
        return [Flow(worker, server, n) for worker in workers for server, n in zip(self.servers, sizes, strict=True)]

    def pulls(self, workers):
        """The messages of the parameters to `workers`."""
        sizes = [size(ranges) * self.itemsize for ranges in self.ranges]
        return [Flow(server, worker, n) for worker in workers for server, n in zip(self.servers, sizes, strict=True)]

    @cached_property
    def small(self):
        """Seconds of a message without bytes between a worker and a server."""
        return max(self.transfers.message(Flow(self.workers[-1], server, 0)) for server in self.servers)


def exchange(copies):
    """Seconds of a sum over all copies; None where no form is known."""
    topology, codec = copies.setup.strategy.topology, copies.setup.codec
    if codec is not None and codec.vote() is not None:
        return None
    if isinstance(topology, ParameterServer):
        return over_servers(copies, copies.count)
    if copies.count == 1:
        return 0.0
    if not isinstance(topology, Collective):
        return None
    return _collective(copies, topology) if codec is None else _coded(copies)


def over_servers(copies, applied, *, pulling=None):
    """Seconds of pushes of `applied` workers, and of the pulls of `pulling` workers, or of all."""
    transfers, small = copies.transfers, copies.small
    there = transfers.seconds(copies.pushes(copies.workers[:applied]))
    back = transfers.seconds(copies.pulls(copies.workers[:pulling]))
    apply = applied * (copies.applying - copies.decoding)
    trips = 2 * small + max(2 * small - apply, small) if len(copies.servers) > 1 else 0.0
    return copies.encoding + there + applied * copies.decoding + trips + apply + back


def _collective(copies, topology):
    cluster = copies.transfers.cluster
    if topology.algorithm == "engine":
        return ring(copies.nbytes, copies.count, paths_of(cluster, copies.places))
    machines = [cluster.machine_of(place) for place in copies.places]
    hosts = [len(host) for host in hosts_of(machines_of(topology, machines))]
    hosted = topology.algorithm in HOSTED
    crowded = any(2 * machines.count(each) > cluster.cores_of(each) for each in machines)
    if (
        cluster.host is not None
        or cluster.fabric is not None
        or crowded
        or (not hosted and 1 < len(set(machines)) < copies.count)
    ):
        return None  # messages share cores, a card or an uplink
    wire, links = Wire(*path_of(cluster, machines), cluster.small), [cluster.inside_of(each) for each in machines]
    latency, bandwidth = max(link.latency for link in links), min(link.bandwidth for link in links)
    inside = wire._replace(latency=latency, bandwidth=bandwidth, beta=0.0)
    if len(set(machines)) == copies.count:  # `per_host` makes hosts of machines with one rank each
        inside = wire
    form = form_of(topology.algorithm, "all_reduce", hosts if hosted else (), inside)
    between = wire if len(set(machines)) > 1 else inside
    return form(copies.nbytes // copies.itemsize, copies.count, between, copies.itemsize).seconds


def _coded(copies):
    codec, numel, count = copies.setup.codec, copies.nbytes // copies.itemsize, copies.count
    if codec.exchange == "all_gather":
        work = copies.coding(CodecWork("encode", numel), CodecWork("combine", numel, count))
        answer = copies.transfers.message(Flow(copies.workers[0], copies.workers[-1], 0))
        return work + _all_to_all(copies, copies.message_nbytes([(0, numel)])) + answer
    stripes = equal_ranges(numel, count)
    works = [CodecWork(kind, size([each])) for kind in ("encode", "decode") for each in stripes]
    work = copies.coding(*works, *combining(size(stripes[:1]), count, votes=False))
    return work + 2 * _all_to_all(copies, copies.message_nbytes(stripes[:1]))


def _all_to_all(copies, nbytes):
    """Seconds in which each worker sends `nbytes` to each other."""
    return copies.transfers.seconds(Flow(one, other, nbytes) for one in copies.workers for other in copies.workers)
