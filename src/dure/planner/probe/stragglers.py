"""Stragglers among the workers and hosts that `dure probe` has measured: slow steps, and slow links."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dure.planner.probe.description import measured_hosts
from dure.planner.probe.measure import Figures
from dure.planner.probe.short_runs import slow_among


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
