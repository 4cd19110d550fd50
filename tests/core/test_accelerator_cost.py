"""The costs of the collectives of accelerators against worked numbers (others are among the oracles)."""

from __future__ import annotations

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


def test_the_engine_takes_a_tree_for_small_messages_of_many_ranks_and_a_ring_for_large_ones():
    found = levels(128, 4)
    for nbytes, way in ((10_000, tree), (10**9, ring)):
        assert cost("all_reduce", nbytes // 4, found).seconds == way(nbytes, found)
    assert tree(10**9, found) == pytest.approx(START + 2 * (3 * 28e-6 + 7 * 50e-6) + 2e9 / (TREE_RATE * 10e9))


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


def test_a_hop_between_hosts_that_is_slower_than_a_tree_s_slows_the_tree_too():
    near, far = (Levels([0, 0, 1, 1], 0.0, LinkLevel(100e9, 3e-6), LinkLevel(10e9, hop)) for hop in (10e-6, 1.0))
    assert tree(8, far) - tree(8, near) == pytest.approx(2 * (1.0 - 50e-6))
    assert cost("all_reduce", 2, far).seconds > 2.0
