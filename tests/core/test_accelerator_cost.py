"""The costs of the collectives of accelerators against closed forms, and their bytes against a walk over the chunks."""

from __future__ import annotations

from collections import Counter

import pytest

from dure.core.accelerator_cost import ROUNDS, TREE_RATE, Levels, LinkLevel, cost, ring, tree, two_level

START = 40e-6


def levels(hosts: int, ranks: int, inside: float = 100e9, across: float = 10e9) -> Levels:
    return Levels([i // ranks for i in range(hosts * ranks)], START, LinkLevel(inside, 3e-6), LinkLevel(across, 10e-6))


def test_a_ring_on_one_host_has_the_bandwidth_inside_and_no_hop_between_hosts():
    assert ring(8 * 10**9, levels(1, 8)) == pytest.approx(START + 2 * 7 * 3e-6 + 2 * 7 / 8 * 8e9 / 100e9)


def test_a_ring_over_hosts_has_the_slower_bandwidth_and_waits_longer_for_its_hops():
    hops = ROUNDS * (2 * 28 * 3e-6 + 2 * 3 * 10e-6)
    assert ring(32 * 10**9, levels(4, 8)) == pytest.approx(START + hops + 2 * 31 / 32 * 32e9 / 10e9)


def test_one_rank_on_each_host_needs_no_link_inside():
    assert ring(10**9, levels(4, 1, inside=1.0)) == pytest.approx(START + ROUNDS * 6 * 10e-6 + 1.5e9 / 10e9)


def test_two_levels_are_rings_inside_and_over_the_cards():
    inside, across = 2 * 7 * 3e-6 + 2 * 7 / 8 * 32e9 / 100e9, 2 * 3 * 10e-6 + 2 * 3 / 4 * 32e9 / 10e9
    assert two_level(32 * 10**9, levels(4, 8)) == pytest.approx(START + inside + across)


@pytest.mark.parametrize("hosts", [2, 4, 16])
@pytest.mark.parametrize("ranks", [2, 8])
def test_two_levels_beat_a_ring_for_large_messages_only_where_the_inner_bandwidth_exceeds_hosts_times_the_cards(
    hosts, ranks
):
    nbytes, card = 10**15, 10e9
    for factor, faster in ((1.01, True), (0.99, False)):
        found = levels(hosts, ranks, inside=factor * hosts * card, across=card)
        assert (two_level(nbytes, found) < ring(nbytes, found)) is faster


def test_the_engine_takes_a_tree_for_small_messages_of_many_ranks_and_a_ring_for_large_ones():
    found = levels(128, 4)
    for nbytes, way in ((10_000, tree), (10**9, ring)):
        assert cost("all_reduce", nbytes // 4, found).seconds == way(nbytes, found)
    assert tree(10**9, found) == pytest.approx(START + 2 * 28e-6 + 7 * 50e-6 + 2e9 / (TREE_RATE * 10e9))


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


def test_the_bytes_of_a_ring_leave_a_host_once_in_each_round():
    numel = 32 * 1000
    found = cost("all_reduce", numel, levels(4, 8))
    over_cards = [found.sent[8 * h + 7] - found.local[8 * h + 7] for h in range(4)]
    assert over_cards == [2 * 31 * numel * 4 // 32] * 4
    assert sum(found.sent) - sum(found.local) == sum(over_cards)


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_a_reduce_scatter_and_an_all_gather_are_half_a_ring(kind):
    found, numel = levels(4, 8), 32 * 1000
    half = cost(kind, numel if kind == "reduce_scatter" else numel // 32, found)
    assert 2 * (half.seconds - START) == pytest.approx(ring(numel * 4, found) - START)
    assert 2 * sum(half.sent) == sum(cost("all_reduce", numel, found, algorithm="ring").sent)


def test_one_rank_sends_nothing():
    assert cost("all_reduce", 100, levels(1, 1)) == (0.0, (0,), (0,), (0,), (0,), (0,))
