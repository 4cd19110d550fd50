"""Whether a run's codec pays: seconds of a step with it and without it, on links of four bandwidths.

    with       compute + coding + bytes / bandwidth
    without    compute          + bytes of float32 / bandwidth

one after another, in that model: what overlaps, latency and what a message costs by itself are left out, on both
sides. `compute` is the mean of the run's steps, and `bytes` what it sent: of a step, through the busiest card. Coding
is what a step waits for: its own messages encoded, everybody's combined, the result decoded. Both are equal, and the
codec breaks even, at the bytes that it saves over the seconds that it takes. Where workers meet every `period` steps, a
step has its share of a meeting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.codec.cost import cost_of
from dure.codec.exchange import combining, tallying
from dure.codec.timing import slices_of, timed
from dure.core.cost import CodecCost, codec_cost
from dure.core.node import CodecWork
from dure.core.ranges import size
from dure.run.strategy import codec_name

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.run.outcome import Totals
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster

BANDWIDTHS = (12.5e6, 125e6, 1.25e9, 12.5e9)
"""Bytes per second of links of 100 Mbit/s, 1, 10 and 100 Gbit/s."""


class Traffic(NamedTuple):
    """Bytes of a step through the busiest card, as they were and as float32 would have them."""

    coded: float
    plain: float


def payoff(setup: Setup, totals: Totals, cluster: Cluster | None) -> dict[str, Any]:
    """The summary's `payoff`; nothing without a codec, or without anybody to send to.

    What the codec costs is said by the `cluster` of a virtual run. After a real one it is measured, here and now.
    """
    codec = setup.codec
    rows = _rows(totals)
    if codec is None or setup.workers == 1 or not rows:
        return {}
    name = codec_name(codec)
    given = {} if cluster is None else cluster.codecs
    cost = _measured(setup, codec) if cluster is None else cost_of(name, given)
    source = "measured" if cluster is None else "cluster" if name in given else "default"
    compute = totals.time["compute"] / sum(row["steps"] for row in rows)
    coding = cost.seconds(codec_works(setup, codec)) / setup.period
    traffic = _by_servers(setup, totals) if setup.topology.servers else _by_collectives(setup, totals)
    links = [] if cluster is None else [cluster.link_of(machine).bandwidth for machine in range(cluster.workers)]
    return {
        "codec": name,
        "costs": source,
        "compute": compute,
        "coding": coding,
        "bytes": traffic.coded,
        "bytes_fp32": traffic.plain,
        "link": min(links, default=None),
        "steps": [_at(bandwidth, compute, coding, traffic) for bandwidth in sorted({*BANDWIDTHS, *links})],
        "break_even": break_even(coding, traffic),
    }


def break_even(coding: float, traffic: Traffic) -> float | None:
    """Bytes per second below which the codec pays; None where it saves no bytes, so that it pays nowhere.

    >>> break_even(0.01, Traffic(coded=2e6, plain=12e6))
    1000000000.0
    """
    saved = traffic.plain - traffic.coded
    if saved <= 0:
        return None
    return saved / coding if coding else math.inf


def codec_works(setup: Setup, codec: Codec) -> list[CodecWork]:
    """What coders do in a step, one after another, before everybody has what it brings."""
    workers, numel = setup.workers, setup.replica.numel
    if setup.topology.servers:
        sizes = [size(ranges) for ranges in setup.topology.ranges]
        voted = () if codec.vote() is None else tallying(max(sizes), workers)
        applied = () if codec.vote() is None else [CodecWork("decode", each) for each in sizes]  # at the workers
        return [
            *(CodecWork("encode", each) for each in sizes),
            CodecWork("decode", max(sizes), workers),
            *voted,
            *applied,
        ]
    if codec.way == "gather":
        return [CodecWork("encode", numel), CodecWork("combine", numel, workers)]
    stripe = -(-numel // workers)
    combined = combining(stripe, workers, votes=codec.vote() is not None)
    return [CodecWork("encode", stripe, workers), *combined, CodecWork("decode", stripe, workers)]


def _at(bandwidth: float, compute: float, coding: float, traffic: Traffic) -> dict[str, float]:
    return {
        "bandwidth": bandwidth,
        "seconds": compute + coding + traffic.coded / bandwidth,
        "fp32": compute + traffic.plain / bandwidth,
    }


def _rows(totals: Totals) -> list[dict[str, int]]:
    """Those of workers that have made steps and told what they sent: of one that died only its steps are known."""
    return [row for row in totals.per_worker.values() if row.get("steps") and "bytes_sent" in row]


def _by_collectives(setup: Setup, totals: Totals) -> Traffic:
    """Out of a card; as much comes in at the same time. Without a codec there would be a ring."""
    coded = max(row["bytes_sent"] / row["steps"] for row in _rows(totals))
    return Traffic(coded, 2 * (setup.workers - 1) / setup.workers * _weight(setup) / setup.period)


def _by_servers(setup: Setup, totals: Totals) -> Traffic:
    """In and out, one after another: parameters are pulled when gradients have been pushed.

    Either a worker's card is the busiest, or that of the largest shard, which has its part of what all workers have.
    """
    rows, pushed = _rows(totals), _weight(setup) / setup.period
    most = max(row["steps"] for row in rows)
    votes = setup.codec is not None and setup.codec.vote() is not None
    cards = [_both(row, row["steps"], pushed, votes=votes) for row in rows]
    part = max(size(ranges) for ranges in setup.topology.ranges) / setup.replica.numel
    all_workers = [_both(row, most, pushed * row["steps"] / most, votes=votes) for row in rows]
    cards.append(Traffic(*(part * math.fsum(each) for each in zip(*all_workers, strict=True))))  # in any order
    return Traffic(max(card.coded for card in cards), max(card.plain for card in cards))


def _both(row: Mapping[str, int], steps: int, pushed: float, *, votes: bool) -> Traffic:
    """Bytes of a worker per step: pushes are encoded; pulls are models, or verdicts where the codec `votes`."""
    pulled = pushed if votes else row["bytes_received"] / steps
    return Traffic((row["bytes_sent"] + row["bytes_received"]) / steps, pushed + pulled)


def _weight(setup: Setup) -> int:
    return setup.replica.numel * setup.replica.params.element_size()


def _measured(setup: Setup, codec: Codec) -> CodecCost:
    """On this machine and this model, with one thread, as workers compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return codec_cost(timed(codec, slices_of(setup.job)))
    finally:
        torch.set_num_threads(threads)
