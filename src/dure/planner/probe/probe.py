"""`dure probe`: measure hosts and the links between them, and describe them as a cluster file.

    rank 0, or this process alone           every rank                         a second process of each host
      conducts                                a benchmark  ---- local ------------> a second benchmark
      "measure" ------------------------------> with each partner, one pair at a time
      "apply", "compute" ---------------------> by itself

Ranks that see the same network of the same running system are on one host. The first rank of each host measures the
links between hosts and the second process. The ranks of a host measure the link between them. All ranks measure steps.

The measurements use dure's own wire and dure's own shard, so that the constants hold for real runs. Messages of several
sizes, alone and several at once, separate a byte's cost on the link from its other cost: messages at once occupy the
link one after another, but pay the other cost only once (`wire_of`). Half of a small round trip consists of alpha, the
time of the cores for a message, and of latency.
"""

from __future__ import annotations

import secrets
import socket
import statistics
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dure.core.cost import Fit, _rounded, codec_cost, fit
from dure.core.node import Address
from dure.errors import PeerLost, UsageError
from dure.job.replica import Replica
from dure.planner.probe.measure import SERVICE, Figures, LinkBenchmark
from dure.planner.probe.short_runs import described as described_steps
from dure.planner.probe.short_runs import short_runs
from dure.run.strategy import codec_name, make
from dure.runtime.launch.rendezvous import RankEnvironment, Rendezvous, place
from dure.runtime.launch.shard_process import ShardProcess
from dure.runtime.launch.shared_key import credentials_of
from dure.runtime.process.node import ProcessNode
from dure.runtime.virtual.cluster import Cluster, InsideLink, Link, Machines, RoundCost, ServerMachines, SharedHost
from dure.runtime.virtual.compute import Compute, Constant, LogNormal
from dure.runtime.wire import Credentials, Identity, Loss

if TYPE_CHECKING:
    from rich.table import Table

    from dure.codec.base import Codec
    from dure.job.job import Job

ALIKE = 0.1
"""Hosts with as many workers whose figures differ by at most this share count as machines of one kind."""

LEAST_WIRE = 0.05
"""Least share of a byte's time that is attributed to the link."""


BAD_FIT = 0.1
"""Residual of a link's fit above which its constants are unreliable."""

WIDEST = 0.8
"""Standard deviation of the logarithms of steps above which other programs are suspected; idle cores showed 0.5."""

RACES = 24
"""Number of races in total: two messages sent at once to one host."""

MOST_SHARE = 0.95
"""Largest share of a link that is attributed to the faster of two messages."""

PAIR_SECONDS = 600.0
"""Timeout of the measurements of one pair, or of one host's steps."""


def wire_of(figures: Figures) -> Fit:
    """Fit the seconds that a byte takes outside the link (beta) and on it (1 / bandwidth).

    `count` messages of `size` bytes at once occupy the link one after another; the last of them is then handled. They
    take start + size * beta + count * size / bandwidth. If noise hides the cost of bytes, the whole time of the largest
    message is attributed to the link, so that no link looks faster than it was measured.
    """
    line = fit([(size, count * size, seconds) for size, count, *both in figures["points"] for seconds in both])
    if any(line.slopes):
        return line
    size, count, *both = figures["points"][-1]
    return replace(line, slopes=(0.0, min(both) / (count * size)))


def unfairness_of(rounds: Sequence[tuple[float, float]]) -> float:
    """Estimate the standard deviation of log(weight of a message) from the ends of two equal messages sent at once.

    Of two messages with weights v > w, the faster has the share v / (v + w) of the link until its end; then the slower
    has the whole link. So the share is half the later end divided by the earlier end. log(v / w) has twice the variance
    of log(v).

    Example: with weights 3 and 1, the faster has 3/4 of the link and ends after 4/3 of its time alone, the slower
    after 2.

    >>> round(unfairness_of([(4 / 3, 2.0), (2.0, 4 / 3)]), 4)  # log(3) / sqrt(2)
    0.7768
    """
    if not rounds:
        return 0.0
    shares = np.array([min(max(ends) / (2 * min(ends)), MOST_SHARE) for ends in rounds])
    return float(np.sqrt(np.mean(np.log(shares / (1 - shares)) ** 2) / 2))


# ---- from figures to a cluster


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One link: seconds of half a round trip, and seconds per byte on it."""

    way: float
    per_byte: float


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """One host and its `workers`: its card, their inner link if there are several, and a step if a job is given."""

    card: MeasuredLink
    workers: int = 1
    inside: MeasuredLink | None = None
    seconds: float | None = None

    def like(self, other: MeasuredHost) -> bool:
        """Whether both are machines of one kind."""
        mine, theirs = (
            (each.card.per_byte, each.seconds or 1.0, each.inside.per_byte if each.inside else 1.0)
            for each in (self, other)
        )
        alike = all(abs(a - b) <= ALIKE * max(a, b) for a, b in zip(mine, theirs, strict=True))
        return self.workers == other.workers and alike


def described(found: Figures, workers: int) -> Cluster:
    """The cluster that fits the figures. If only one rank was measured, the cluster has `workers` machines like it.

    A message between a worker and a server beside it takes alpha + bytes / memory_bandwidth; one between workers of a
    machine latency + alpha + bytes / bandwidth of their inner link; one between machines latency + alpha +
    bytes * (beta + 1 / bandwidth). Without a second host, the inner link takes the place of the card.
    """
    between = found["pairs"] or found["inside"] or found["local"]
    hosts = _measured(found)
    ways = [link.way for host in hosts for link in (host.card, host.inside) if link is not None]
    alpha = min(statistics.median(each["cpu_message"] for each in between), *ways)
    kinds = _kinds(hosts)
    alone = sum(map(len, found["hosts"])) == 1
    cores = min(found["cores"])
    machines = [_machines(kind, alpha, cores, count=workers if alone else len(kind)) for kind in kinds]
    most = max(machines, key=lambda kind: kind.count)
    inside = max((kind for kind in machines if kind.inside), key=lambda kind: kind.count, default=most).inside
    link = most.link or Link()
    if len(kinds) == 1:  # the keys of the cluster say it for all machines
        machines = [most.model_copy(update={"link": None, "inside": None})]
    cluster = Cluster(
        machines=machines,
        servers=ServerMachines(cores=cores),
        link=link,
        inside=inside or InsideLink(),
        alpha=_rounded(alpha),
        beta=_rounded(statistics.median(wire_of(each).slopes[0] for each in between)),
        gamma=_rounded(statistics.median(fit(points).slopes[0] for points in found["apply"])),
        unfairness=_rounded(unfairness_of(found.get("races", ())), 2),
        memory_bandwidth=_rounded(1 / statistics.median(sum(wire_of(each).slopes) for each in found["local"])),
        codecs={name: codec_cost(_slowest(each)) for name, each in found.get("codecs", {}).items()},
    )
    return one_host(cluster, found, workers) if "hand_over" in found else cluster


def one_host(cluster: Cluster, found: Figures, workers: int) -> Cluster:
    """Change `cluster` to processes that share the cores of one machine, by the measured `hand_over` and `runs`.

    If workers outnumber the cores, they wait for each other, so a step alone takes less than the measured time.
    """
    cores = min(found["cores"])
    alpha, beta, wake = hand_over(found["hand_over"])
    byte = statistics.median(sum(wire_of(each).slopes) for each in found["local"])
    runs = found.get("runs")
    more: dict[str, Any] = {}
    if runs is not None:
        steps = described_steps(runs["steps"])
        own = steps.seconds * min(1.0, cores / workers)
        more["machines"] = (
            Machines(count=workers, cores=cores, compute=LogNormal(seconds=_rounded(own), sigma=_rounded(steps.sigma))),
        )
    rounds = {
        name: _round(runs[name], found["numel"], workers, byte)
        for name in ("all_reduce", "gradient")
        if runs is not None and runs[name] is not None
    }
    host = SharedHost(cores=cores, **rounds)
    link = cluster.link.model_copy(update={"latency": _rounded(wake)})
    return cluster.model_copy(
        update={**more, "host": host, "link": link, "alpha": _rounded(alpha), "beta": _rounded(beta)}
    )


def hand_over(points: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    """Costs of a message: alpha and beta of each of its two processes, and the latency between them.

    `points` are (bytes, seconds by the clock, seconds of the caller's cores, seconds of the host's cores). The first
    point measures a step alone. Each other point measures a step, a push and a reply of the same size: two messages,
    each of which costs both processes.
    """
    (_, alone, own, _), *others = points
    costs = [(nbytes, (here - own + there) / 4) for nbytes, _, here, there in others]
    (few, least), (many, most) = costs[0], costs[-1]
    beta = max((most - least) / (many - few), 0.0) if many > few else 0.0
    alpha = max(statistics.mean(cost - nbytes * beta for nbytes, cost in costs), 0.0)
    idle = [(clock - alone - (here - own) - there) / 2 for _, clock, here, there in others]
    return alpha, beta, max(min(idle), 0.0)


def _round(seconds: float, numel: int, workers: int, byte: float) -> RoundCost:
    """Cost of a round of an all_reduce that took `seconds`. A byte costs at most `byte` seconds."""
    rounds = 2 * (workers - 1)
    byte = min(byte, seconds / rounds / (4 * numel / workers))
    return RoundCost(start=_rounded(seconds / rounds - byte * 4 * numel / workers), byte=_rounded(byte))


def _slowest(hosts: Sequence[Mapping[str, Sequence[tuple[int, float]]]]) -> dict[str, list[tuple[int, float]]]:
    """The time of the slowest host for each operation and size, because all hosts wait for the slowest."""
    return {
        operation: [max(same, key=itemgetter(1)) for same in zip(*(host[operation] for host in hosts), strict=True)]
        for operation in hosts[0]
    }


def _measured(found: Figures) -> list[MeasuredHost]:
    """The best figures of each host: with a slower partner, the figures are those of the partner's link."""
    hosts = []
    for number, (ranks, local) in enumerate(zip(found["hosts"], found["local"], strict=True)):
        within = [figures for figures in found["inside"] if figures["host"] == number]
        outside = [figures for figures in found["pairs"] if number in figures["hosts"]] or within or [local]
        card = MeasuredLink(_way(outside), min(_on_link(wire_of(figures)) for figures in outside))
        inside = MeasuredLink(_way(within), min(sum(wire_of(figures).slopes) for figures in within)) if within else None
        steps = [statistics.median(found["compute"][rank]) for rank in ranks if found["compute"][rank]]
        hosts.append(MeasuredHost(card, len(ranks), inside, statistics.median(steps) if steps else None))
    return hosts


def _way(pairs: Sequence[Figures]) -> float:
    """Seconds of half of the shortest round trip."""
    return min(float(figures["round_trip"]) / 2 for figures in pairs)


def _on_link(wire: Fit) -> float:
    """Seconds per byte on the link, at least LEAST_WIRE of all that a byte takes: cores may hide the link's time."""
    beside, on = wire.slopes
    return max(on, LEAST_WIRE * (beside + on))


def _kinds(hosts: Sequence[MeasuredHost]) -> list[list[MeasuredHost]]:
    """Group hosts of neighboring ranks whose figures are alike."""
    kinds: list[list[MeasuredHost]] = []
    for host in hosts:
        if kinds and host.like(kinds[-1][0]):
            kinds[-1].append(host)
        else:
            kinds.append([host])
    return kinds


def _machines(kind: Sequence[MeasuredHost], alpha: float, cores: int, *, count: int) -> Machines:
    """Machines like those of `kind`."""
    inner = [host.inside for host in kind if host.inside is not None]
    return Machines(
        count=count,
        workers=kind[0].workers,
        cores=cores,
        compute=_compute(kind),
        link=Link(**_link([host.card for host in kind], alpha)),
        inside=InsideLink(**_link(inner, alpha)) if inner else None,
    )


def _link(measured: Sequence[MeasuredLink], alpha: float) -> dict[str, Any]:
    """The bandwidth and the latency of links of one kind."""
    way, per_byte = (statistics.median(getattr(link, name) for link in measured) for name in ("way", "per_byte"))
    return {"bandwidth": _rounded(1 / per_byte), "latency": _rounded(max(way - alpha, 0.0))}


def _compute(kind: Sequence[MeasuredHost]) -> Compute:
    known = [host.seconds for host in kind if host.seconds is not None]
    return Constant(seconds=_rounded(statistics.median(known))) if known else Constant()


# ---- measuring


def probe(
    job: Job | None = None,
    *,
    workers: int = 4,
    codecs: Sequence[str] = (),
    name: str = "",
    data: Path | None = None,
    key_file: Path | None = None,
) -> Figures | None:
    """Measure all hosts. If torchrun has started several ranks, each calls this; only rank 0 returns the figures.

    On one machine, short real runs with `workers` workers train the job called `name` (as in `dure train`, with its
    `data`); without a name, a step is measured in this process alone. `key_file` is as in `dure.attach`.

    The entry `cluster` is the `Cluster`. It is derived from the other entries: `hosts` (the ranks of each), `local`,
    `pairs` (each with its two `hosts`), `inside` (pairs of ranks on one `host`), `races`, `apply`, `compute` (seconds
    of steps of `job` at each rank), `codecs` (by name, for each rank), `cores`, `residual` (the worst fit of a link),
    and `advice` if that fit is bad. One process alone also has `hand_over`, `numel` and `runs` (`short_runs`).

    Raises `PeerLost` if a host fails or exits.
    """
    if workers < 1:
        raise UsageError(f"workers counts machines and must be >= 1, got {workers}.")
    named = _named(codecs)
    here = place() or RankEnvironment()
    rendezvous = Rendezvous(here, "probe")
    run = rendezvous.exchange("run", f"probe-{secrets.token_hex(4)}")[0]
    credentials = credentials_of(rendezvous, key_file)
    hosts = hosts_of(rendezvous.exchange("host", network_identity()))
    node = ProcessNode(Identity(run, f"rank {here.rank}", here.rank), credentials)
    benchmark = LinkBenchmark(node, job, named)
    node.serve(SERVICE, benchmark)
    with ExitStack() as stack:
        stack.callback(node.wire.close)
        first = any(here.rank == ranks[0] for ranks in hosts)
        beside = _begin_beside(node, here, credentials, stack) if first else None
        stack.callback(benchmark.over.resolve)  # from here on, the exit of a peer is no error
        _exchange_addresses(rendezvous, node, beside)
        rendezvous.exchange("ready", True)
        node.on_lost = lambda loss: _lost(loss, benchmark)
        if here.rank:
            node.loop.run_until(benchmark.over)
            found = None
        else:
            found = node.loop.run_until(node.spawn(_conduct(node, hosts, list(named)), "the measurements"))
            benchmark.over.resolve()
        if beside is not None:
            node.loop.run_until(node.call(Address(f"beside {here.rank}", SERVICE), "over"))
            beside.until_gone()
        rendezvous.part()
    if found is None:
        return None
    if here.world_size == 1 and job is not None:
        found["numel"] = Replica(job.build(0)).numel
        found["runs"] = None
        if name:
            found["runs"] = runs = short_runs(name, data, workers, statistics.median(found["compute"][0]))
            found["advice"] = " ".join(filter(None, [found["advice"], disturbance(runs)]))
    found["cluster"] = described(found, workers)
    return found


def network_identity() -> str:
    """Identity of the running system and of the network that this process sees: that of its host, or its container."""
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{system} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()


def hosts_of(identities: Sequence[str]) -> list[list[int]]:
    """The ranks of each host, in the order of ranks. Raises `UsageError` if the ranks of a host are not in a row.

    >>> hosts_of(["a", "a", "b"])
    [[0, 1], [2]]
    """
    hosts = [[rank for rank, _ in group] for _, group in groupby(enumerate(identities), key=itemgetter(1))]
    if len(hosts) > len(set(identities)):
        raise UsageError(
            "the ranks of a host are not in a row, and a cluster file numbers workers machine by machine. Start all "
            "ranks of one host, then those of the next, as torchrun does."
        )
    return hosts


def _begin_beside(node: ProcessNode, here: RankEnvironment, credentials: Credentials, stack: ExitStack) -> ShardProcess:
    """Start a second process on this host."""
    name = f"beside {here.rank}"
    request = {"run": node.identity.job, "name": name, "rank": here.rank, "interface": here.interface}
    request["credentials"] = credentials.plain()
    helper = ShardProcess("dure.planner.probe.measure", name, request)
    stack.push(lambda kind, error, trace: helper.kill() if kind is not None else None)
    return helper


def _exchange_addresses(rendezvous: Rendezvous, node: ProcessNode, beside: ShardProcess | None) -> None:
    """Listen, and enter the addresses of all ranks and of the second processes into the node's directory."""
    interface = rendezvous.place.interface
    places = rendezvous.exchange("place", [interface, node.wire.listen(interface)])
    node.directory |= {f"rank {rank}": (host, port) for rank, (host, port) in enumerate(places)}
    besides = rendezvous.exchange("beside", [interface, beside.answer()["port"] if beside else 0])
    node.directory |= {f"beside {rank}": (host, port) for rank, (host, port) in enumerate(besides) if port}


def _lost(loss: Loss, benchmark: LinkBenchmark) -> None:
    if not benchmark.over.done and not loss.finished:
        raise PeerLost(f"{loss.peer} failed or exited during the measurements: {loss.reason}.")


def _named(codecs: Sequence[str]) -> dict[str, Codec]:
    """Parse codecs, and map the names that a cluster file uses to them. Raises `StrategyError`."""
    made = [make(text, "codec") for text in codecs]
    names = [codec_name(codec) for codec in made]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"a cluster file has one cost for {twice}, and several were asked for. Give it once.")
    return dict(zip(names, made, strict=True))


async def _conduct(node: ProcessNode, hosts: Sequence[Sequence[int]], codecs: Sequence[str]) -> Figures:
    """Measure one thing after another, as measurements at the same time would disturb each other."""
    ranks = [Address(f"rank {rank}", SERVICE) for members in hosts for rank in members]
    found: Figures = {"hosts": [list(members) for members in hosts], "local": [], "inside": [], "pairs": []}
    found |= {"apply": [], "cores": [], "codecs": {}}
    for number, members in enumerate(hosts):
        found["local"].append(await _measure(node, members[0], f"beside {members[0]}"))
        reply = await node.call(ranks[members[0]], "apply", timeout=PAIR_SECONDS)
        found["apply"].append(reply.fields["points"])
        found["cores"].append(reply.fields["cores"])
        for one, other in partners(len(members)):
            figures = await _measure(node, members[one], f"rank {members[other]}")
            found["inside"].append({"host": number, **figures})
    for one, other in partners(len(hosts)):
        figures = await _measure(node, hosts[one][0], f"rank {hosts[other][0]}")
        found["pairs"].append({"hosts": [one, other], **figures})
    computing = [node.call(rank, "compute", timeout=PAIR_SECONDS) for rank in ranks]
    found["compute"] = [(await each).fields["seconds"] for each in computing]
    if len(ranks) == 1:
        reply = await node.call(ranks[0], "hand over", peer="beside 0", timeout=PAIR_SECONDS)
        found["hand_over"] = reply.fields["points"]
    for codec in codecs:
        coding = [node.call(rank, "code", codec=codec, timeout=PAIR_SECONDS) for rank in ranks]
        found["codecs"][codec] = [dict((await each).fields) for each in coding]
    found["races"] = [ends async for ends in _races(node, hosts, found["pairs"])]
    for rank in ranks:  # this one first: after that, the exit of another rank is no error
        await node.call(rank, "over")
    links = found["pairs"] or found["inside"] or found["local"]
    found["residual"] = max(wire_of(figures).residual for figures in links)
    found["advice"] = advice(found["residual"], processes=len(ranks), hosts=len(hosts))
    return found


async def _measure(node: ProcessNode, rank: int, peer: str) -> Figures:
    """The figures of the link between a rank and another process."""
    reply = await node.call(Address(f"rank {rank}", SERVICE), "measure", peer=peer, timeout=PAIR_SECONDS)
    return dict(reply.fields)


def advice(residual: float, *, processes: int, hosts: int) -> str:
    """Advice on a bad fit of a link, by the number of measured processes and hosts; empty if the fit is good."""
    if residual <= BAD_FIT:
        return ""
    if processes == 1:
        return (
            f"The line of the loopback is off by {residual:.0%}: two processes share cores and caches. On one machine "
            "predictions use the hand-overs instead. Leave the machine idle and probe again if other programs ran."
        )
    if hosts == 1:
        return (
            f"The line of the link inside the host is off by {residual:.0%}: its processes share cores and caches. If "
            f"workers share the cores too, probe without torchrun, by --workers {processes}: that describes the cores."
        )
    return (
        f"The line of a link is off by {residual:.0%}: something else used it or its hosts. Probe again when they are "
        "idle; if it stays, write the link's bandwidth and latency into the file by hand, and expect predictions to be "
        "off by as much."
    )


def disturbance(runs: Figures) -> str:
    """Signs in the short runs of one machine that other programs disturbed them; empty if there are none."""
    sigma = described_steps(runs["steps"]).sigma
    lost = [name for name in ("all_reduce", "gradient") if runs[name] == 0]
    if sigma <= WIDEST and not lost:
        return ""
    seen = f"no cost of {lost[0]} was measurable" if lost else f"the logarithms of steps spread by {sigma:.2f}"
    return f"Other programs used the cores: {seen}. Leave the machine idle and probe again; this file predicts badly."


async def _races(
    node: ProcessNode, hosts: Sequence[Sequence[int]], pairs: Sequence[Figures]
) -> AsyncIterator[tuple[float, float]]:
    """Ends of two messages sent at once to each host: by the next two hosts, or by two processes of the next host."""
    firsts = [members[0] for members in hosts]
    count = len(hosts)
    if count == 1:
        return
    size = max(size for figures in pairs for size, *_ in figures["points"])
    for number, first in enumerate(firsts):
        one, other = firsts[(number + 1) % count], firsts[(number + 2) % count]
        peers = [f"rank {one}", f"rank {other}" if other != first else f"beside {one}"]
        host = Address(f"rank {first}", SERVICE)
        reply = await node.call(host, "race", peers=peers, size=size, count=-(-RACES // count), timeout=PAIR_SECONDS)
        for earlier, later in reply.fields["rounds"]:
            yield earlier, later


def partners(world: int) -> Iterator[tuple[int, int]]:
    """Pairs of hosts at distances 1, 2, 4, ...: each host has several partners, and their number grows slowly.

    >>> list(partners(4))
    [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (1, 3)]
    """
    met = set()
    distance = 1
    while distance < world:
        for one in range(world):
            pair = (one, (one + distance) % world)
            if frozenset(pair) not in met:
                met.add(frozenset(pair))
                yield pair
        distance *= 2


def table(cluster: Cluster, found: Figures) -> Table:
    """The constants of the cluster as a table for people."""
    from rich.table import Table

    from dure.core import units

    shown = Table(box=None, pad_edge=False, show_header=False)
    shown.add_row("Hosts", str(len(found["hosts"])))
    for kind in cluster.machines:
        link, inside = kind.link or cluster.link, kind.inside or cluster.inside
        of = "" if len(cluster.machines) == 1 else f" of {kind.count}"
        shown.add_row(f"Link{of}", f"{units.as_rate(link.bandwidth)}, latency {units.as_seconds(link.latency)}")
        if kind.workers > 1:
            text = f"{units.as_memory_rate(inside.bandwidth)}, latency {units.as_seconds(inside.latency)}"
            shown.add_row(f"Between the {kind.workers} workers of a host{of}", text)
    shown.add_row("A message costs a core", units.as_seconds(cluster.alpha))
    shown.add_row("A byte of it", units.as_per_byte(cluster.beta))
    shown.add_row("A byte that is applied", units.as_per_byte(cluster.gamma))
    shown.add_row("Between a worker and a server beside it", units.as_memory_rate(cluster.memory_bandwidth))
    shown.add_row("Unfairness of links", f"{cluster.unfairness:.2g}")
    shown.add_row("Cores", str(cluster.machines[0].cores))
    for kind in cluster.machines if found["compute"][0] else ():
        shown.add_row("A step", units.as_seconds(kind.compute.mean(0.0)))
    for name, cost in cluster.codecs.items():
        million = {each: getattr(cost, each).value * 1e6 for each in ("encode", "decode", "combine")}
        shown.add_row(f"{name}, a million values", ", ".join(f"{key} {1e3 * s:.3g} ms" for key, s in million.items()))
    host = cluster.host
    if host is not None:
        shown.add_row("Cores that all processes share", str(host.cores))
        shown.add_row("A round of an all_reduce", units.as_seconds(host.all_reduce.start))
        shown.add_row("A round of gradients' sum", units.as_seconds(host.gradient.start))
    shown.add_row("Residual of the links", f"{found['residual']:.1%}")
    if found.get("advice"):
        shown.add_row("", found["advice"])
    return shown
