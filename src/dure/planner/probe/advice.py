"""The table of `dure probe` for people, and its advice on bad fits: residual, shape of the points, and remedy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dure.core import units
from dure.core.cost import Fit, _rounded, fit
from dure.planner.probe.description import sentence, wire_of
from dure.planner.probe.measure import Figures, Points
from dure.planner.probe.short_runs import described as described_steps
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Compute

if TYPE_CHECKING:
    from rich.table import Table


BAD_FIT = 0.1
"""Residual of a fit above which its constants are unreliable."""

BEND_POINTS = 3
"""Least number of points on each side of a bend; two points determine a line."""

BEND_GAIN = 2.0
"""Two lines replace one if they fit well, and their residual is smaller by this factor."""

WIDEST = 0.8
"""Standard deviation of the logarithms of steps above which other programs are suspected; idle cores showed 0.5."""


class Bend(NamedTuple):
    """Two lines through points: one up to `size` bytes, and one above."""

    size: int
    below: Fit
    above: Fit


def bend(points: Points) -> Bend | None:
    """The two lines that fit `points` best, by the split of their sizes; None where one line is as good."""
    points = sorted(points)
    splits = range(BEND_POINTS, len(points) - BEND_POINTS + 1)
    pairs = [(fit(points[:split]), fit(points[split:]), split) for split in splits]
    whole = fit(points).residual
    if not pairs or whole <= BAD_FIT:
        return None

    def residual(pair: tuple[Fit, Fit, int]) -> float:
        below, above, split = pair
        squares = split * below.residual**2 + (len(points) - split) * above.residual**2
        return round(math.sqrt(squares / len(points)), 4)

    best = min(reversed(pairs), key=residual)  # a point where the lines meet is on the first one
    if residual(best) > min(BAD_FIT, whole / BEND_GAIN):
        return None
    return Bend(points[best[2] - 1][0], best[0], best[1])


def shape(points: Points) -> str:
    """A sentence on points that one line does not fit."""
    found = bend(points)
    if found is None:
        return "One line does not fit its points, and two lines do not either: they scatter."
    below, above = (units.as_per_byte(float(f"{line.slopes[0]:.3g}")) for line in (found.below, found.above))
    size = _size(found.size)
    return f"One line does not fit its points: a byte takes {below} up to {size}, and {above} above."


def link_advice(subject: str, figures: Figures, *, processes: int, hosts: int) -> str:
    """Advice on a bad fit of a link, by the number of measured processes and hosts; empty if the fit is good."""
    residual = wire_of(figures).residual
    if residual <= BAD_FIT:
        return ""
    alone = [(size, statistics.mean(both)) for size, count, *both in figures["points"] if count == 1]
    seen = f"{subject}: residual {residual:.0%}. {shape(alone)}"
    if processes == 1:
        return (
            f"{seen} The two processes share cores and caches. On one machine predictions use the hand-overs "
            "instead. Leave the machine idle and probe again if other programs ran."
        )
    if hosts == 1:
        return (
            f"{seen} Its processes share cores and caches. If workers share the cores too, probe without torchrun, by "
            f"--workers {processes}: that file describes the cores."
        )
    return f"{seen} Probe again when the hosts and the link are idle. If the residual stays, {_by_hand(bend(alone))}."


def _by_hand(found: Bend | None) -> str:
    """The constants of the file that a user can replace, by the sizes of messages."""
    if found is None:
        return "write link.bandwidth and link.latency by hand, and expect predictions to be off by as much"
    rates = {"up to": found.below.slopes[0], "above": found.above.slopes[0]}
    size = _size(found.size)
    choices = [f"{_rate(slope)} for messages {place} {size}" for place, slope in rates.items() if slope > 0]
    return f"write beta: 0 and link.bandwidth by the messages of your model: {', '.join(choices)}"


def _size(nbytes: int) -> str:
    return units.as_size(nbytes) if nbytes >= 1 << 20 else f"{nbytes / 1024:g} KiB"


def _rate(slope: float) -> str:
    return units.as_rate(float(f"{1 / slope:.3g}"))


def curve_advice(kind: str, points: Points) -> str:
    """Advice on a bad fit of the curve of a collective; empty if the fit is good."""
    residual = fit(points).residual
    if residual <= BAD_FIT:
        return ""
    found = bend(points)
    cure = "Probe again when the hosts are idle."
    if found is not None:
        cure = f"A virtual run has one line for all sizes: its seconds are least exact near {_size(found.size)}."
    return (
        f"The curve of {kind}: residual {residual:.0%}. {shape(points)} {cure} Compare strategies whose predictions "
        "are closer than that by real runs."
    )


def disturbance(runs: Figures) -> str:
    """Signs in the steps of workers, and in short runs, that other programs disturbed them; empty if there are none."""
    sigma = statistics.median(described_steps([each]).sigma for each in runs["steps"])
    lost = [name for name in ("all_reduce", "gradient") if runs.get(name) == 0]
    if sigma <= WIDEST and not lost:
        return ""
    seen = f"no cost of {lost[0]} was measurable" if lost else f"the logarithms of steps spread by {sigma:.2f}"
    return f"Other programs used the cores: {seen}. Leave the machine idle and probe again; this file predicts badly."


def advice(found: Figures) -> list[str]:
    """All advice on figures: on the worst link, the worst curve of collectives, and steps; empty if all are good."""
    processes, hosts, names = len(found["compute"]), len(found["hosts"]), found["names"]
    links = [(f"The link between {' and '.join(names[i] for i in each['hosts'])}", each) for each in found["pairs"]]
    links = links or [(f"The link inside {names[each['host']]}", each) for each in found["inside"]]
    links = links or [("The loopback", each) for each in found["local"]]
    subject, worst = max(links, key=lambda link: wire_of(link[1]).residual)
    sentences = [link_advice(subject, worst, processes=processes, hosts=hosts)]
    curves = sorted(found["collectives"].items(), key=lambda curve: fit(curve[1]).residual)
    sentences += [curve_advice(kind, points) for kind, points in curves[-1:]]
    sentences.append(disturbance(found.get("runs") or {"steps": found["compute"]}))
    return [*filter(None, sentences)]


def table(cluster: Cluster, found: Figures) -> Table:
    """The constants of the cluster as a table for people."""
    from rich.table import Table

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
    for kind in cluster.machines:
        of = "" if len(cluster.machines) == 1 else f" of {kind.count}"
        shown.add_row(f"Memory of a worker{of}", units.as_size(kind.memory or 0))
        shown.add_row(f"Compute{of}", _compute(kind.compute))
    for straggler in found["stragglers"]:
        shown.add_row("Straggler", sentence(straggler))
    for name, cost in cluster.codecs.items():
        million = {each: getattr(cost, each).value * 1e6 for each in ("encode", "decode", "combine")}
        shown.add_row(f"{name}, a million values", ", ".join(f"{key} {1e3 * s:.3g} ms" for key, s in million.items()))
    host = cluster.host
    if host is not None:
        shown.add_row("Cores that all processes share", str(host.cores))
        shown.add_row("A round of an all_reduce", units.as_seconds(host.all_reduce.start))
        shown.add_row("A round of gradients' sum", units.as_seconds(host.gradient.start))
    for collective, curve in found["collectives"].items():
        shown.add_row(f"{collective} of {curve['ranks']} workers", _curve(curve))
    shown.add_row("Residual of the links", f"{found['residual']:.1%}")
    for each in found["advice"]:
        shown.add_row("Advice", each)
    return shown


def _compute(compute: Compute) -> str:
    """The mean step, or the speed in products of matrices, and the spread of a worker's steps."""
    speed = f"{units.as_flops(compute.flops_per_second)} in products of matrices"
    mean = speed if compute.seconds is None else f"a step takes {units.as_seconds(compute.seconds)}"
    return f"{mean}, spread {getattr(compute, 'sigma', 0.0):.0%}"


def _curve(curve: Mapping[str, Any]) -> str:
    """The line of a collective, and the range of predicted by measured seconds."""
    shares = [seconds / measured for seconds, (_, measured) in zip(curve["predicted"], curve["points"], strict=True)]
    line = f"{units.as_seconds(_rounded(max(curve['start'], 0.0)))} and {units.as_per_byte(_rounded(curve['byte']))}"
    return f"{line}, residual {curve['residual']:.0%}; predicted {min(shares):.2g} to {max(shares):.2g} times as long"
