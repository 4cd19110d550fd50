"""The software of parameter servers in virtual time: processes that pack and unpack, and machines that push as one.

A push or a pull is cut into its variables, as gRPC's servers of 2017 send each variable as a message of its own. Each
variable passes four queues in series; every process has one queue, for what it packs and what it unpacks:

    the sender's process    variable + bytes / process
    the network             as any message (`runtime.virtual.network`)
    the receiver's process  variable + bytes / process

V equal variables, p seconds in a process and w on the wire, from one worker to one server:

    p + (V - 1) max(p, w) + w + p

With `threads`, a process packs so many variables at once, and one thread of its own unpacks: TensorFlow's service
answers each request for a tensor in a pool of threads (`grpc_worker_service.cc`), and one thread takes the answers.

Neighboring variables travel together until they have more bytes than a message that does not queue (`Cluster.small`);
they cost their number of `variable`. A header belongs to each message on the wire.

Where machines push as one (`per_machine`), the workers of a machine sum their updates by a reduce-scatter inside it,
the first of them pushes the sum, and pulls for all; an all-gather inside the machine then gives each worker what came.
The servers apply one update for each machine.

With `overlap`, the variables of a gradient are pushed as soon as backward has completed them, in its order, as graphs
of TensorFlow do. The push itself then waits for the last of them, and sends nothing more. With `early_pulls`, each is
pulled as soon as all workers have pushed it: `distributed_replicated` of tf_cnn_benchmarks has a barrier for each
variable. A server's update still counts once, after the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from dure.core.deployment import WORKER
from dure.runtime.virtual.sharing import Processor

if TYPE_CHECKING:
    from dure.runtime.virtual.network import Network, Pair


class Payload(Protocol):
    """A `network.Message` with tensors of `nbytes`."""

    pair: Pair
    wire: int
    life: int

    @property
    def nbytes(self) -> int: ...

    def arrive(self) -> None: ...


class VariablesMessage:
    """Neighboring variables of a push or a pull: a message of its own, which takes `seconds` of each process.

    `then` is called when the receiver has unpacked it.
    """

    __slots__ = ("_software", "life", "pair", "seconds", "then", "wire")

    def __init__(
        self, software: ServerSoftware, pair: Pair, wire: int, seconds: float, then: Callable[[], None] | None
    ) -> None:
        self._software = software
        self.pair = pair
        self.wire = wire
        self.life = 0
        self.seconds = seconds
        self.then = then

    def arrive(self) -> None:
        self._software.unpack(self)


class CompletedVariable(NamedTuple):
    """A variable of a gradient: its bytes, and the share of a step after which backward has completed it."""

    nbytes: int
    done: float


class EarlyMessage:
    """A push or a pull whose pieces leave before it: those that have not arrived, and what follows the last."""

    __slots__ = ("_left", "_then")

    def __init__(self, pieces: int) -> None:
        self._left = pieces
        self._then: Callable[[], None] | None = None

    def arrived(self) -> None:
        """Count a piece that the receiver has."""
        self._left -= 1
        self._follow()

    def ends(self, then: Callable[[], None]) -> None:
        """Call `then` once all pieces are there: all have left."""
        self._then = then
        self._follow()

    def _follow(self) -> None:
        if not self._left and self._then is not None:
            self._then()


class ServerSoftware:
    """Carries the messages of `network` between workers and servers, as the cluster describes the software.

    `variables` has the elements of each variable at each server, by name. `together`: all workers take part in every
    push and pull, so the workers of a machine can push as one. `completed` has the variables at each server in the
    order of backward, if they are pushed during it.
    """

    def __init__(
        self,
        network: Network,
        variables: Mapping[str, Sequence[int]],
        *,
        together: bool,
        completed: Mapping[str, Sequence[CompletedVariable]] | None = None,
    ) -> None:
        cluster = network.cluster
        servers = cluster.servers
        self._network = network
        self._kernel = network.kernel
        self._header, self._small = cluster.header, cluster.small
        self._variable = servers.variable
        self._byte = 0.0 if servers.process is None else 1.0 / servers.process
        self._variables = {network.node(name): sizes for name, sizes in variables.items()}
        self._cuts: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._threads = servers.threads
        self._packing: dict[tuple[int, int], Processor] = {}  # of each incarnation of a node
        self._unpacking: dict[tuple[int, int], Processor] = {}
        workers = [network.node(name) for name in network.names if name.startswith(WORKER)]
        self._machines = Counter(map(network.machine, workers)) if together and servers.per_machine else Counter()
        self.updates = len(self._machines) / len(workers) if self._machines else 1.0
        """The updates that a server applies for each worker's."""
        self._waiting: dict[tuple[int, int, bool], list[Payload]] = {}
        self._links: dict[int, Processor] = {}
        self._early = {
            network.node(name): list(_completed_pieces(found, cluster.small))
            for name, found in (completed or {}).items()
        }
        self._early_pulls = servers.early_pulls
        self._computed: dict[int, list[tuple[float, float]]] = {}
        self._started: dict[tuple[int, int], EarlyMessage] = {}  # by sender and receiver
        self._summed: Counter[tuple[int, CompletedPiece]] = Counter()
        self._members: dict[int, list[int]] = {}
        for worker in workers:
            self._members.setdefault(network.machine(worker), []).append(worker)
        self._pushing = list(dict.fromkeys(self._pushing_with(worker)[0] for worker in workers))

    def serves(self, name: str) -> bool:
        """Whether a node is a server."""
        return self._network.node(name) in self._variables

    def carry(self, message: Payload) -> None:
        """Send `message`. It arrives, or is lost, as by `Network.carry`."""
        src, dst = message.pair.src, message.pair.dst
        server = src if src in self._variables else dst
        if not message.nbytes or server not in self._variables:
            self._network.carry(message)
        elif self._machines[self._network.machine(src + dst - server)] > 1:
            self._gather(message, server, src + dst - server)
        else:
            deliver = partial(_deliver, self._network, [message])
            early = self._started.pop((src, dst), None)
            if early is not None:
                early.ends(deliver)
            else:
                self._send(message, server, deliver)

    # ---- pushes during backward

    def begin(self, worker: int, start: float, seconds: float) -> None:
        """Push the variables of the gradient that `worker` computes for `seconds` from `start` on."""
        if not self._early:
            return
        members = self._pushing_with(worker)
        spans = self._computed.setdefault(members[0], [])
        spans.append((start, seconds))
        if len(spans) < len(members):
            return
        del self._computed[members[0]]
        for server, pieces in self._early.items():
            push = self._started[members[0], server] = EarlyMessage(len(pieces))
            if self._early_pulls:
                self._started[server, members[0]] = EarlyMessage(len(pieces))
            for piece in pieces:
                ready = max(begun + taken * piece.done for begun, taken in spans)
                self._kernel.at(ready, partial(self._leave, push, piece, server, members))

    def _pushing_with(self, worker: int) -> Sequence[int]:
        """The workers that push as one with `worker`."""
        machine = self._network.machine(worker)
        return self._members[machine] if self._machines[machine] > 1 else (worker,)

    def _leave(self, push: EarlyMessage, piece: CompletedPiece, server: int, members: Sequence[int]) -> None:
        """Sum a piece in its machine, and send it."""
        summed = self._inside("reduce_scatter", piece.nbytes, members) if len(members) > 1 else self._kernel.now
        pair = self._network.route(members[0], server)
        self._kernel.at(summed, partial(self._pack, piece, pair, partial(self._pushed, push, piece, server)))

    def _pushed(self, push: EarlyMessage, piece: CompletedPiece, server: int) -> None:
        """Count a piece at its server. All workers pull it once all have pushed it."""
        push.arrived()
        if not self._early_pulls:
            return
        self._summed[server, piece] += 1
        if self._summed[server, piece] == len(self._pushing):
            del self._summed[server, piece]
            for worker in self._pushing:
                pull = self._started[server, worker]
                then = partial(self._pulled, pull, piece, self._pushing_with(worker))
                self._pack(piece, self._network.route(server, worker), then)

    def _pulled(self, pull: EarlyMessage, piece: CompletedPiece, members: Sequence[int]) -> None:
        """Share a piece in a machine, and count it."""
        part = -(-piece.nbytes // len(members))
        shared = self._inside("all_gather", part, members) if len(members) > 1 else self._kernel.now
        self._kernel.at(shared, pull.arrived)

    def _pack(self, piece: CompletedPiece, pair: Pair, then: Callable[[], None]) -> None:
        seconds = piece.variables * self._variable + piece.nbytes * self._byte
        message = VariablesMessage(self, pair, piece.nbytes + self._header, seconds, then)
        end = self._packer(pair.src).reserve(self._kernel.now, seconds)
        self._kernel.at(end, partial(self._packed, message, self._lives(pair)))

    # ---- processes

    def _send(self, message: Payload, server: int, then: Callable[[], None]) -> None:
        pair, now = message.pair, self._kernel.now
        cuts, lives = self._cut(server, message.nbytes), self._lives(pair)
        more = message.wire - message.nbytes  # the header and the fields of the call travel with the first piece
        for i, (nbytes, variables) in enumerate(cuts):
            seconds = variables * self._variable + nbytes * self._byte
            ends = i == len(cuts) - 1
            piece = VariablesMessage(self, pair, nbytes + more, seconds, then if ends else None)
            more = self._header
            self._kernel.at(self._packer(pair.src).reserve(now, seconds), partial(self._packed, piece, lives))

    def _packed(self, piece: VariablesMessage, lives: tuple[int, int]) -> None:
        if lives == self._lives(piece.pair):
            self._network.carry(piece)

    def _lives(self, pair: Pair) -> tuple[int, int]:
        """The incarnations of both ends: what an earlier one has sent, or was sent, is lost."""
        return self._network.life(pair.src), self._network.life(pair.dst)

    def unpack(self, piece: VariablesMessage) -> None:
        """Unpack a piece that arrives, unless it is lost."""
        if self._network.received(piece):
            end = self._unpacker(piece.pair.dst).reserve(self._kernel.now, piece.seconds)
            self._kernel.at(end, partial(self._unpacked, piece))

    def _unpacked(self, piece: VariablesMessage) -> None:
        if piece.then is not None and piece.life == self._network.life(piece.pair.dst):
            piece.then()

    def _packer(self, node: int) -> Processor:
        key = node, self._network.life(node)
        if key not in self._packing:
            self._packing[key] = Processor(self._threads)
        return self._packing[key]

    def _unpacker(self, node: int) -> Processor:
        """One thread: the only one of the process, or one beside those that pack."""
        if self._threads == 1:
            return self._packer(node)
        key = node, self._network.life(node)
        if key not in self._unpacking:
            self._unpacking[key] = Processor(1)
        return self._unpacking[key]

    def _cut(self, server: int, nbytes: int) -> list[tuple[int, int]]:
        """Bytes and number of variables of each piece of a message: a codec takes the same share of all variables."""
        key = server, nbytes
        if key not in self._cuts:
            sizes = self._variables[server] or (1,)
            if not self._variable and not self._byte:
                self._cuts[key] = [(nbytes, len(sizes))]
            else:
                self._cuts[key] = list(_pieces(sizes, nbytes, self._small))
        return self._cuts[key]

    # ---- machines

    def _gather(self, message: Payload, server: int, worker: int) -> None:
        """Keep a message of a worker until those of all workers of its machine are there: they go as one."""
        network, pushed = self._network, message.pair.dst == server
        machine = network.machine(worker)
        waiting = self._waiting.setdefault((machine, server, pushed), [])
        waiting.append(message)
        if len(waiting) < self._machines[machine]:
            return
        del self._waiting[machine, server, pushed]
        first = max(waiting, key=lambda each: each.nbytes)
        members = self._members[machine]
        deliver = partial(_deliver, network, waiting)
        early = self._started.pop((members[0], server) if pushed else (server, members[0]), None)
        if early is not None:
            early.ends(deliver)
        elif pushed:
            summed = self._inside("reduce_scatter", first.nbytes, members)
            self._kernel.at(summed, partial(self._send, first, server, deliver))
        else:
            part = -(-first.nbytes // len(members))
            self._send(first, server, lambda: self._kernel.at(self._inside("all_gather", part, members), deliver))

    def _inside(self, kind: str, nbytes: int, workers: Sequence[int]) -> float:
        """The end of a collective among workers of one machine, which follows the earlier ones there."""
        network = self._network
        cost = network.cost(kind, nbytes, workers)
        network.count_inside(cost, workers)
        link = self._links.setdefault(network.machine(workers[0]), Processor(1))
        return link.reserve(self._kernel.now, cost.seconds)


class CompletedPiece(NamedTuple):
    """Piece `number` of a gradient, some `variables`: their bytes, and the share of a step after which all are done."""

    number: int
    nbytes: int
    variables: int
    done: float


def _completed_pieces(completed: Sequence[CompletedVariable], small: int) -> Iterator[CompletedPiece]:
    """Pieces in the order of backward, of more than `small` bytes but for the last."""
    nbytes = variables = 0
    for number, each in enumerate(completed):
        nbytes, variables = nbytes + each.nbytes, variables + 1
        if nbytes > small or number == len(completed) - 1:
            yield CompletedPiece(number, nbytes, variables, each.done)
            nbytes = variables = 0


def _deliver(network: Network, messages: Sequence[Payload]) -> None:
    for message in messages:
        message.wire, message.life = 0, network.life(message.pair.dst)  # the bytes of its pieces are counted
        message.arrive()


def _pieces(sizes: Sequence[int], nbytes: int, small: int) -> Iterator[tuple[int, int]]:
    """Cut `nbytes` in proportion to `sizes`: bytes and number of the variables of each piece.

    All pieces have more than `small` bytes, or there is one.
    """
    whole, before, sent, variables = sum(sizes), 0, 0, 0
    for size in sizes:
        before, variables = before + size, variables + 1
        end = nbytes * before // whole
        # What follows must suffice for a piece too, else it travels with this one.
        if end - sent > small and (nbytes - end > small or before == whole):
            yield end - sent, variables
            sent, variables = end, 0
    if variables:
        yield nbytes - sent, variables
