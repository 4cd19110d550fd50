"""Computes the bandwidth above which a run's codec costs more time than it saves, and the seconds of a step on links.

    with the codec       compute + coding + bytes / bandwidth
    without              compute          + bytes of float32 / bandwidth

The model adds these times. It leaves out overlap, latency and the fixed cost of a message, on both sides. `compute` is
the mean over the run's steps. `bytes` are those of a step through the busiest network card. `coding` is the time in
which a step encodes its own messages, combines the messages of all workers and decodes the result. The codec breaks
even at the bandwidth where both sums are equal: the bytes that it saves, divided by the seconds that it takes. If
workers synchronize every `period` steps, a step has its share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dure.codec.cost import cost_of, slices_of, timed
from dure.codec.exchange import combining, tallying
from dure.core.cost import CodecCost, codec_cost
from dure.core.deployment import NodeId
from dure.core.node import CodecWork
from dure.core.vectors import size
from dure.run.devices import in_summary
from dure.run.strategy import codec_name, own_cost

if TYPE_CHECKING:
    from dure.codec.base import Codec
    from dure.run.outcome import Totals
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster

BANDWIDTHS = (12.5e6, 125e6, 1.25e9, 12.5e9)
"""Bytes per second of links of 100 Mbit/s, 1, 10 and 100 Gbit/s."""


class StepBytes(NamedTuple):
    """Bytes of a step through the busiest network card: encoded, and as float32."""

    coded: float
    plain: float


def break_even_summary(setup: Setup, totals: Totals, cluster: Cluster | None) -> dict[str, Any]:
    """The entry `payoff` of the summary; empty without a codec, for one worker, and for pipelines.

    The bytes of a pipeline hold activations too, which no codec encodes.

    The cost of the codec is that of the `cluster` of a virtual run. After a real run it is measured on the CPU of this
    machine; workers on other devices encode there, at a cost that is not known.
    """
    codec = setup.codec
    rows = _rows(totals).values()
    if (
        codec is None
        or setup.workers == 1
        or setup.stages is not None
        or not rows
        or (cluster is None and in_summary(setup.devices))
    ):
        return {}
    name = codec_name(codec)
    given = {} if cluster is None else cluster.codecs
    cost = _measured(setup, codec) if cluster is None else cost_of(name, given, own_cost(codec))
    source = "measured" if cluster is None else "cluster" if name in given else "default"
    compute = totals.time["compute"] / sum(row["steps"] for row in rows)
    coding = cost.seconds(codec_works(setup, codec)) / setup.period
    sent = _by_servers(setup, totals, cluster) if setup.topology.servers else _by_collectives(setup, totals)
    links = [] if cluster is None else _links(cluster)
    return {
        "codec": name,
        "costs": source,
        "compute": compute,
        "coding": coding,
        "bytes": sent.coded,
        "bytes_fp32": sent.plain,
        "link": min(links, default=None),
        "steps": [_at(bandwidth, compute, coding, sent) for bandwidth in sorted({*BANDWIDTHS, *links})],
        "break_even": break_even(coding, sent),
    }


def _links(cluster: Cluster) -> list[float]:
    """The bandwidth of the network card of each worker."""
    machines = map(cluster.machine_of, range(cluster.workers))
    return [cluster.bandwidth_of(machine) for machine in machines]


def break_even(coding: float, sent: StepBytes) -> float | None:
    """Bytes per second below which the codec pays; None where it saves no bytes, so that it pays nowhere.

    >>> break_even(0.01, StepBytes(coded=2e6, plain=12e6))
    1000000000.0
    """
    saved = sent.plain - sent.coded
    if saved <= 0:
        return None
    return saved / coding if coding else math.inf


def codec_works(setup: Setup, codec: Codec) -> list[CodecWork]:
    """The work of coders in a step, one after another, until all workers have its result."""
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
    if codec.exchange == "all_gather":
        return [CodecWork("encode", numel), CodecWork("combine", numel, workers)]
    stripe = -(-numel // workers)
    combined = combining(stripe, workers, votes=codec.vote() is not None)
    return [CodecWork("encode", stripe, workers), *combined, CodecWork("decode", stripe, workers)]


def _at(bandwidth: float, compute: float, coding: float, sent: StepBytes) -> dict[str, float]:
    return {
        "bandwidth": bandwidth,
        "seconds": compute + coding + sent.coded / bandwidth,
        "fp32": compute + sent.plain / bandwidth,
    }


def _rows(totals: Totals) -> dict[str, dict[str, int]]:
    """The rows of workers that have reported steps and bytes: a failed worker has reported its steps only."""
    return {name: row for name, row in totals.per_worker.items() if row.get("steps") and "bytes_sent" in row}


def _by_collectives(setup: Setup, totals: Totals) -> StepBytes:
    """Bytes out of a card; as many come in at the same time. Without a codec the collective is a ring."""
    coded = max(row["bytes_sent"] / row["steps"] for row in _rows(totals).values())
    return StepBytes(coded, 2 * (setup.workers - 1) / setup.workers * _weight(setup) / setup.period)


def _by_servers(setup: Setup, totals: Totals, cluster: Cluster | None) -> StepBytes:
    """Bytes in and out, one after another: parameters are pulled after gradients were pushed.

    The busiest card is that of a machine of workers, or that of the largest shard, which has its part of the bytes of
    all workers. In a real run, each worker is taken to have a card of its own.
    """
    rows, pushed = _rows(totals), _weight(setup) / setup.period
    most = max(row["steps"] for row in rows.values())
    votes = setup.codec is not None and setup.codec.vote() is not None
    cards = _cards({name: _both(row, row["steps"], pushed, votes=votes) for name, row in rows.items()}, cluster)
    part = max(size(ranges) for ranges in setup.topology.ranges) / setup.replica.numel
    all_workers = [_both(row, most, pushed * row["steps"] / most, votes=votes) for row in rows.values()]
    cards.append(StepBytes(*(part * math.fsum(each) for each in zip(*all_workers, strict=True))))  # in any order
    return StepBytes(max(card.coded for card in cards), max(card.plain for card in cards))


def _cards(of_workers: Mapping[str, StepBytes], cluster: Cluster | None) -> list[StepBytes]:
    """The bytes through the card of each machine with workers."""
    if cluster is None:
        return list(of_workers.values())
    shared: dict[int, list[StepBytes]] = {}
    for name, sent in of_workers.items():
        shared.setdefault(cluster.machine_of(NodeId.of(name).rank), []).append(sent)
    return [StepBytes(*map(math.fsum, zip(*each, strict=True))) for each in shared.values()]


def _both(row: Mapping[str, int], steps: int, pushed: float, *, votes: bool) -> StepBytes:
    """Bytes of a worker per step: pushes are encoded; pulls are models, or verdicts if the codec `votes`."""
    pulled = pushed if votes else row["bytes_received"] / steps
    return StepBytes((row["bytes_sent"] + row["bytes_received"]) / steps, pushed + pulled)


def _weight(setup: Setup) -> int:
    return setup.replica.numel * setup.replica.params.element_size()


def _measured(setup: Setup, codec: Codec) -> CodecCost:
    """The cost of the codec on this machine for this model, on one thread, as workers compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return codec_cost(timed(codec, slices_of(setup.job)))
    finally:
        torch.set_num_threads(threads)
