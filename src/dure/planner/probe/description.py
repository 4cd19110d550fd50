"""The figures of `dure probe` as a `Cluster`: machines of a kind, their links, steps, memory and stragglers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from dure.core.cost import Fit, _rounded, codec_cost, fit
from dure.planner.probe.measure import Figures
from dure.planner.probe.short_runs import Steps, slow_among
from dure.planner.probe.short_runs import described as described_steps
from dure.runtime.virtual.accelerators import InsideLink
from dure.runtime.virtual.cluster import Cluster, Link, Machines, RoundCost, ServerMachines, SharedHost
from dure.runtime.virtual.compute import Compute, Constant, LogNormal

MOST_SHARE = 0.95
"""Largest share of a link that is attributed to the faster of two messages."""


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


ALIKE = 0.1
"""Hosts with as many workers whose figures differ by at most this share count as machines of one kind."""

LEAST_SPREAD = 0.01
"""Standard deviation of the logarithms of steps below which the file has constant steps."""

LEAST_WIRE = 0.05
"""Least share of a byte's time that is attributed to the link."""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """One link: seconds of half a round trip, and seconds per byte on it."""

    way: float
    per_byte: float


@dataclass(frozen=True, slots=True)
class MeasuredHost:
    """One host: its card, the `steps` of each of its workers, their inner link if there are several.

    `memory`: bytes for each worker.
    """

    card: MeasuredLink
    steps: Sequence[Steps]
    memory: int
    inside: MeasuredLink | None = None

    @property
    def workers(self) -> int:
        return len(self.steps)

    @property
    def seconds(self) -> float:
        """Mean step of the median worker."""
        return statistics.median_low(each.seconds for each in self.steps)

    def like(self, other: MeasuredHost) -> bool:
        """Whether both are machines of one kind."""
        mine, theirs = (
            (each.card.per_byte, each.seconds, each.memory, each.inside.per_byte if each.inside else 1.0)
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
    hosts = measured_hosts(found)
    ways = [link.way for host in hosts for link in (host.card, host.inside) if link is not None]
    alpha = min(statistics.median(each["cpu_message"] for each in between), *ways)
    kinds = _kinds(hosts)
    alone = sum(map(len, found["hosts"])) == 1
    cores = min(found["cores"])
    machines = [_machines(kind, alpha, cores, found["flops"]) for kind in kinds]
    if alone:
        (kind,) = machines
        machines = [kind.changed(count=workers, memory=_whole_megabytes(kind.memory or 0, workers))]
    most = max(machines, key=lambda kind: kind.count)
    inside = max((kind for kind in machines if kind.inside), key=lambda kind: kind.count, default=most).inside
    link = most.link or Link()
    if len(kinds) == 1:  # the keys of the cluster say it for all machines
        machines = [most.changed(link=None, inside=None)]
    cluster = Cluster(
        machines=machines,
        servers=ServerMachines(cores=cores),
        link=link,
        inside=inside or InsideLink(),
        alpha=_rounded(alpha),
        beta=_rounded(statistics.median(wire_of(each).slopes[0] for each in between)),
        gamma=_rounded(statistics.median(_applying(points, found.get("numel")) for points in found["apply"])),
        unfairness=_rounded(unfairness_of(found.get("races", ())), 2),
        memory_bandwidth=_rounded(1 / statistics.median(sum(wire_of(each).slopes) for each in found["local"])),
        codecs={name: codec_cost(_slowest(each)) for name, each in found.get("codecs", {}).items()},
    )
    return one_host(cluster, found, workers) if "hand_over" in found else cluster


def _applying(points: Sequence[Sequence[float]], numel: int | None) -> float:
    """Seconds per byte of an update, at the two sizes nearest to the model's: small ones stay in a core's cache."""
    if not numel:
        return fit(points).slopes[0]
    near = sorted(points, key=lambda point: abs(math.log(point[0] / (4 * numel))))[:2]
    return fit(near).slopes[0]


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
            cluster.machines[0].changed(compute=LogNormal(seconds=_rounded(own), sigma=_rounded(steps.sigma))),
        )
    rounds = {
        name: _round(runs[name], found["numel"], workers, byte)
        for name in ("all_reduce", "gradient")
        if runs is not None and runs[name] is not None
    }
    if runs is None and "all_reduce" in found["collectives"]:
        rounds = dict.fromkeys(
            ("all_reduce", "gradient"), _round_of_curve(found["collectives"]["all_reduce"], found["members"])
        )
    host = SharedHost(cores=cores, **rounds)
    link = cluster.link.changed(latency=_rounded(wake))
    return cluster.changed(host=host, link=link, alpha=_rounded(alpha), beta=_rounded(beta), **more)


def _round(seconds: float, numel: int, workers: int, byte: float) -> RoundCost:
    """Cost of a round of an all_reduce that took `seconds`. A byte costs at most `byte` seconds."""
    rounds = 2 * (workers - 1)
    byte = min(byte, seconds / rounds / (4 * numel / workers))
    return RoundCost(start=_rounded(seconds / rounds - byte * 4 * numel / workers), byte=_rounded(byte))


def _round_of_curve(points: Sequence[Sequence[float]], ranks: int) -> RoundCost:
    """Cost of a round of all_reduces that took these seconds. Of n bytes, each of K ranks sends n / K in a round."""
    line, rounds = fit(points), 2 * (ranks - 1)
    return RoundCost(start=_rounded(max(line.start, 0.0) / rounds), byte=_rounded(line.slopes[0] * ranks / rounds))


def _slowest(hosts: Sequence[Mapping[str, Sequence[tuple[int, float]]]]) -> dict[str, list[tuple[int, float]]]:
    """The time of the slowest host for each operation and size, because all hosts wait for the slowest."""
    return {
        operation: [max(same, key=itemgetter(1)) for same in zip(*(host[operation] for host in hosts), strict=True)]
        for operation in hosts[0]
    }


def measured_hosts(found: Figures) -> list[MeasuredHost]:
    """The best figures of each host: with a slower partner, the figures are those of the partner's link."""
    hosts = []
    for number, (ranks, local) in enumerate(zip(found["hosts"], found["local"], strict=True)):
        within = [figures for figures in found["inside"] if figures["host"] == number]
        outside = [figures for figures in found["pairs"] if number in figures["hosts"]] or within or [local]
        card = MeasuredLink(_way(outside), min(_on_link(wire_of(figures)) for figures in outside))
        inside = MeasuredLink(_way(within), min(sum(wire_of(figures).slopes) for figures in within)) if within else None
        steps = [described_steps([found["compute"][rank]]) for rank in ranks]
        memory = _whole_megabytes(found["memory"][number], len(ranks))
        hosts.append(MeasuredHost(card, steps, memory, inside))
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


def _whole_megabytes(nbytes: int, workers: int) -> int:
    """The share of each worker, rounded down."""
    return nbytes // workers // 10**6 * 10**6


def _machines(kind: Sequence[MeasuredHost], alpha: float, cores: int, flops: float | None) -> Machines:
    """Machines like those of `kind`; a step has `flops` operations if they are known."""
    inner = [host.inside for host in kind if host.inside is not None]
    return Machines(
        count=len(kind),
        workers=kind[0].workers,
        cores=cores,
        compute=_compute(kind, flops),
        speed=_speed(kind),
        memory=min(host.memory for host in kind),
        link=Link(**_link([host.card for host in kind], alpha)),
        inside=InsideLink(**_link(inner, alpha)) if inner else None,
    )


def _link(measured: Sequence[MeasuredLink], alpha: float) -> dict[str, Any]:
    """The bandwidth and the latency of links of one kind."""
    way, per_byte = (statistics.median(getattr(link, name) for link in measured) for name in ("way", "per_byte"))
    return {"bandwidth": _rounded(1 / per_byte), "latency": _rounded(max(way - alpha, 0.0))}


def _compute(kind: Sequence[MeasuredHost], flops: float | None) -> Compute:
    """The step of the median worker, and the median spread of a worker's steps."""
    seconds = _usual(kind)
    mean = {"seconds": _rounded(seconds)} if flops is None else {"flops_per_second": _rounded(flops / seconds)}
    sigma = _rounded(statistics.median(each.sigma for host in kind for each in host.steps), 2)
    return LogNormal(**mean, sigma=sigma) if sigma >= LEAST_SPREAD else Constant(**mean)


def _usual(kind: Sequence[MeasuredHost]) -> float:
    return statistics.median_low(each.seconds for host in kind for each in host.steps)


def _speed(kind: Sequence[MeasuredHost]) -> float | tuple[float, ...]:
    """The speed of each worker, where stragglers are among them. Others have the median worker's speed, 1."""
    slow = slow_among([each.seconds for host in kind for each in host.steps])
    workers = sum(host.workers for host in kind)
    return tuple(_rounded(1 / slow.get(worker, 1.0), 3) for worker in range(workers)) if slow else 1.0


def stragglers(found: Figures) -> list[dict[str, Any]]:
    """Workers whose mean step, and hosts whose link, is SLOW times that of the median or more.

    An entry has `slow` ("step" or "link"), `factor`, and the name of the `host`; that of a step has the `rank`.
    """
    names = found["names"]
    hosts = [number for number, ranks in enumerate(found["hosts"]) for _ in ranks]
    runs = found.get("runs")
    steps: Sequence[Sequence[float]] = found["compute"] if runs is None else runs["steps"]
    slow = slow_among([statistics.mean(each) for each in steps])
    slow_steps = [
        {"slow": "step", "rank": rank, "host": names[hosts[rank] if runs is None else 0], "factor": round(factor, 2)}
        for rank, factor in slow.items()
    ]
    if len(names) == 1:
        return slow_steps
    links = slow_among([host.card.per_byte for host in measured_hosts(found)])
    slow_links = [{"slow": "link", "host": names[host], "factor": round(factor, 2)} for host, factor in links.items()]
    return slow_steps + slow_links


def sentence(straggler: dict[str, Any]) -> str:
    """Describe a straggler.

    >>> sentence({"slow": "step", "rank": 3, "host": "node7", "factor": 2.5})
    'Steps of rank 3 on node7 take 2.5 times those of the median worker.'
    """
    if straggler["slow"] == "link":
        return f"A byte on the link of {straggler['host']} takes {straggler['factor']} times that of the median host."
    place = f"rank {straggler['rank']} on {straggler['host']}"
    return f"Steps of {place} take {straggler['factor']} times those of the median worker."
