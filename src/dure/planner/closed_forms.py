"""Costs of the collectives of `topology.collective` in closed form, for K ranks that start at the same time.

n is the number of bytes of one rank's tensor; h = ceil(log2 K); P = 2^floor(log2 K) and E = K - P; L hosts have m ranks
each; M(x) is the time of a message of x bytes, A = M(0) that of a request, G = gamma. Trees within a host use its
inner link, and the messages of the hosts' first ranks use the cards. If a tensor is cut into uneven
parts, the larger part counts.

    algorithm          kind         bytes a rank sends         seconds
    ring               all_reduce   2 (K - 1) / K n            A + 2 (K - 1) M(n / K) + (K - 1) / K n G
                       all_gather   (K - 1) n                  A + (K - 1) M(n)
    tree               all_reduce   n up, n to each child      A + 2 h M(n) + h n G
                       all_gather   its subtree up, K n to     A + sum of M(ceil(K / 2^r) n) over r = 1 .. h, and
                                    each child                 h M(K n)
    halving-doubling   all_reduce   2 (P - 1) / P n            A + 2 sum of M(n / 2^r) over r = 1 .. log2 P, and
                                                               (P - 1) / P n G
                       ... E > 0    and n if it has an extra,  2 M(n) + n G + 2 log2 P A more
                                    which sends n
                       all_gather   (K - 1) n                  A + sum of M(min(2^r, K - 2^r) n) over r = 0 .. h - 1
    hierarchical       all_reduce   tree of m; a leader the    up a tree of m, a ring of L, down a tree of m
                                    ring of L too
    torus              all_reduce   2 (m - 1) / m n on its     2 A + 2 (m - 1) M(n / m) + (m - 1) / m n G on the host,
                                    host, 2 (L - 1) / (L m) n  A + 2 (L - 1) M(n / (L m)) + (L - 1) / (L m) n G over
                                    over the card              1 / m of the card

    all-to-all         all_reduce   (K - 1) n                  A + latency + (K - 1) (M(n) - latency + n G)
                       all_gather   (K - 1) n                  A + latency + (K - 1) (M(n) - latency)

    M(x) = latency + alpha + (x + 64) (beta + 1 / bandwidth), without beta up to 4 KiB in all

A receiver sends a request for each message; requests sent ahead hide A. A rank spends `gamma` on each byte it adds.

Bytes and messages are exact; a rank's messages are those it sends and its requests. Seconds are exact in the network
model if links are equal, machines have at least two cores, nothing else is sent, and K (P for halving-doubling, L
among hosts) divides the length. Otherwise they are an upper bound; ring and tree reach the bound. So are the seconds
of all-to-all, whose ranks prepare several messages at once; messages of up to 4 KiB do not queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dure.core.collective_cost import Cost, Path, chunk_bytes, ring_all_gather, ring_all_reduce, ring_reduce_scatter

Form = Callable[[int, int, Path, int], Cost]


def rounds_of(ranks: int) -> int:
    """Number of halvings, rounded up, from `ranks` to one."""
    return (ranks - 1).bit_length()


# ---- ring


def ring(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-reduce: as the engine's ring, with headers and requests in addition.

    >>> ring(12, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=29.0, sent=(64, 64, 64), received=(64, 64, 64), messages=(8, 8, 8))
    """
    largest = chunk_bytes(numel, ranks, itemsize)[0]
    seconds = (ranks - 1) * (2 * path.message(largest) + largest * path.gamma)
    return _asked_for(ring_all_reduce(numel, ranks, path, itemsize), seconds, path)


def ring_scatter(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """Reduce-scatter: the first half of the ring's all-reduce.

    >>> ring_scatter(12, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0)).seconds
    17.0
    """
    largest = chunk_bytes(numel, ranks, itemsize)[0]
    seconds = (ranks - 1) * (path.message(largest) + largest * path.gamma)
    return _asked_for(ring_reduce_scatter(numel, ranks, path, itemsize), seconds, path)


def ring_gather(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-gather: every rank's tensor passes through the whole ring.

    >>> ring_gather(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0)).seconds
    17.0
    """
    seconds = (ranks - 1) * path.message(numel * itemsize)
    return _asked_for(ring_all_gather(numel, ranks, path, itemsize), seconds, path)


def _asked_for(engine: Cost, seconds: float, path: Path) -> Cost:
    """The cost of a collective with a request for each message, all of them sent at its beginning."""
    total = path.message() + seconds if len(engine.sent) > 1 else 0.0
    return engine._replace(seconds=total, messages=tuple(2 * count for count in engine.messages))


# ---- tree


def edges(lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """Parent, child and the end of the child's subtree, in the tree of the ranks lo .. hi - 1.

    >>> sorted(edges(0, 5))
    [(0, 1, 2), (0, 2, 5), (2, 3, 5), (3, 4, 5)]
    """
    if hi - lo > 1:
        middle = (lo + hi) // 2
        yield lo, middle, hi
        yield from edges(lo, middle)
        yield from edges(middle, hi)


def tree(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-reduce: each rank sends the whole tensor to its parent, and later to each child.

    >>> tree(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=29.0, sent=(16, 32, 16), received=(16, 32, 16), messages=(2, 4, 2))
    """
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    degrees = [0] * ranks
    for parent, child, _ in edges(0, ranks):
        degrees[parent] += 1
        degrees[child] += 1
    moved = tuple(degree * nbytes for degree in degrees)
    seconds = path.message() + rounds * (2 * path.message(nbytes) + nbytes * path.gamma)
    return Cost(seconds if rounds else 0.0, moved, moved, tuple(2 * degree for degree in degrees))


def tree_gather(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-gather: each subtree's tensors are sent up, and all tensors are sent down.

    >>> tree_gather(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=34.0, sent=(48, 80, 16), received=(32, 64, 48), messages=(2, 4, 2))
    """
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
    up = sum(path.message(-(-ranks // 2**r) * nbytes) for r in range(1, rounds + 1))
    seconds = path.message() + up + rounds * path.message(ranks * nbytes)
    return Cost(seconds if rounds else 0.0, tuple(sent), tuple(received), tuple(messages))


def tree_down(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """Broadcast of the first rank's tensor, used by all algorithms except the hierarchical one.

    >>> tree_down(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=17.0, sent=(16, 16, 0), received=(0, 16, 16), messages=(1, 2, 1))
    """
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    children = [0] * ranks
    for parent, _, _ in edges(0, ranks):
        children[parent] += 1
    seconds = path.message() + rounds * path.message(nbytes)
    received = tuple(nbytes * (rank > 0) for rank in range(ranks))
    messages = tuple(count + (rank > 0) for rank, count in enumerate(children))
    return Cost(seconds if rounds else 0.0, tuple(count * nbytes for count in children), received, messages)


# ---- halving and doubling


def halving_doubling(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-reduce: at each distance d, a rank sends each of the 2 d chunks around it once, in two parts.

    >>> halving_doubling(8, 4, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=28.0, sent=(48, 48, 48, 48), received=(48, 48, 48, 48), messages=(8, 8, 8, 8))
    >>> halving_doubling(8, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=41.0, sent=(64, 32, 32), received=(64, 32, 32), messages=(6, 4, 2))
    """
    nbytes, power = numel * itemsize, 1 << (ranks.bit_length() - 1)
    chunks = chunk_bytes(numel, power, itemsize)
    distances = [1 << r for r in range(power.bit_length() - 1)]
    extras = ranks - power
    moved = [sum(sum(chunks[i & -2 * d : (i & -2 * d) + 2 * d]) for d in distances) for i in range(power)]
    moved = [each + nbytes * (i < extras) for i, each in enumerate(moved)] + [nbytes] * extras
    messages = [4 * len(distances) + 2 * (i < extras) for i in range(power)] + [2] * extras
    ask = path.message()
    seconds = ask + sum(2 * path.message(sum(chunks[:d])) + sum(chunks[:d]) * path.gamma for d in distances)
    if extras:
        seconds += 2 * path.message(nbytes) + nbytes * path.gamma + 2 * len(distances) * ask
    return Cost(seconds if ranks > 1 else 0.0, tuple(moved), tuple(moved), tuple(messages))


def doubling(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-gather: in round r, a rank sends the tensors it has, at most 2^r, to the rank 2^r to its left.

    >>> doubling(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=17.0, sent=(32, 32, 32), received=(32, 32, 32), messages=(4, 4, 4))
    """
    nbytes, rounds = numel * itemsize, rounds_of(ranks)
    moved = ((ranks - 1) * nbytes,) * ranks
    seconds = path.message() + sum(path.message(min(2**r, ranks - 2**r) * nbytes) for r in range(rounds))
    return Cost(seconds if rounds else 0.0, moved, moved, (2 * rounds,) * ranks)


# ---- hierarchical


def hosts_of(ranks: int, per_host: int) -> list[int]:
    """Number of ranks on each host.

    >>> hosts_of(5, 2)
    [2, 2, 1]
    """
    return [min(per_host, ranks - first) for first in range(0, ranks, per_host)]


def hierarchical(numel: int, path: Path, itemsize: int = 4, *, hosts: Sequence[int], inside: Path) -> Cost:
    """All-reduce: a tree on each host, over its path `inside`, and a ring of the hosts' first ranks (leaders).

    >>> link = Path(latency=1.0, alpha=0.0, bandwidth=16.0)
    >>> hierarchical(8, link, hosts=[2, 2], inside=link)
    Cost(seconds=36.0, sent=(64, 32, 64, 32), received=(64, 32, 64, 32), messages=(6, 2, 6, 2))
    """
    within = [tree(numel, size, inside, itemsize) for size in hosts]
    return _two_storeys(within, ring(numel, len(hosts), path, itemsize))


def hierarchical_gather(numel: int, path: Path, itemsize: int = 4, *, hosts: Sequence[int], inside: Path) -> Cost:
    """All-gather: each host's tensors go to its leader and around the ring, and all tensors are sent down.

    Of two hosts, the leader of the one with fewer ranks is ready earlier and sends its request earlier.

    >>> link = Path(latency=1.0, alpha=0.0, bandwidth=16.0)
    >>> hierarchical_gather(4, link, hosts=[2, 1], inside=link)
    Cost(seconds=30.0, sent=(80, 16, 16), received=(32, 48, 32), messages=(4, 2, 2))
    """
    nbytes, ranks = numel * itemsize, sum(hosts)
    count, rounds, ask = len(hosts), rounds_of(max(hosts)), path.message()
    moved = [_gathered_on_host(host, hosts, nbytes, path) for host in range(count)]

    def ready(size: int) -> float:
        up = sum(inside.message(-(-size // 2**r) * nbytes) for r in range(1, rounds_of(size) + 1))
        return inside.message() + up if size > 1 else 0.0

    seconds = max(map(ready, hosts))
    if count == 2:
        first, last = map(ready, hosts)
        there = max(first, last + ask) + path.message(hosts[0] * nbytes)
        seconds = max(there, max(last, first + ask) + path.message(hosts[1] * nbytes))
    elif count > 2:
        seconds += ask + (count - 1) * path.message(max(hosts) * nbytes)
    seconds += rounds * inside.message(ranks * nbytes)
    sent, received, messages = (tuple(amount for host in moved for amount in host[kind]) for kind in range(3))
    return Cost(seconds, sent, received, messages)


def _gathered_on_host(
    host: int, hosts: Sequence[int], nbytes: int, path: Path
) -> tuple[list[int], list[int], tuple[int, ...]]:
    """Sent bytes, received bytes and messages of the ranks of one host in an all-gather of `nbytes` from each rank."""
    size, count, ranks = hosts[host], len(hosts), sum(hosts)
    others = (ranks - size) * nbytes  # the leader sends these down to the other ranks
    here, down = tree_gather(nbytes, size, path, 1), tree_down(others, size, path, 1)
    sent = [own + more for own, more in zip(here.sent, down.sent, strict=True)]
    received = [own + more for own, more in zip(here.received, down.received, strict=True)]
    sent[0] += (ranks - hosts[(host + 1) % count]) * nbytes if count > 1 else 0
    received[0] += others
    return sent, received, (here.messages[0] + 2 * (count - 1), *here.messages[1:])


def hierarchical_down(numel: int, path: Path, itemsize: int = 4, *, hosts: Sequence[int], inside: Path) -> Cost:
    """Broadcast of the first rank's tensor: to the leader of each host, then on each host.

    >>> link = Path(latency=1.0, alpha=0.0, bandwidth=16.0)
    >>> hierarchical_down(4, link, hosts=[2, 2], inside=link)
    Cost(seconds=17.0, sent=(32, 0, 16, 0), received=(0, 16, 16, 16), messages=(2, 1, 2, 1))
    """
    within = [tree_down(numel, size, inside, itemsize) for size in hosts]
    cost = _two_storeys(within, tree_down(numel, len(hosts), path, itemsize))
    asked_ahead = inside.message() if max(hosts) > 1 and len(hosts) > 1 else 0.0
    return cost._replace(seconds=cost.seconds - asked_ahead)


def _two_storeys(within: list[Cost], between: Cost) -> Cost:
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


def torus(numel: int, path: Path, itemsize: int = 4, *, hosts: Sequence[int], inside: Path) -> Cost:
    """All-reduce: a reduce-scatter on each host, rings across the hosts that share their cards, an all-gather.

    >>> link = Path(latency=1.0, alpha=0.0, bandwidth=16.0, header=0, small=0)
    >>> torus(16, link, hosts=[2, 2], inside=link)  # 1 + 3 on the hosts, 1 + 2 * 3 across, 1 + 3 on the hosts
    Cost(seconds=15.0, sent=(96, 96, 96, 96), received=(96, 96, 96, 96), messages=(8, 8, 8, 8))
    """
    members, count = hosts[0], len(hosts)
    chunks = chunk_bytes(numel, members, itemsize)
    on_host = 2 * (ring_scatter(numel, members, inside, itemsize).seconds) - (members - 1) * chunks[0] * inside.gamma
    across = [_across(ring, chunk // itemsize, chunk // count, members, count, path, itemsize) for chunk in chunks]
    within = [2 * sum(chunks) - chunks[i] - chunks[(i + 1) % members] for i in range(members)]
    sent = [within[i] + across[i].sent[host] for host in range(count) for i in range(members)]
    received = [within[i - 1] + across[i].received[host] for host in range(count) for i in range(members)]
    messages = 4 * (members - 1) + across[0].messages[0]
    return Cost(on_host + across[0].seconds, tuple(sent), tuple(received), (messages,) * sum(hosts))


def torus_gather(numel: int, path: Path, itemsize: int = 4, *, hosts: Sequence[int], inside: Path) -> Cost:
    """All-gather: around the rings across the hosts, then the tensors of one host after another on each host.

    >>> link = Path(latency=1.0, alpha=0.0, bandwidth=16.0, header=0, small=0)
    >>> torus_gather(4, link, hosts=[2, 2], inside=link)  # 1 + 3 across, two times 1 + 2 on the hosts
    Cost(seconds=10.0, sent=(48, 48, 48, 48), received=(48, 48, 48, 48), messages=(6, 6, 6, 6))
    """
    members, count = hosts[0], len(hosts)
    across = _across(ring_gather, numel, numel * itemsize, members, count, path, itemsize)
    within = ring_gather(numel, members, inside, itemsize)
    moved = (across.sent[0] + count * within.sent[0],) * sum(hosts)
    messages = (across.messages[0] + count * within.messages[0],) * sum(hosts)
    return Cost(across.seconds + count * within.seconds, moved, moved, messages)


def _across(
    form: Callable[[int, int, Path, int], Cost], numel: int, nbytes: int, rings: int, hosts: int, path: Path, size: int
) -> Cost:
    """The cost of one of so many `rings` at once across `hosts`, which share the cards for messages of `nbytes`.

    Small messages do not queue, and so do not share: neither the requests nor messages of at most `small` bytes.
    """
    shared = path if nbytes + path.header <= path.small else path._replace(bandwidth=path.bandwidth / rings)
    cost = form(numel, hosts, shared, size)
    return cost._replace(seconds=cost.seconds + path.message() - shared.message()) if hosts > 1 else cost


# ---- all to all


def all_to_all(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-reduce: every tensor to every rank, which adds them up.

    >>> all_to_all(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0))
    Cost(seconds=11.0, sent=(32, 32, 32), received=(32, 32, 32), messages=(4, 4, 4))
    """
    cost = all_to_all_gather(numel, ranks, path, itemsize)
    return cost._replace(seconds=cost.seconds + (ranks - 1) * numel * itemsize * path.gamma)


def all_to_all_gather(numel: int, ranks: int, path: Path, itemsize: int = 4) -> Cost:
    """All-gather: every tensor to every rank, all messages of a rank at once.

    >>> all_to_all_gather(4, 3, Path(latency=1.0, alpha=0.0, bandwidth=16.0, small=0)).seconds
    16.0
    """
    nbytes, others = numel * itemsize, ranks - 1
    queued = 1 if nbytes + path.header <= path.small else others
    seconds = path.message() + path.latency + queued * (path.message(nbytes) - path.latency) if others else 0.0
    moved = (others * nbytes,) * ranks
    return Cost(seconds, moved, moved, (2 * others,) * ranks)


# ---- barrier and catalogue


def barrier(_numel: int, ranks: int, path: Path, _itemsize: int = 4) -> Cost:
    """Barrier by dissemination, used by every algorithm: a request and a header in each round.

    >>> barrier(0, 5, Path(latency=1.0, alpha=0.0, bandwidth=16.0)).seconds
    20.0
    """
    rounds = rounds_of(ranks)
    return Cost((rounds + 1) * path.message() if rounds else 0.0, (0,) * ranks, (0,) * ranks, (2 * rounds,) * ranks)


SENT: dict[str, dict[str, Form]] = {
    "ring": {"all_reduce": ring, "reduce_scatter": ring_scatter, "all_gather": ring_gather},
    "tree": {"all_reduce": tree, "reduce_scatter": tree, "all_gather": tree_gather},
    "halving-doubling": {
        "all_reduce": halving_doubling,
        "reduce_scatter": halving_doubling,
        "all_gather": doubling,
    },
    "all-to-all": {"all_reduce": all_to_all, "reduce_scatter": all_to_all, "all_gather": all_to_all_gather},
}


HOSTED: dict[str, dict[str, Callable[..., Cost]]] = {
    "hierarchical": {
        "all_reduce": hierarchical,
        "reduce_scatter": hierarchical,
        "all_gather": hierarchical_gather,
        "broadcast": hierarchical_down,
    },
    "torus": {"all_reduce": torus, "reduce_scatter": torus, "all_gather": torus_gather},
}


def form_of(algorithm: str, kind: str, hosts: Sequence[int] = (), inside: Path | None = None) -> Form:
    """The closed form of a collective of `algorithm`.

    For "hierarchical" and "torus", `hosts` has the number of ranks on each host, and `inside` is the path between
    them, by default that between hosts.

    >>> form_of("hierarchical", "all_reduce", [2, 2])(8, 4, Path(1.0, 0.0, 16.0), 4).messages
    (6, 2, 6, 2)
    """
    if kind == "barrier":
        return barrier
    if not hosts:
        return {**SENT[algorithm], "broadcast": tree_down}[kind]
    forms = HOSTED[algorithm]
    return lambda numel, _, path, itemsize: forms[kind](numel, path, itemsize, hosts=hosts, inside=inside or path)
