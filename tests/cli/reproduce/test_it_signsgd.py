"""`dure reproduce it-signsgd` on small pictures, and its flags."""

import gzip
import json
import math
import struct
from xml.etree import ElementTree

import pytest
import torch

from dure.cli.main import main
from dure.cli.reproduce import it_signsgd
from dure.cli.reproduce.it_signsgd import METHODS, MODES, WORKERS


def write_mnist(folder):
    """Bright upper or lower halves, which two classes tell apart at once."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 200), ("t10k", 100)):
        labels = torch.randint(2, (count,), generator=generator)
        pixels = torch.randint(60, (count, 28, 28), generator=generator)
        for image, label in zip(pixels, labels, strict=True):
            image[14 * int(label) : 14 * int(label) + 14] += 150
        for name, head, body in (
            ("images-idx3-ubyte", struct.pack(">4i", 2051, count, 28, 28), pixels),
            ("labels-idx1-ubyte", struct.pack(">2i", 2049, count), labels),
        ):
            (folder / f"{part}-{name}.gz").write_bytes(gzip.compress(head + bytes(body.to(torch.uint8).flatten())))
    return folder


def test_rows_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(it_signsgd, "MODES", {mode: MODES[mode] for mode in (1, 4)})
    data = write_mnist(tmp_path)
    picture = tmp_path / "curves.svg"
    flags = ["--dataset", "mnist", "--rounds", "4", "--seeds", "2", "--data", str(data), "--out", str(picture)]
    assert main(["reproduce", "it-signsgd", "--json", *flags]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "virtual" in printed.err
    assert [(row["mode"], row["method"]) for row in result["rows"]] == [(m, name) for m in (1, 4) for name in METHODS]
    rows = {(row["mode"], row["method"]): row for row in result["rows"]}
    assert all(row["dataset"] == "mnist" and 0 <= row["spread"] < 0.5 for row in rows.values())
    assert all(rows[1, method]["accuracy"] > 0.9 for method in METHODS if method != "SGD")  # which is slower here
    numel = 784 * 64 + 64 + 64 * 10 + 10
    assert rows[4, "SGD"]["bytes_per_step"] == 4 * numel
    assert rows[4, "signSGD-MV"]["bytes_per_step"] == math.ceil(numel / 8)
    assert rows[4, "IT-signSGD (paper)"]["bytes_per_step"] == math.ceil(numel / 8)
    assert rows[4, "SGD"]["bytes_back_per_step"] == 4 * numel * 5 / 4  # with the model to start from
    for method in ("signSGD-MV", "IT-signSGD (paper)"):
        assert rows[4, method]["bytes_back_per_step"] == math.ceil(numel / 8)
    drawn = ElementTree.parse(picture).getroot()
    assert drawn.tag.endswith("svg")
    words = {each.text for each in drawn.iter() if each.text}
    assert {*METHODS, "rounds", "mnist: test accuracy"} <= words


def test_what_is_black_everywhere_is_zero(tmp_path):
    folder = write_mnist(tmp_path)
    job = it_signsgd.JOBS["mnist"](folder)
    raw = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())[16:]
    expected = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(job.train.inputs.shape) / 255
    assert torch.equal(job.train.inputs, expected)


def test_spread_is_over_seeds():
    class Run:
        def __init__(self, *accuracies):
            self.history = [{"step": 5 * (n + 1), "accuracy": each} for n, each in enumerate(accuracies)]
            self.history.insert(-1, {"step": self.history[-1]["step"], "accuracy": 0.0})  # before the last round's end

        def summary(self):
            return {"bytes_sent": 1500 * WORKERS, "bytes_received": 3000 * WORKERS}

    curve = it_signsgd.Curve.of([Run(0.1, 0.5), Run(0.1, 0.7)])
    assert (curve.rounds, curve.means) == ((5, 10), (0.1, pytest.approx(0.6)))
    assert curve.spreads == (0, pytest.approx(0.02**0.5))
    assert (curve.bytes_per_step, curve.bytes_back_per_step) == (150, 300)
    assert it_signsgd.Curve.of([Run(0.1, 0.5)]).spreads == (0, 0)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["it-signsgd", "--dataset", "mnits"], "mnist, cifar10"),
        (["it-signsgd", "--rounds", "0"], "rounds"),
        (["it-signsgd", "--seeds", "0"], "seeds"),
        (["it-signsgd", "--out", "/absent/x.svg"], "/absent"),
        (["it-signsgd", "--on", "virtual"], "--dataset"),
        (["sharding", "--rounds", "3"], "it takes --on"),
        (["it-signsgd", "--data", "/absent"], "/absent"),
    ],
)
def test_wrong_flags_are_said(flags, word, capsys):
    assert main(["reproduce", *flags]) in (1, 2)
    assert word in capsys.readouterr().err


def test_without_data_the_files_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dure.job.data.mnist.load_mnist.__defaults__", (("http://127.0.0.1:9",),))
    assert main(["reproduce", "it-signsgd", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for part in ("train-images-idx3-ubyte.gz", str(tmp_path / "mnist"), "DURE_DATA"):
        assert part in said
