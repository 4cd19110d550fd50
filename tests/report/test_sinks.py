"""Sinks: the history of a run in other tools, read back by their own readers, without a network."""

import json
import math
import struct
import sys
import time

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError
from dure.report import read_run
from dure.report.files import Unwritten
from dure.report.sinks import MLflow, Sinks, WandB

ROWS = [
    {"seconds": 0.5, "step": 20, "loss": 0.5, "accuracy": None, "bytes": 8192, "env": "Maze"},
    {"seconds": 1.5, "step": 40, "loss": 0.25, "accuracy": 0.75, "bytes": 16384, "env": "Maze"},
    {"seconds": 2.0, "step": 60, "loss": math.nan, "accuracy": 0.5, "bytes": 20000, "env": "Maze"},
]

OWN = """
import json
from pathlib import Path

class Lines:
    def __init__(self, folder, config):
        folder.mkdir()
        self.file = (folder / "lines").open("w")
        self.file.write(config["job"] + "\\n")

    def write(self, row):
        print(row["step"], row["loss"], file=self.file, flush=True)

    def close(self):
        self.file.write("closed\\n")
        self.file.close()

class Full(Lines):
    def write(self, row):
        raise OSError(28, "No space left on device")
"""


def records(content):
    """The records of a file of W&B: after 7 bytes a log of LevelDB, whose blocks have 32 KiB."""
    place, whole, block = 7, b"", 1 << 15
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def in_wandb(folder):
    """The rows and the options of the offline run in `folder`, whose file is written by another process."""
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 30
    while not any(Record.FromString(each).HasField("exit") for each in records(file.read_bytes())):
        assert time.monotonic() < end
        time.sleep(0.05)
    rows, options = [], {}
    for each in records(file.read_bytes()):
        record = Record.FromString(each)
        if record.HasField("history"):
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if name[:1] != "_"})
        if record.HasField("run"):
            options = {item.key: json.loads(item.value_json) for item in record.run.config.update}
    return rows, options


def test_wandb_has_the_numbers_of_all_rows(tmp_path):
    pytest.importorskip("wandb")
    sink = WandB(tmp_path / "wandb", {"job": "quadratic", "workers": 2})
    for row in ROWS:
        sink.write(row)
    sink.close()
    rows, options = in_wandb(tmp_path / "wandb")
    expected = [{name: value for name, value in row.items() if value is not None and name != "env"} for row in ROWS]
    assert rows[:2] == expected[:2]
    assert math.isnan(float(rows[2]["loss"]))
    assert {"job": "quadratic", "workers": 2}.items() <= options.items()


@pytest.mark.long
def test_mlflow_has_the_finite_numbers_at_the_seconds_of_the_run(tmp_path):
    pytest.importorskip("sqlalchemy")
    mlflow = pytest.importorskip("mlflow")
    for number in (1, 2):  # a resumed run adds another
        sink = MLflow(tmp_path / "run" / "mlflow", {"job": "quadratic", "out": None})
        for row in ROWS[:number] if number == 1 else ROWS:
            sink.write(row)
        sink.close()
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'run' / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("dure")
    last, first = client.search_runs([experiment.experiment_id], order_by=["start_time DESC"])
    assert (first.info.run_name, first.info.status, first.data.params) == (
        "run",
        "FINISHED",
        {"job": "quadratic", "out": "None"},
    )
    loss = client.get_metric_history(last.info.run_id, "loss")
    assert [(each.value, each.step, each.timestamp) for each in loss] == [(0.5, 20, 500), (0.25, 40, 1500)]
    assert len(client.get_metric_history(last.info.run_id, "bytes")) == 3
    assert "env" not in last.data.metrics


@pytest.mark.parametrize("extra", ["wandb", "mlflow"])
def test_a_missing_package_is_named_before_a_run(extra, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(UsageError, match=rf'--sink {extra} needs {extra} .*: pip install "dure\[{extra}\]"'):
        dure.train("quadratic", on="virtual", steps=2, out=tmp_path / "run", sinks=extra)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_sink_is_refused_before_a_run(tmp_path):
    with raising(UsageError, "wandbs"):
        dure.train("quadratic", on="virtual", steps=2, out=tmp_path / "run", sinks=["wandbs"])
    assert list(tmp_path.iterdir()) == []


def test_a_sink_of_a_users_own_gets_every_row_of_the_history(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    run = dure.train("quadratic", on="virtual", workers=2, steps=20, seed=0, out="run", sinks=["own.py:Lines"])
    lines = (tmp_path / "run" / "lines" / "lines").read_text().splitlines()
    assert lines == ["quadratic", *(f"{row['step']} {row['loss']}" for row in run.history), "closed"]
    assert len(lines) > 10
    assert read_run(tmp_path / "run").config["sinks"] == ["own.py:Lines"]


def test_a_sink_that_cannot_write_ends_no_run_and_is_named(tmp_path, monkeypatch, caplog):
    (tmp_path / "own.py").write_text(OWN)
    unwritten = Unwritten()
    sinks = Sinks(tmp_path, [f"{tmp_path}/own.py:Full", f"{tmp_path}/own.py:Lines"], {"job": "j"}, unwritten)
    for row in ROWS[:2]:
        sinks.write(row)
    sinks.close()
    assert [record.getMessage() for record in caplog.records] == ["full cannot be written (No space left on device)."]
    assert (tmp_path / "lines" / "lines").read_text().splitlines() == ["j", "20 0.5", "40 0.25", "closed"]


@pytest.mark.long
@pytest.mark.parametrize("on", ["virtual", "local"])
def test_a_run_writes_to_wandb_and_tensorboard(on, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    names = ["wandb", "tensorboard"]
    run = dure.train("quadratic", on=on, workers=2, steps=20, seed=0, out=tmp_path / "run", sinks=names, sync="ssp")
    rows, options = in_wandb(tmp_path / "run" / "wandb")
    assert [row["loss"] for row in rows] == [row["loss"] for row in run.history]
    assert options["job"] == "quadratic"
    assert len([*(tmp_path / "run" / "tensorboard").iterdir()]) == 1
