"""Sharding by layer against by memory, beside what the paper says."""

import json

import pytest

from dure.cli import main
from dure.models.vgg16 import convnet, vgg16
from dure.replica import Replica
from dure.reproduce.sharding import PAPER, _row
from dure.topology.sharding import imbalance, split


def test_vgg16_has_the_published_shapes():
    replica = Replica(convnet())
    assert replica.numel == 138_357_544
    largest = max(layer.numel for layer in replica.layers)
    assert largest == 7 * 7 * 512 * 4096


def test_vgg16_is_as_uneven_as_its_largest_layer():
    replica = Replica(convnet())
    for servers, uneven in ((1, 1.0), (2, 1.485), (4, 2.971), (8, 5.942)):
        assert imbalance(split(replica.layers, replica.numel, servers, by="layer")) == pytest.approx(uneven, abs=1e-3)


def test_operations_of_vgg16_are_counted_without_values():
    assert vgg16().flops_per_sample == pytest.approx(92.6e9, rel=0.01)  # three times 15.5 multiply-adds, twice each


def test_one_compute_time_explains_both_figures(capsys):
    assert main(["reproduce", "sharding", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["time"] == "virtual"
    assert "virtual" in printed.err
    ratios = {row["workers"]: row["ratio"] for row in result["rows"]}
    assert [(row["workers"], row["servers"]) for row in result["rows"]] == [(1, 1), (2, 1), (4, 2), (8, 4)]
    assert ratios[1] == ratios[2] == 1
    for workers, ratio in PAPER.items():
        assert ratios[workers] == pytest.approx(ratio, rel=0.05)
        assert result["residual"][str(workers)] == pytest.approx(ratios[workers] / ratio - 1)


@pytest.mark.parametrize(("name", "place", "word"), [("shardin", "virtual", "sharding"), ("sharding", "mars", "mars")])
def test_what_cannot_be_reproduced_is_said(name, place, word, capsys):
    assert main(["reproduce", name, "--on", place]) == 2
    assert word in capsys.readouterr().err


def test_without_communication_shards_do_not_matter():
    """The fit is to the network's part: where computing is all, the ratio tends to one."""
    assert _row(vgg16(), 8, 3000.0)["ratio"] == pytest.approx(1, abs=2e-3)
