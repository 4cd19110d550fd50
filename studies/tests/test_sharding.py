"""Sharding by layer against by memory, beside what the paper says."""

import json
from itertools import accumulate, pairwise
from xml.etree import ElementTree

import pytest
import torch
from support.imbalance import imbalance

from dure.cli.main import main
from dure.job.replica import Layer, Replica
from dure.job.shapes.images import vgg16
from dure.runtime.virtual.cluster import Cluster
from dure.topology.parameter_server.topology import split
from dure_studies import namespaces, sharding, sharding_accuracy, sharding_real, sharding_virtual
from dure_studies.sharding import PAPER, _row
from dure_studies.sharding_virtual import Course


def test_vgg16_has_the_published_shapes():
    replica = Replica(vgg16().model())
    assert replica.numel == 138_357_544
    largest = max(layer.numel for layer in replica.layers)
    assert largest == 7 * 7 * 512 * 4096


def test_vgg16_is_as_uneven_as_its_largest_layer():
    replica = Replica(vgg16().model())
    for servers, uneven in ((1, 1.0), (2, 1.485), (4, 2.971), (8, 5.942)):
        assert imbalance(split(replica.layers, replica.numel, servers, by="layer")) == pytest.approx(uneven, abs=1e-3)


def test_operations_of_vgg16_are_counted_without_values():
    expected = 92.6e9  # three times 15.5 multiply-adds, twice each
    assert vgg16().flops_per_sample == pytest.approx(expected, rel=0.01)


def printed_result(capsys, *flags):
    assert main(["reproduce", "sharding", "--json", *flags]) == 0
    printed = capsys.readouterr()
    return json.loads(printed.out.splitlines()[-1]), printed.err


def test_one_compute_time_explains_both_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sharding, "TIMES", (2.0, 4.0))
    monkeypatch.setattr(sharding_virtual, "STEPS", 4)
    monkeypatch.setattr(sharding_virtual, "SERVERS", (4,))
    picture = tmp_path / "sharding.svg"
    result, shown = printed_result(capsys, "--sync", "bsp", "--hosts", "paired", "--out", str(picture))
    assert result["time"] == "virtual"
    assert "virtual" in shown
    rows = {row["workers"]: row for row in result["rows"]}
    assert [(row["workers"], row["servers"]) for row in result["rows"]] == [(1, 1), (2, 1), (4, 2), (8, 4)]
    assert rows[1]["ratio"] == rows[2]["ratio"] == 1
    (fit,) = result["fits"]
    assert (fit["sync"], fit["hosts"]) == ("bsp", "paired")
    for workers, ratio in PAPER.items():
        assert rows[workers]["ratio"] == pytest.approx(ratio, rel=0.06)
        assert fit["residual"][str(workers)] == pytest.approx(rows[workers]["ratio"] / ratio - 1)
        samples = workers * rows[1]["layer"] / rows[workers]["layer"]
        assert rows[workers]["speedups"]["layer"] == pytest.approx(samples)
    words = {each.text for each in ElementTree.parse(picture).iter() if each.text}
    assert {"bsp: virtual speed-up", "hosts: paired", "by layer", "by memory"} <= words


def test_servers_carry_what_they_hold(monkeypatch):
    monkeypatch.setattr(sharding_virtual, "STEPS", 2)
    monkeypatch.setattr(sharding_virtual, "SERVERS", (1, 4))
    jobs = {"VGG-16": vgg16(), "equal layers": sharding_virtual.equal_layers()}
    found = sharding_virtual.rows_by_servers(jobs, "downpour", "separate", 3.0)
    one, uneven, _, equal = found
    assert [(row["model"], row["servers"]) for row in found] == [(model, n) for model in jobs for n in (1, 4)]
    loads = uneven["layer"]["card_bytes"]
    assert sum(loads) == pytest.approx(2 * 8 * 4 * 138_357_544, rel=1e-3)  # each worker pushes and pulls all of it
    assert max(loads) / sum(loads) == pytest.approx(7 * 7 * 512 * 4096 / 138_357_544, abs=1e-3)
    assert uneven["memory"]["card_bytes"] == pytest.approx([sum(loads) / 4] * 4, rel=1e-3)
    assert one["memory"]["seconds"] > uneven["layer"]["seconds"] > uneven["memory"]["seconds"]
    assert equal["layer"]["seconds"] == pytest.approx(equal["memory"]["seconds"], rel=1e-3)
    assert equal["layer"]["card_bytes"] == pytest.approx(equal["memory"]["card_bytes"], rel=1e-3)


def test_the_work_of_a_server_is_told_apart_from_its_messages(monkeypatch):
    monkeypatch.setattr(sharding_virtual, "STEPS", 2)
    monkeypatch.setattr(sharding_virtual, "SERVERS", (1,))
    (row,) = sharding_virtual.rows_by_servers({"VGG-16": vgg16()}, "bsp", "separate", 3.0)
    work = row["memory"]["seconds"] - row["memory"]["seconds_without_updates"]
    assert work == pytest.approx(8 * 4 * 138_357_544 * Cluster().gamma, rel=0.01)


def test_two_workers_behind_one_card_share_it():
    separate, paired = (sharding_virtual.cluster(4, hosts, 1.0) for hosts in ("separate", "paired"))
    assert [separate.machine_of(worker) for worker in range(4)] == [0, 1, 2, 3]
    assert [paired.machine_of(worker) for worker in range(4)] == [0, 0, 1, 1]
    assert sharding_virtual.cluster(1, "paired", 1.0).workers == 1


def write_cifar10(folder):
    """Images of one colour for each of two classes."""
    draw = torch.Generator().manual_seed(0)
    for name, count in (("data_batch_1", 64), ("test_batch", 20)):
        labels = [i % 2 for i in range(count)]
        images = (torch.randint(100, (3072,), generator=draw) + 150 * label for label in labels)
        records = (bytes([label]) + bytes(image.tolist()) for label, image in zip(labels, images, strict=True))
        place = folder / "cifar-10-batches-bin" / f"{name}.bin"
        place.parent.mkdir(exist_ok=True)
        place.write_bytes(b"".join(records))
    return folder


def test_both_cuts_reach_the_same_parameters(tmp_path, capsys):
    flags = ("--accuracy", "--rounds", "2", "--seeds", "2", "--data", str(write_cifar10(tmp_path)))
    result, shown = printed_result(capsys, *flags)
    assert "virtual" in shown
    assert "2 of 2" in shown
    rows = {(row["sync"], row["split"]): row for row in result["accuracy"]}
    assert list(rows) == [(sync, by) for sync in ("bsp", "downpour") for by in ("layer", "memory")]
    layer, memory = rows["bsp", "layer"], rows["bsp", "memory"]
    assert layer["digests"] == memory["digests"]
    assert layer["digests"][0] != layer["digests"][1]
    assert layer["seconds"] > 1.3 * memory["seconds"] > 1.3 * sharding_accuracy.COMPUTE
    assert rows["downpour", "memory"]["staleness"] > layer["staleness"] == 0


def test_the_small_network_is_as_uneven_as_vgg16():
    replica = Replica(sharding_accuracy.network())
    assert 0.7 < max(layer.numel for layer in replica.layers) / replica.numel < 0.85


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--sync", "ssp"], "'ssp'"),
        (["--hosts", "shared"], "'shared'"),
        (["--rounds", "3"], "--rounds"),
        (["--accuracy", "--hosts", "paired"], "--hosts"),
        (["--accuracy", "--seeds", "0"], "seeds"),
        (["--on", "namespaces", "--accuracy"], "--accuracy"),
        (["--out", "nowhere/figure.svg"], "nowhere"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, word, capsys):
    assert main(["reproduce", "sharding", *flags]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(("name", "place", "word"), [("shardin", "virtual", "sharding"), ("sharding", "mars", "mars")])
def test_what_cannot_be_reproduced_is_said(name, place, word, capsys):
    assert main(["reproduce", name, "--on", place]) == 2
    assert word in capsys.readouterr().err


def test_without_communication_shards_do_not_matter():
    """The fit is to the network's part: where computing is all, the ratio tends to one."""
    course = Course(vgg16(), "bsp", "separate", 3000.0)
    assert _row(8, course.seconds)["ratio"] == pytest.approx(1, abs=2e-3)


@pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing())
def test_real_hosts_with_slow_links_show_it_too(monkeypatch):
    monkeypatch.setattr(sharding_real, "LAYERS", (1 << 12, 3 << 12))
    monkeypatch.setattr(sharding_real, "COMPUTE", 0.0)
    monkeypatch.setattr(sharding_real, "STEPS", 2)
    assert 0 < sharding_real.measured("bsp")(2, 2, "layer") < sharding_real.RUN_SECONDS


def test_the_model_at_desk_size_has_the_shape_of_vgg16():
    assert sum(sharding_real.LAYERS) == sharding_real.MODEL
    assert max(sharding_real.LAYERS) == 0.75 * sharding_real.MODEL
    spans = [Layer("", start, stop, ()) for start, stop in pairwise(accumulate(sharding_real.LAYERS, initial=0))]
    for servers, uneven in ((1, 1.0), (2, 1.5), (4, 3.0)):
        assert imbalance(split(spans, sharding_real.MODEL, servers, by="layer")) == uneven


def test_real_rows_have_the_form_of_the_virtual_ones(tmp_path, monkeypatch, capsys):
    seconds = {("layer", 1): 2.0, ("layer", 2): 3.0, ("layer", 4): 6.0}
    monkeypatch.setattr(
        sharding_real, "measured", lambda _: lambda workers, servers, by: seconds.get((by, servers), 2.0)
    )
    result, shown = printed_result(capsys, "--on", "namespaces", "--out", str(tmp_path / "real.svg"))
    assert result["time"] == "real"
    assert [(row["workers"], row["ratio"]) for row in result["rows"]] == [(1, 1.0), (2, 1.0), (4, 1.5), (8, 3.0)]
    assert "real" in shown
