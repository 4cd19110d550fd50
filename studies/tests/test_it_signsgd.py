"""`dure reproduce it-signsgd` on small pictures, and its flags."""

import dataclasses
import gzip
import json
import math
import struct
from xml.etree import ElementTree

import pytest
import torch

from dure.cli.main import main
from dure.job.job import load_job
from dure.run.train import train
from dure_studies import it_signsgd, it_signsgd_sweep
from dure_studies.it_signsgd import METHODS, MODES, Curve
from dure_studies.it_signsgd_sweep import OpenChoice
from dure_studies.vote_rounds import Learned, VoteTrial, learn


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


def test_rows_and_picture(tmp_path, capsys):
    data = write_mnist(tmp_path)
    picture = tmp_path / "curves.svg"
    flags = ["--dataset", "mnist", "--rounds", "4", "--seeds", "2", "--data", str(data), "--out", str(picture)]
    assert main(["reproduce", "it-signsgd", "--json", *flags]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert "virtual" in printed.err
    assert [(row["mode"], row["method"]) for row in result["rows"]] == [(m, name) for m in MODES for name in METHODS]
    rows = {(row["mode"], row["method"]): row for row in result["rows"]}
    assert all(row["dataset"] == "mnist" and 0 <= row["spread"] < 0.5 for row in rows.values())
    assert all(rows[1, method]["accuracy"] > 0.9 for method in METHODS if method != "SGD")  # which is slower here
    numel = 784 * 32 + 32 + 32 * 10 + 10
    assert rows[4, "SGD"]["bytes_per_step"] == 4 * numel
    assert rows[4, "signSGD-MV"]["bytes_per_step"] == math.ceil(numel / 8)
    assert rows[4, "IT-signSGD (paper)"]["bytes_per_step"] == math.ceil(numel / 8)
    assert rows[4, "SGD"]["bytes_back_per_step"] == 4 * numel
    for method in ("signSGD-MV", "IT-signSGD (paper)"):
        assert rows[4, method]["bytes_back_per_step"] == math.ceil(numel / 8)
    assert all(len(row["accuracies"]) == each["of"] == 2 for row in result["rows"] for each in result["statements"])
    assert "mnist: IT-signSGD is within 1 point of the majority in mode 1" in printed.err
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
    curve = Curve.of([Learned({5: 0.1, 10: 0.5}, 100, 200), Learned({5: 0.1, 10: 0.7}, 200, 400)])
    assert (curve.rounds, curve.means, curve.finals) == ((5, 10), (0.1, pytest.approx(0.6)), (0.5, 0.7))
    assert curve.spreads == (0, pytest.approx(0.02**0.5))
    assert (curve.bytes_per_step, curve.bytes_back_per_step) == (150, 300)
    assert Curve.of([Learned({5: 0.1, 10: 0.5}, 1, 1)]).spreads == (0, 0)


def test_statements_are_counted_over_seeds():
    votes = {1: (0.905, 0.92), 2: (0.91, 0.91), 3: (0.92, 0.90), 4: (0.91, 0.92)}
    finals = {("mnist", mode, "signSGD-MV"): (0.9, 0.9) for mode in MODES}
    finals |= {("mnist", mode, "SGD"): (0.95, 0.95 - mode / 100) for mode in MODES}
    finals["mnist", 4, "signSGD-MV"] = (0.88, 0.88)
    finals |= {("mnist", mode, vote): votes[mode] for mode in MODES for vote in it_signsgd.VOTES}
    found = {each["statement"]: each["holds"] for each in it_signsgd.statements(finals)}
    for vote in it_signsgd.VOTES:
        assert [found[f"mnist: {vote} {claim}"] for claim in it_signsgd.CLAIMS] == [1, 2, 1, 2, 1]
    assert found["mnist: signSGD-MV loses more than SGD from mode 1 to 4"] == 1


@pytest.mark.parametrize(
    "codec", ["fp32", "sign:zeros=random", "it-sign:granularity=coordinate,zeros=random,start=2", "it-sign:start=2"]
)
def test_loop_has_the_accuracies_and_bytes_of_a_virtual_run(codec):
    job = dataclasses.replace(load_job("digits-mlp"), split="dirichlet:alpha=1")
    trial = VoteTrial(codec=codec, lr=0.02, batch_sizes=(4, 4, 16), split="dirichlet:alpha=1")
    learned = learn(job, trial, rounds=8, every=3, seed=1)
    options = {"workers": 3, "batch_sizes": trial.batch_sizes, "steps": 8, "eval_every": 3, "seed": 1, "exact": True}
    run = train(job, sync="bsp", topology="ps", codec=codec, lr=trial.lr, on="virtual", **options)
    accuracies = {int(row["step"]): row["accuracy"] for row in run.history}
    assert {step: accuracies[step] for step in (3, 6, 8)} == learned.accuracies
    assert run.summary()["bytes_sent"] == pytest.approx(learned.bytes_per_step * 8 * 3)


def test_strong_worker_has_the_least_error_rates_and_often_the_largest_weight():
    codec = "it-sign:granularity=coordinate,zeros=random,start=20"
    trial = VoteTrial(codec=codec, lr=0.003, batch_sizes=(4,) * 6 + (64,))
    learned = learn(load_job("digits-mlp"), trial, rounds=40, every=40, seed=0)
    assert learned.errors[-1] == min(learned.errors) < 0.3 < min(learned.errors[:-1])
    assert learned.leading[-1] == max(learned.leading) > 0.3
    assert sum(learned.leading) == pytest.approx(1)


def test_row_of_a_choice_has_leads_and_counts_of_seeds():
    def pairs(*leads):
        return [(Learned({9: 0.5 + lead}, 1, 1, (0.4,) * 14 + (0.2,), (0.05,) * 14 + (0.3,)), even) for lead in leads]

    even = Learned({9: 0.5}, 1, 1)
    row = it_signsgd_sweep._row("mnist", "default", OpenChoice(), pairs(0.0, 0.25, -0.25), pairs(0.25, 0.125, -0.125))
    assert row["lead_even"] == 0
    assert row["lead"] == pytest.approx(0.25 / 3)
    assert (row["ahead"], row["ranking"], row["majority"]) == (2, 1, 0.5)
    assert (row["error_small"], row["error_large"]) == (pytest.approx(0.4), pytest.approx(0.2))
    assert row["leading"] == pytest.approx(0.3)


def test_sweep_runs_each_choice(tmp_path, monkeypatch, capsys):
    kept = ("start 10", "weights per worker")
    monkeypatch.setattr(it_signsgd_sweep, "CHOICES", {each: it_signsgd_sweep.CHOICES[each] for each in kept})
    data = write_mnist(tmp_path)
    flags = ["--sweep", "--rounds", "2", "--seeds", "1", "--data", str(data)]
    assert main(["reproduce", "it-signsgd", "--json", *flags]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert sorted(row["choice"] for row in result["rows"]) == sorted(kept)
    assert all(row["lead"] == 0 for row in result["rows"] if row["per_coordinate"])  # no weights within 10 rounds
    assert "in all seeds under 0 of 1 choices" in printed.err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["it-signsgd", "--dataset", "mnits"], "mnist, cifar10"),
        (["it-signsgd", "--rounds", "0"], "rounds"),
        (["it-signsgd", "--seeds", "0"], "seeds"),
        (["it-signsgd", "--out", "/absent/x.svg"], "/absent"),
        (["it-signsgd", "--on", "virtual"], "--dataset"),
        (["sharding", "--rounds", "3"], "no use for --rounds"),
        (["it-signsgd", "--data", "/absent"], "/absent"),
    ],
)
def test_wrong_flags_are_said(flags, word, capsys):
    assert main(["reproduce", *flags]) in (1, 2)
    assert word in capsys.readouterr().err


def test_without_data_the_files_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dure_jobs.data.mnist.load_mnist.__defaults__", (("http://127.0.0.1:9",),))
    assert main(["reproduce", "it-signsgd", "--data", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    for part in ("train-images-idx3-ubyte.gz", str(tmp_path / "mnist"), "DURE_DATA"):
        assert part in said
