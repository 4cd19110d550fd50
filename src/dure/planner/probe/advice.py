"""Advice on bad fits in `dure probe`: the residual, the shape of the points, and the remedy."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from dure.core import units
from dure.core.cost import Fit, fit
from dure.planner.probe.collectives import Points
from dure.planner.probe.fits import wire_of
from dure.planner.probe.measure import Figures
from dure.planner.probe.short_runs import described as described_steps

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
