"""The table of the figures of `dure probe` for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dure.core import units
from dure.core.cost import _rounded
from dure.planner.probe.measure import Figures
from dure.planner.probe.stragglers import sentence
from dure.runtime.virtual.cluster import Cluster
from dure.runtime.virtual.compute import Compute

if TYPE_CHECKING:
    from rich.table import Table


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
