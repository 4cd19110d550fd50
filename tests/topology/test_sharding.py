"""Cutting flat parameters into shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from dure.errors import StrategyError
from dure.topology.sharding import equal_ranges, gather, imbalance, pieces, size, split


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


@pytest.mark.parametrize("by", ["memory", "layer"])
@pytest.mark.parametrize("sizes", [[5, 1, 0, 7, 3], [1], [], [4, 4, 4, 4], [0, 2]])
@pytest.mark.parametrize("shards", [1, 2, 3, 6])
def test_every_element_is_on_one_shard(by: str, sizes: list[int], shards: int) -> None:
    held = split(layers_of(sizes), sum(sizes), shards, by)  # type: ignore[arg-type]
    assert len(held) == shards
    elements = [index for ranges in held for start, stop in ranges for index in range(start, stop)]
    assert sorted(elements) == list(range(sum(sizes)))
    assert all(ranges == sorted(ranges) and all(a < b for a, b in ranges) for ranges in held)


def test_layers_stay_whole_and_neighbors_are_joined() -> None:
    sizes = [10, 2, 3, 9]
    assert split(layers_of(sizes), 24, 2, "layer") == [[(0, 12)], [(12, 24)]]
    assert split(layers_of(sizes), 24, 3, "layer") == [[(0, 10)], [(15, 24)], [(10, 15)]]


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
    with pytest.raises(StrategyError, match="shards counts servers and must be >= 1, got 0"):
        split([], 10, 0)
    with pytest.raises(StrategyError, match="got 'row'"):
        split([], 10, 2, "row")  # type: ignore[arg-type]
