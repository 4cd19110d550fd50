import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from support.disks import fill, largest_file, small_disk

import dure
from dure.cli.main import main
from dure.job.job import load_job
from dure.report import read_run
from dure.report.files import AppendedFile

EVERYTHING = {"history.jsonl", "trace.json", "summary.json", "tensorboard"}
OPTIONS = ["--sync", "ssp", "--steps", "40", "--eval-every", "10", "--trace", "--tensorboard"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", ["virtual", "local"])
def test_a_disk_that_is_full_from_the_start_costs_the_record_and_not_the_result(tmp_path, capsys, caplog, on):
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        status = main(
            ["train", "digits-mlp", *OPTIONS, "--on", on, "--workers", "2", "--out", str(disk / "run"), "--json"]
        )
    out, errors = capsys.readouterr()
    assert status == 0, errors
    summary = json.loads(out)
    assert summary["samples"] == 2 * 40 * 32
    assert summary["unwritten"].keys() >= EVERYTHING | {"config.json"}
    assert "Traceback" not in errors
    for name in EVERYTHING:
        assert caplog.text.count(f"{name} cannot be written (No space left on device)") == 1
    assert "is not whole: config.json (No space left on device); " in errors.splitlines()[-1]


@pytest.mark.long
def test_a_disk_that_fills_up_in_between_keeps_what_was_written_before(tmp_path):
    job, steps = load_job("digits-mlp"), []

    def loss(outputs, targets):
        steps.append(1)
        if len(steps) == 60:
            fill(tmp_path / "disk")
        return torch.nn.functional.cross_entropy(outputs, targets)

    with small_disk(tmp_path / "disk", 64) as disk:
        run = dure.train(replace(job, loss=loss), on="virtual", workers=2, steps=800, eval_every=1, out=disk / "run")
        assert run.summary()["unwritten"].keys() == {"history.jsonl", "summary.json"}
        shutil.copytree(disk / "run", tmp_path / "kept")
    kept = read_run(tmp_path / "kept")
    assert 10 < len(kept.history) < len(run.history)
    assert kept.history == run.history[: len(kept.history)]


def test_a_report_for_which_there_is_no_room_costs_no_comparison(tmp_path, capsys):
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        command = ["compare", "digits-mlp", "--strategy", "bsp", "--on", "virtual", "--steps", "4", "--workers", "2"]
        assert main([*command, "--report", str(disk / "report.html"), "--json"]) == 1
    out, errors = capsys.readouterr()
    assert json.loads(out)["report"] is None
    assert json.loads(out)["runs"][0]["samples"] == 2 * 4 * 32
    assert "the report is not written" in errors


@pytest.mark.parametrize("place", ["folder", "none/file", "pipe"])
@pytest.mark.parametrize(
    "command",
    [
        "compare digits-mlp --strategy bsp --on virtual --steps 1000000 --report",
        "report folder --out",
        "plan digits-mlp --workers 2 --report",
        "rl dqn --on virtual --frames 1000000 --report",
        "probe --out",
        "reproduce sharding --out",
        "reproduce --all --out",
        "methods gpipe --draw",
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command, place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    assert main([*command.split(), place]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert place in errors.splitlines()[-1]
    assert "cannot write" in errors.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "pipe"]


def test_a_report_of_records_without_room_costs_no_table(tmp_path, capsys):
    dure.train("digits-mlp", on="virtual", workers=2, steps=2, out=tmp_path / "run")
    with small_disk(tmp_path / "disk", 64) as disk:
        fill(disk)
        assert main(["report", str(tmp_path / "run"), "--out", str(disk / "report.html"), "--json"]) == 1
    out, errors = capsys.readouterr()
    assert json.loads(out)["report"] is None
    assert json.loads(out)["runs"][0]["samples"] == 2 * 2 * 32
    assert "report.html is not written (No space left on device)" in errors.splitlines()[-1]


# ---- a file of whole records


def test_a_record_without_room_leaves_nothing_and_is_written_with_the_next(tmp_path):
    path = tmp_path / "rows"
    file = AppendedFile(path)
    file.append(b"first\n")
    with largest_file(10):
        for record in (b"second\n", b"third\n"):
            with pytest.raises(OSError, match="File too large"):
                file.append(record)
            assert path.read_bytes() == b"first\n"
    file.append(b"fourth\n")
    file.close()
    assert path.read_bytes() == b"first\nsecond\nthird\nfourth\n"


def test_closing_writes_what_was_kept_or_says_that_it_is_lost(tmp_path):
    kept, lost = AppendedFile(tmp_path / "kept"), AppendedFile(tmp_path / "lost")
    with largest_file(3):
        for file in (kept, lost):
            with pytest.raises(OSError, match="File too large"):
                file.append(b"record\n")
        with pytest.raises(OSError, match="File too large"):
            lost.close()
    kept.close()
    assert (tmp_path / "kept").read_bytes() == b"record\n"
    assert (tmp_path / "lost").read_bytes() == b""


def test_a_folder_that_is_removed_during_a_run_is_told(tmp_path):
    job, steps = load_job("digits-mlp"), []

    def loss(outputs, targets):
        steps.append(1)
        if len(steps) == 60:
            shutil.rmtree(tmp_path / "run")
        return torch.nn.functional.cross_entropy(outputs, targets)

    run = dure.train(replace(job, loss=loss), on="virtual", workers=2, steps=100, eval_every=10, out=tmp_path / "run")
    causes = run.summary()["unwritten"]
    assert causes["config.json"] == causes["history.jsonl"] == "it is not there any more"
