"""Cutting flat parameters into shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.imbalance import imbalance
from support.wording import raising

from dure.core.vectors import equal_ranges, gather, pieces, size
from dure.errors import StrategyError
from dure.topology.parameter_server.choice import SPLITS, ParameterServer, Split
from dure.topology.parameter_server.topology import LAST_KEY, held_by, shard_of_key, split


@dataclass(frozen=True)
class Layer:
    start: int
    stop: int


def layers_of(sizes: list[int]) -> list[Layer]:
    bounds = [sum(sizes[:count]) for count in range(len(sizes) + 1)]
    return [Layer(*bound) for bound in pairwise(bounds)]


def vgg16() -> list[int]:
    """Weights and bias of every layer of VGG-16 with 1,000 classes."""
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    sizes = [size for a, b in pairwise(widths) for size in (9 * a * b, b)]
    for a, b in [(512 * 49, 4096), (4096, 4096), (4096, 1000)]:
        sizes += [a * b, b]
    return sizes


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 100, 101])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_equal_ranges_cover_and_differ_by_at_most_one(numel: int, parts: int) -> None:
    ranges = equal_ranges(numel, parts)
    assert len(ranges) == parts
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(numel))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), max_size=9),
    shards=st.integers(1, 7),
    by=st.sampled_from(SPLITS),
    bound=st.integers(1, 13),
)
def test_every_element_is_on_one_shard(sizes: list[int], shards: int, by: Split, bound: int) -> None:
    numel = sum(sizes)
    held = split(layers_of(sizes), numel, shards, by, bound=bound)
    assert len(held) == shards
    elements = [index for ranges in held for start, stop in ranges for index in range(start, stop)]
    assert sorted(elements) == list(range(numel))
    assert all(all(one[1] < other[0] for one, other in pairwise(ranges)) for ranges in held), "not joined, not in order"
    assert all(start < stop for ranges in held for start, stop in ranges)
    flat = torch.arange(numel)
    again = torch.full_like(flat, -1)
    for ranges in held:
        taken = iter(torch.split(gather(flat, ranges), [stop - start for start, stop in ranges]) if ranges else ())
        for start, stop in ranges:
            again[start:stop] = next(taken)
    assert again.equal(flat)
    if by == "memory":
        assert max(map(size, held)) - min(map(size, held)) <= 1
        assert max(map(size, split([], numel, 2 * shards))) == -(-max(map(size, held)) // 2)
    if shards == 1:
        assert held == [[(0, numel)] if numel else []]


def test_layers_stay_whole_and_neighbors_are_joined() -> None:
    sizes = [10, 2, 3, 9]
    assert split(layers_of(sizes), 24, 2, "layer") == [[(0, 12)], [(12, 24)]]
    assert split(layers_of(sizes), 24, 3, "layer") == [[(0, 10)], [(15, 24)], [(10, 15)]]


def test_keys_are_cut_into_equal_ranges_and_the_last_has_what_is_left() -> None:
    for shards in range(1, 70):
        width = LAST_KEY // shards
        for shard in range(shards):
            assert shard_of_key(shard * width, shards) == shard
            assert shard_of_key((shard + 1) * width - 1, shards) == shard
        assert shard_of_key(LAST_KEY, shards) == shards - 1
    assert any(LAST_KEY // shards * shards < LAST_KEY for shards in range(1, 70)), "no key was left over"


@pytest.mark.parametrize("shards", range(1, 9))
@pytest.mark.parametrize("layers", [1, 5, 6, 7, 12, 100])
def test_by_keys_every_server_has_as_many_layers(layers: int, shards: int) -> None:
    held = split(layers_of([1] * layers), layers, shards, "keys")
    counts = list(map(size, held))
    assert max(counts) - min(counts) <= 1
    assert [ranges[0][0] for ranges in held if ranges] == sorted(ranges[0][0] for ranges in held if ranges)
    assert all(len(ranges) <= 1 for ranges in held), "layers of a server are not neighbors"


def test_hybrid_cuts_large_layers_evenly_and_sends_small_ones_where_their_number_says() -> None:
    sizes = [10, 9, 0, 25, 3]
    expected: list[list[int]] = [[], [], []]
    for number, layer in enumerate(layers_of(sizes)):
        elements = list(range(layer.start, layer.stop))
        if len(elements) < 10:
            expected[(number * 9973) % 3] += elements
        else:
            cuts = {10: [4, 3, 3], 25: [9, 8, 8]}[len(elements)]
            for shard, count in enumerate(cuts):
                expected[shard] += elements[sum(cuts[:shard]) : sum(cuts[:shard]) + count]
    held = split(layers_of(sizes), 47, 3, "hybrid", bound=10)
    assert [[index for start, stop in ranges for index in range(start, stop)] for ranges in held] == expected
    assert [(number * 9973) % 3 for number in (1, 4)] == [1, 1]
    assert split(layers_of(sizes), 47, 3, "hybrid") == [[(0, 10), (19, 44)], [(10, 19), (44, 47)], []]


@pytest.mark.parametrize(
    ("shards", "keys", "hybrid"), [(1, 1.000, 1.000), (2, 1.958, 1.012), (4, 3.643, 1.015), (8, 6.078, 1.026)]
)
def test_vgg16_by_keys_and_by_the_hybrid_rule(shards: int, keys: float, hybrid: float) -> None:
    """By keys, the last server has the last tensors: of two, all from the ninth convolution on."""
    layers = layers_of(vgg16())
    assert imbalance(split(layers, 138_357_544, shards, "keys")) == pytest.approx(keys, abs=6e-4)
    assert imbalance(split(layers, 138_357_544, shards, "hybrid")) == pytest.approx(hybrid, abs=6e-4)


@pytest.mark.parametrize(("shards", "expected"), [(1, 1.000), (2, 1.485), (4, 2.971), (8, 5.942)])
def test_vgg16_by_layer_is_as_uneven_as_published_sizes_say(shards: int, expected: float) -> None:
    sizes = vgg16()
    assert sum(sizes) == 138_357_544
    held = split(layers_of(sizes), sum(sizes), shards, "layer")
    assert imbalance(held) == pytest.approx(expected, abs=6e-4)
    assert imbalance(split([], sum(sizes), shards)) == pytest.approx(1.0, abs=1e-7)


def test_gather_and_pieces_take_the_ranges_in_order() -> None:
    flat = torch.arange(10)
    assert gather(flat, [(1, 3), (6, 9)]).tolist() == [1, 2, 6, 7, 8]
    assert gather(flat, []).tolist() == []
    views = pieces(flat, [(1, 3), (6, 9)])
    assert views[1].data_ptr() == flat[6:].data_ptr()
    assert size([(1, 3), (6, 9)]) == 5


def test_nonsense_is_refused() -> None:
    with raising(StrategyError, "got 0"):
        split([], 10, 0)
    with raising(StrategyError, "row"):
        split([], 10, 2, "row")  # type: ignore[arg-type]
    assert held_by(ParameterServer(10), [], 10) == split([], 10, 10)
    with raising(StrategyError, "11"):
        held_by(ParameterServer(11), [], 10)
