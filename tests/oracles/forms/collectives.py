"""Costs of the collectives of `topology.collective` in closed form, for ranks that start at the same time.

`docs/choosing/topologies/collective.md` has the formulas of all_reduce and all_gather. If a tensor is cut into
uneven parts, the larger part counts. A rank's messages are those it sends and its requests. Bytes and messages are
exact. Seconds are exact in the network model if links are equal, machines have at least two cores, nothing else is
sent, and K (P for halving-doubling, L among hosts) divides the length. Otherwise they are an upper bound; ring and
tree reach the bound.
So are the seconds of all-to-all, whose ranks prepare several messages at once.
"""

from dure.core.collective_cost import Cost, Path, chunk_bytes, ring_all_gather, ring_all_reduce, ring_reduce_scatter

FREE = Path(latency=0.0, alpha=0.0, bandwidth=1.0)
"""A path for the engine's rings, of which bytes and messages count here."""


def rounds_of(ranks):
    """Number of halvings, rounded up, from `ranks` to one."""
    return (ranks - 1).bit_length()


# ---- ring


def ring(numel, ranks, wire, itemsize=4):
    """All-reduce: as the engine's ring, with headers and requests in addition.

    >>> from oracles.forms.messages import Wire
    >>> ring(12, 3, Wire(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=29.0, sent=(64, 64, 64), received=(64, 64, 64), messages=(8, 8, 8))
    """
    largest = chunk_bytes(numel, ranks, itemsize)[0]
    seconds = (ranks - 1) * (2 * wire.message(largest) + largest * wire.gamma)
    return _asked_for(ring_all_reduce(numel, ranks, FREE, itemsize), seconds, wire)


def ring_scatter(numel, ranks, wire, itemsize=4):
    """Reduce-scatter: the first half of the ring's all-reduce."""
    largest = chunk_bytes(numel, ranks, itemsize)[0]
    seconds = (ranks - 1) * (wire.message(largest) + largest * wire.gamma)
    return _asked_for(ring_reduce_scatter(numel, ranks, FREE, itemsize), seconds, wire)


def ring_gather(numel, ranks, wire, itemsize=4):
    """All-gather: every rank's tensor passes through the whole ring."""
    seconds = (ranks - 1) * wire.message(numel * itemsize)
    return _asked_for(ring_all_gather(numel, ranks, FREE, itemsize), seconds, wire)


def _asked_for(engine, seconds, wire):
    """The cost of a collective with a request for each message, all of them sent at its beginning."""
    total = wire.message() + seconds if len(engine.sent) > 1 else 0.0
    return engine._replace(seconds=total, messages=tuple(2 * count for count in engine.messages))


# ---- tree


def edges(lo, hi):
    """Parent, child and the end of the child's subtree, in the tree of the ranks lo .. hi - 1.

    >>> sorted(edges(0, 5))
    [(0, 1, 2), (0, 2, 5), (2, 3, 5), (3, 4, 5)]
    """
    if hi - lo > 1:
        middle = (lo + hi) // 2
        yield lo, middle, hi
        yield from edges(lo, middle)
        yield from edges(middle, hi)


def tree(numel, ranks, wire, itemsize=4):
    """All-reduce: each rank sends the whole tensor to its parent, and later to each child.

    >>> from oracles.forms.messages import Wire
    >>> tree(4, 3, Wire(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=29.0, sent=(16, 32, 16), received=(16, 32, 16), messages=(2, 4, 2))
    """
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    degrees = [0] * ranks
    for parent, child, _ in edges(0, ranks):
        degrees[parent] += 1
        degrees[child] += 1
    moved = tuple(degree * nbytes for degree in degrees)
    seconds = wire.message() + rounds * (2 * wire.message(nbytes) + nbytes * wire.gamma)
    return Cost(seconds if rounds else 0.0, moved, moved, tuple(2 * degree for degree in degrees))


def tree_gather(numel, ranks, wire, itemsize=4):
    """All-gather: each subtree's tensors are sent up, and all tensors are sent down."""
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    sent, received, messages = [0] * ranks, [0] * ranks, [0] * ranks
    for parent, child, stop in edges(0, ranks):
        below = (stop - child) * nbytes
        sent[child] += below
        received[parent] += below
        sent[parent] += ranks * nbytes
        received[child] += ranks * nbytes
        messages[parent] += 2
        messages[child] += 2
    up = sum(wire.message(-(-ranks // 2**r) * nbytes) for r in range(1, rounds + 1))
    seconds = wire.message() + up + rounds * wire.message(ranks * nbytes)
    return Cost(seconds if rounds else 0.0, tuple(sent), tuple(received), tuple(messages))


def tree_down(numel, ranks, wire, itemsize=4):
    """Broadcast of the first rank's tensor, used by all algorithms except the hierarchical one."""
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    children = [0] * ranks
    for parent, _, _ in edges(0, ranks):
        children[parent] += 1
    seconds = wire.message() + rounds * wire.message(nbytes)
    received = tuple(nbytes * (rank > 0) for rank in range(ranks))
    messages = tuple(count + (rank > 0) for rank, count in enumerate(children))
    return Cost(seconds if rounds else 0.0, tuple(count * nbytes for count in children), received, messages)


# ---- halving and doubling


def halving_doubling(numel, ranks, wire, itemsize=4):
    """All-reduce: at each distance d, a rank sends each of the 2 d chunks around it once, in two parts.

    >>> from oracles.forms.messages import Wire
    >>> halving_doubling(8, 3, Wire(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=41.0, sent=(64, 32, 32), received=(64, 32, 32), messages=(6, 4, 2))
    """
    nbytes, power = numel * itemsize, 1 << (ranks.bit_length() - 1)
    chunks = chunk_bytes(numel, power, itemsize)
    distances = [1 << r for r in range(power.bit_length() - 1)]
    extras = ranks - power
    moved = [sum(sum(chunks[i & -2 * d : (i & -2 * d) + 2 * d]) for d in distances) for i in range(power)]
    moved = [each + nbytes * (i < extras) for i, each in enumerate(moved)] + [nbytes] * extras
    messages = [4 * len(distances) + 2 * (i < extras) for i in range(power)] + [2] * extras
    ask = wire.message()
    seconds = ask + sum(2 * wire.message(sum(chunks[:d])) + sum(chunks[:d]) * wire.gamma for d in distances)
    if extras:
        seconds += 2 * wire.message(nbytes) + nbytes * wire.gamma + 2 * len(distances) * ask
    return Cost(seconds if ranks > 1 else 0.0, tuple(moved), tuple(moved), tuple(messages))


def doubling(numel, ranks, wire, itemsize=4):
    """All-gather: in round r, a rank sends the tensors it has, at most 2^r, to the rank 2^r to its left."""
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    moved = ((ranks - 1) * nbytes,) * ranks
    seconds = wire.message() + sum(wire.message(min(2**r, ranks - 2**r) * nbytes) for r in range(rounds))
    return Cost(seconds if rounds else 0.0, moved, moved, (2 * rounds,) * ranks)


# ---- hierarchical: `hosts` has the number of ranks on each host, `inside` is the wire between them


def hosts_of(ranks, per_host):
    """Number of ranks on each host."""
    return [min(per_host, ranks - first) for first in range(0, ranks, per_host)]


def hierarchical(numel, wire, itemsize=4, *, hosts, inside):
    """All-reduce: a tree on each host, and a ring of the hosts' first ranks (leaders).

    >>> from oracles.forms.messages import Wire
    >>> link = Wire(latency=1.0, alpha=0.0, bandwidth=16.0)
    >>> hierarchical(8, link, hosts=[2, 2], inside=link)
    Cost(seconds=36.0, sent=(64, 32, 64, 32), received=(64, 32, 64, 32), messages=(6, 2, 6, 2))
    """
    within = [tree(numel, size, inside, itemsize) for size in hosts]
    return _two_levels(within, ring(numel, len(hosts), wire, itemsize))


def hierarchical_gather(numel, wire, itemsize=4, *, hosts, inside):
    """All-gather: each host's tensors go to its leader and around the ring, and all tensors are sent down.

    Of two hosts, the leader of the one with fewer ranks is ready earlier and sends its request earlier.
    """
    nbytes, ranks = numel * itemsize, sum(hosts)
    count, rounds, ask = len(hosts), rounds_of(max(hosts)), wire.message()
    moved = [_gathered_on_host(host, hosts, nbytes, wire) for host in range(count)]

    def ready(size):
        up = sum(inside.message(-(-size // 2**r) * nbytes) for r in range(1, rounds_of(size) + 1))
        return inside.message() + up if size > 1 else 0.0

    seconds = max(map(ready, hosts))
    if count == 2:
        first, last = map(ready, hosts)
        there = max(first, last + ask) + wire.message(hosts[0] * nbytes)
        seconds = max(there, max(last, first + ask) + wire.message(hosts[1] * nbytes))
    elif count > 2:
        seconds += ask + (count - 1) * wire.message(max(hosts) * nbytes)
    seconds += rounds * inside.message(ranks * nbytes)
    sent, received, messages = (tuple(amount for host in moved for amount in host[kind]) for kind in range(3))
    return Cost(seconds, sent, received, messages)


def _gathered_on_host(host, hosts, nbytes, wire):
    """Sent bytes, received bytes and messages of the ranks of one host in an all-gather of `nbytes` from each rank."""
    size, count, ranks = hosts[host], len(hosts), sum(hosts)
    others = (ranks - size) * nbytes  # the leader sends these down to the other ranks
    here, down = tree_gather(nbytes, size, wire, 1), tree_down(others, size, wire, 1)
    sent = [own + more for own, more in zip(here.sent, down.sent, strict=True)]
    received = [own + more for own, more in zip(here.received, down.received, strict=True)]
    sent[0] += (ranks - hosts[(host + 1) % count]) * nbytes if count > 1 else 0
    received[0] += others
    return sent, received, (here.messages[0] + 2 * (count - 1), *here.messages[1:])


def hierarchical_down(numel, wire, itemsize=4, *, hosts, inside):
    """Broadcast of the first rank's tensor: to the leader of each host, then on each host."""
    within = [tree_down(numel, size, inside, itemsize) for size in hosts]
    cost = _two_levels(within, tree_down(numel, len(hosts), wire, itemsize))
    asked_ahead = inside.message() if max(hosts) > 1 and len(hosts) > 1 else 0.0
    return cost._replace(seconds=cost.seconds - asked_ahead)


def _two_levels(within, between):
    """Add the cost among the leaders (`between`) to the cost of each host's ranks (`within`)."""
    found = []
    for field in ("sent", "received", "messages"):
        amounts = []
        for cost, extra in zip(within, getattr(between, field), strict=True):
            first, *others = getattr(cost, field)
            amounts += [first + extra, *others]
        found.append(tuple(amounts))
    return Cost(max(cost.seconds for cost in within) + between.seconds, *found)


# ---- torus


def torus(numel, wire, itemsize=4, *, hosts, inside):
    """All-reduce: a reduce-scatter on each host, rings across the hosts that share their cards, an all-gather.

    >>> from oracles.forms.messages import Wire
    >>> link = Wire(latency=1.0, alpha=0.0, bandwidth=16.0, header=0, small=0)
    >>> torus(16, link, hosts=[2, 2], inside=link)  # 1 + 3 on the hosts, 1 + 2 * 3 across, 1 + 3 on the hosts
    Cost(seconds=15.0, sent=(96, 96, 96, 96), received=(96, 96, 96, 96), messages=(8, 8, 8, 8))
    """
    members, count = hosts[0], len(hosts)
    chunks = chunk_bytes(numel, members, itemsize)
    on_host = 2 * (ring_scatter(numel, members, inside, itemsize).seconds) - (members - 1) * chunks[0] * inside.gamma
    across = [_across(ring, chunk // itemsize, chunk // count, hosts, wire, itemsize) for chunk in chunks]
    within = [2 * sum(chunks) - chunks[i] - chunks[(i + 1) % members] for i in range(members)]
    sent = [within[i] + across[i].sent[host] for host in range(count) for i in range(members)]
    received = [within[i - 1] + across[i].received[host] for host in range(count) for i in range(members)]
    messages = 4 * (members - 1) + across[0].messages[0]
    return Cost(on_host + across[0].seconds, tuple(sent), tuple(received), (messages,) * sum(hosts))


def torus_gather(numel, wire, itemsize=4, *, hosts, inside):
    """All-gather: around the rings across the hosts, then the tensors of one host after another on each host."""
    members, count = hosts[0], len(hosts)
    across = _across(ring_gather, numel, numel * itemsize, hosts, wire, itemsize)
    within = ring_gather(numel, members, inside, itemsize)
    moved = (across.sent[0] + count * within.sent[0],) * sum(hosts)
    messages = (across.messages[0] + count * within.messages[0],) * sum(hosts)
    return Cost(across.seconds + count * within.seconds, moved, moved, messages)


def _across(form, numel, nbytes, hosts, wire, itemsize):
    """The cost of one of the rings across `hosts`, which share the cards for messages of `nbytes`.

    Small messages do not queue, and so do not share: neither the requests nor messages of at most `small` bytes.
    """
    rings = hosts[0]
    shared = wire if nbytes + wire.header <= wire.small else wire._replace(bandwidth=wire.bandwidth / rings)
    cost = form(numel, len(hosts), shared, itemsize)
    return cost._replace(seconds=cost.seconds + wire.message() - shared.message()) if len(hosts) > 1 else cost


# ---- all to all, barrier, catalogue


def all_to_all(numel, ranks, wire, itemsize=4):
    """All-reduce: every tensor to every rank, which adds them up."""
    cost = all_to_all_gather(numel, ranks, wire, itemsize)
    return cost._replace(seconds=cost.seconds + (ranks - 1) * numel * itemsize * wire.gamma)


def all_to_all_gather(numel, ranks, wire, itemsize=4):
    """All-gather: every tensor to every rank, all messages of a rank at once.

    >>> from oracles.forms.messages import Wire
    >>> all_to_all_gather(4, 3, Wire(latency=1.0, alpha=0.0, bandwidth=16.0, small=0))
    Cost(seconds=16.0, sent=(32, 32, 32), received=(32, 32, 32), messages=(4, 4, 4))
    """
    nbytes, others = numel * itemsize, ranks - 1
    queued = 1 if nbytes + wire.header <= wire.small else others
    seconds = wire.message() + wire.latency + queued * (wire.message(nbytes) - wire.latency) if others else 0.0
    moved = (others * nbytes,) * ranks
    return Cost(seconds, moved, moved, (2 * others,) * ranks)


def barrier(_numel, ranks, wire, _itemsize=4):
    """Barrier by dissemination, used by every algorithm: a request and a header in each round."""
    rounds = rounds_of(ranks)
    return Cost((rounds + 1) * wire.message() if rounds else 0.0, (0,) * ranks, (0,) * ranks, (2 * rounds,) * ranks)


SENT = {
    "ring": {"all_reduce": ring, "reduce_scatter": ring_scatter, "all_gather": ring_gather},
    "tree": {"all_reduce": tree, "all_gather": tree_gather},
    "halving-doubling": {"all_reduce": halving_doubling, "all_gather": doubling},
    "all-to-all": {"all_reduce": all_to_all, "all_gather": all_to_all_gather},
}
HOSTED = {
    "hierarchical": {"all_reduce": hierarchical, "all_gather": hierarchical_gather, "broadcast": hierarchical_down},
    "torus": {"all_reduce": torus, "all_gather": torus_gather},
}


def form_of(algorithm, kind, hosts=(), inside=None):
    """The closed form of a collective of `algorithm`; of "hierarchical" and "torus" on `hosts`.

    `inside` is by default the wire between hosts. A reduce_scatter is an all_reduce where no form of its own is listed.
    """
    if kind == "barrier":
        return barrier
    forms = HOSTED[algorithm] if hosts else {"broadcast": tree_down, **SENT[algorithm]}
    form = forms["all_reduce" if kind == "reduce_scatter" and kind not in forms else kind]
    if not hosts:
        return form
    return lambda numel, _, wire, itemsize: form(numel, wire, itemsize, hosts=hosts, inside=inside or wire)
