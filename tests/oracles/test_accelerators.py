"""Collectives of accelerators: bytes against a walk over chunks, overlap against a simulation in small steps."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from dure.core.accelerator_cost import Levels, LinkLevel, cost, ring, two_level
from dure.core.step_shape import GradientTensor, StepShape
from dure.runtime.virtual.accelerators import AcceleratorEngine
from dure.runtime.virtual.buckets import Computed, end_of_step

BYTES_PER_SECOND, START = 1e9, 1e-3
DT = 2e-5


def levels(hosts: int, ranks: int, inside: float = 100e9, across: float = 10e9) -> Levels:
    return Levels([i // ranks for i in range(hosts * ranks)], START, LinkLevel(inside, 3e-6), LinkLevel(across, 10e-6))


@pytest.mark.parametrize("hosts", [2, 4, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_two_levels_beat_a_ring_for_large_messages_only_where_the_inner_bandwidth_exceeds_hosts_times_the_cards(
    hosts, ranks
):
    nbytes, card = 10**15, 10e9
    for factor, faster in ((1.01, True), (0.99, False)):
        found = levels(hosts, ranks, inside=factor * hosts * card, across=card)
        assert (two_level(nbytes, found) < ring(nbytes, found)) is faster


def walked(numel: int, hosts: int, ranks: int) -> tuple[Counter[tuple[int, int]], Counter[int]]:
    """Bytes over the link of each rank to its right in its host, and over each card, by walking over all chunks."""
    inside: Counter[tuple[int, int]] = Counter()
    cards: Counter[int] = Counter()
    own = [len(range(i, numel, ranks)) * 4 for i in range(ranks)]
    for host in range(hosts):
        for _ in range(2):  # reduce-scatter, all-gather
            for chunk in range(ranks):
                for step in range(ranks - 1):
                    inside[host, (chunk + step) % ranks] += own[chunk]
        for chunk in range(ranks):
            parts = [len(range(i, own[chunk] // 4, hosts)) * 4 for i in range(hosts)]
            for part in range(hosts):
                for step in range(hosts - 1):
                    cards[(part + step) % hosts] += 2 * parts[part] * (host == 0)
    return inside, cards


@pytest.mark.parametrize("numel", [32 * 1000, 32 * 1000 + 13])
def test_the_bytes_of_two_levels_of_4_hosts_of_8_are_exact_on_every_link(numel):
    found = cost("all_reduce", numel, levels(4, 8), algorithm="hierarchical")
    inside, cards = walked(numel, 4, 8)
    over_cards = [sum(found.sent[8 * h : 8 * h + 8]) - sum(found.local[8 * h : 8 * h + 8]) for h in range(4)]
    assert sum(found.local) == sum(inside.values())
    assert sum(over_cards) == sum(cards.values())
    if numel % 32 == 0:
        assert list(found.local) == [inside[h, r] for h in range(4) for r in range(8)]
        assert over_cards == [cards[h] for h in range(4)] == [2 * 3 * numel * 4 // 4] * 4
    assert sum(found.received) == sum(found.sent)
    assert sum(found.local_received) == sum(found.local)


def all_reduce(nbytes: float) -> float:
    return START + nbytes / BYTES_PER_SECOND


def simulated(shape, seconds, engine, groups):
    """March through a step of one rank; `groups` has the bytes of each bucket and the tensor that completes it."""
    backward = 1 - shape.backward - shape.update
    ready = [(backward + shape.backward * each.done) * seconds for each in shape.tensors]
    end = (1 - shape.update) * seconds
    waiting = [(nbytes, ready[last]) for nbytes, last in groups]
    now = work = 0.0
    left, moved = 0.0, 0.0
    while waiting or left > 0 or work < end - DT / 2:
        if left <= 0 and waiting and work >= waiting[0][1] - DT / 2:
            nbytes, _ = waiting.pop(0)
            left, moved = all_reduce(nbytes), 0.0
        if left > 0:
            work += 0.0 if moved < START else DT / (1 + engine.contention)
            left, moved = left - DT, moved + DT
        else:
            work += DT
        now += DT
    return now + shape.update * seconds


def tensors(sizes, seconds_of_blocks):
    whole = sum(seconds_of_blocks)
    done = itertools.accumulate(each / whole for each in seconds_of_blocks)
    return tuple(GradientTensor(n, size, share) for n, (size, share) in enumerate(zip(sizes, done, strict=True)))


@pytest.mark.parametrize("seed", range(8))
def test_five_blocks_end_as_in_a_simulation_of_small_steps(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1e6, 3e7, size=5).tolist()
    shape = StepShape(0.6, 0.05, tensors(sizes, rng.uniform(0.1, 1, size=5).tolist()))
    engine = AcceleratorEngine(library="ddp", bucket=1, spread=0, contention=float(rng.choice([0, 0.3])), start=START)
    bare = engine.rules._replace(tensor=0.0)
    groups = [(4 * size, n) for n, size in enumerate(sizes)]
    seconds = float(rng.uniform(0.05, 0.3))
    found = end_of_step(shape, [Computed(0.0, seconds)], 1, engine, 4, all_reduce)
    expected = simulated(shape, seconds, engine, groups) + 5 * (engine.rules.tensor - bare.tensor)
    assert found == pytest.approx(expected, abs=3e-4 + 10 * DT)
