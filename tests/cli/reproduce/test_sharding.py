"""Sharding by layer against by memory, beside what the paper says."""

import json
from itertools import accumulate, pairwise

import pytest
from support.imbalance import imbalance

from dure.cli.main import main
from dure.cli.reproduce import namespaces, sharding_real
from dure.cli.reproduce.sharding import PAPER, _row, _virtual
from dure.job.models.vgg16 import convnet, vgg16_shapes
from dure.job.replica import Layer, Replica
from dure.topology.parameter_server.placement import split


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
    expected = 92.6e9  # three times 15.5 multiply-adds, twice each
    assert vgg16_shapes().flops_per_sample == pytest.approx(expected, rel=0.01)


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
    assert _row(8, _virtual(vgg16_shapes(), 3000.0))["ratio"] == pytest.approx(1, abs=2e-3)


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_real_hosts_with_slow_links_show_it_too(monkeypatch):
    monkeypatch.setattr(sharding_real, "LAYERS", (1 << 12, 3 << 12))
    monkeypatch.setattr(sharding_real, "COMPUTE", 0.0)
    monkeypatch.setattr(sharding_real, "STEPS", 2)
    assert 0 < sharding_real.measured(2, 2, "layer") < sharding_real.RUN_SECONDS


def test_the_model_at_desk_size_has_the_shape_of_vgg16():
    assert sum(sharding_real.LAYERS) == sharding_real.MODEL
    assert max(sharding_real.LAYERS) == 0.75 * sharding_real.MODEL
    spans = [Layer("", start, stop, ()) for start, stop in pairwise(accumulate(sharding_real.LAYERS, initial=0))]
    for servers, uneven in ((1, 1.0), (2, 1.5), (4, 3.0)):
        assert imbalance(split(spans, sharding_real.MODEL, servers, by="layer")) == uneven


def test_real_rows_have_the_form_of_the_virtual_ones(monkeypatch, capsys):
    seconds = {("layer", 1): 2.0, ("layer", 2): 3.0, ("layer", 4): 6.0}
    monkeypatch.setattr(sharding_real, "measured", lambda workers, servers, by: seconds.get((by, servers), 2.0))
    assert main(["reproduce", "sharding", "--on", "namespaces", "--json"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result["time"] == "real"
    assert [(row["workers"], row["ratio"]) for row in result["rows"]] == [(1, 1.0), (2, 1.0), (4, 1.5), (8, 3.0)]
    assert "real" in printed.err
