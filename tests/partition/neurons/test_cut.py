"""Minimum cuts of words against all cuts, and the traffic of assignments by them."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from dure.job.models.local import LocallyConnected2d
from dure.partition.neurons.assignment import by_cut, even, minimum_cut, nets_of, shuffled, traffic, words_sent
from dure.partition.neurons.layers import UnitLayer, unit_model


def stack(height: int, width: int, channels: int, kernels: list[int]) -> list[UnitLayer]:
    shape, layers = (1, height, width), list[nn.Module]()
    for kernel in kernels:
        layers.append(LocallyConnected2d(shape, channels, kernel))
        shape = layers[-1].outputs
    return list(unit_model(nn.Sequential(*layers)).layers)


@pytest.mark.long
def test_no_division_with_the_same_ends_sends_fewer_words() -> None:
    layers = stack(5, 4, 2, [2, 2])  # grids of 4 x 3 and 3 x 2
    left, right = {(0, 0), (0, 1), (1, 0)}, {(0, 11), (1, 5), (1, 4)}
    found = minimum_cut(nets_of(layers), left, right)
    assert left <= found.left
    assert not right & found.left
    places = [(number, place) for number, layer in enumerate(layers) for place in range(layer.places)]
    free = [each for each in places if each not in left | right]

    def words(chosen: set[tuple[int, int]]) -> int:
        owners = {}
        for number, layer in enumerate(layers):
            own = torch.tensor([int((number, place) not in chosen) for place in range(layer.places)])
            owners[layer.name] = own.repeat(layer.grid[0])
        return int(sum(each.forward.sum() for each in traffic(layers, owners, 2)[:-1]))

    every = [
        words(left | {each for each, taken in zip(free, sides, strict=True) if taken})
        for sides in product((False, True), repeat=len(free))
        if sum(sides) in (4, 5, 6)
    ]
    assert found.words == words(set(found.left))
    assert found.words <= min(every)


@pytest.mark.parametrize(("height", "width", "machines"), [(10, 10, 4), (6, 16, 2), (12, 8, 3)])
def test_cuts_send_less_than_even_rows_and_random_units(height: int, width: int, machines: int) -> None:
    layers = stack(height, width, 2, [3, 3])
    words = {
        name: words_sent(traffic(layers, owners, machines)[:-1])[1]
        for name, owners in {
            "cut": by_cut(layers, machines),
            "even": even(layers, machines),
            "random": shuffled(layers, machines, 0),
        }.items()
    }
    assert words["cut"] <= words["even"] < words["random"]
    assert (words["cut"] < words["even"]) == (width >= height)
    assert words_sent(traffic(layers, by_cut(layers, machines, slack=0.1), machines)[:-1])[1] <= words["cut"]
    assert all(each.idle < 0.1 for each in traffic(layers, by_cut(layers, machines), machines)[:-1])


def test_slack_saves_words_where_a_straight_border_is_not_the_shortest() -> None:
    layers = stack(14, 14, 1, [3, 3])
    words = [words_sent(traffic(layers, by_cut(layers, 3, slack), 3)[:-1])[1] for slack in (0.0, 0.1)]
    assert words[1] < words[0]


def test_machines_divide_halves_of_the_grid_between_them() -> None:
    """A grid of 8 x 8 reads patches of 3 x 3 of one of 10 x 10: quarters read two rows and two columns of others."""
    layers = stack(12, 12, 1, [3, 3])
    found = traffic(layers, by_cut(layers, 4), 4)
    assert words_sent(found[:-1])[1] <= 2 * 10 + 2 * 10 + 8
