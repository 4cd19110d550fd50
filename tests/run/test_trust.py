"""A record names code; who resumes the run runs it only where it is what was recorded."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.wording import raising

import dure
from dure.cli.main import main
from dure.errors import UsageError

JOB = """
from pathlib import Path
from dure.job.job import load_job
Path({ran!r}).touch()
def make(hidden=8):
    return load_job("digits-mlp", hidden=hidden)
"""

METHOD = """
from dataclasses import dataclass
from pathlib import Path
from dure.sync.bsp import BSP
Path({ran!r}).touch()
@dataclass(frozen=True)
class Mine(BSP):
    pass
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with a job and a method, and a run of them in `run`; `ran` appears when either file is run."""
    ran = tmp_path / "ran"
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "job.py").write_text(JOB.format(ran=str(ran)))
    (tmp_path / "lab" / "method.py").write_text(METHOD.format(ran=str(ran)))
    monkeypatch.chdir(tmp_path)
    options = {"workers": 2, "steps": 4, "checkpoint_every": 2}
    dure.train("lab/job.py:make", sync="lab/method.py:Mine", on="virtual", out="run", **options)
    ran.unlink()
    return tmp_path


def refusal(**options):
    with pytest.raises(UsageError) as caught:
        dure.train("", resume="run", steps=6, **options)
    assert not Path("ran").exists(), "the code was run"
    return str(caught.value)


def test_a_record_has_the_place_and_the_hash_of_each_file(lab):
    code = json.loads((lab / "run" / "config.json").read_text())["code"]
    assert code.keys() == {"lab/job.py", "lab/method.py"}
    for file, said in code.items():
        assert said["path"] == str(lab / file)
        assert len(said["sha256"]) == 64
    assert code["lab/job.py"]["sha256"] != code["lab/method.py"]["sha256"]


def test_files_that_are_as_they_were_are_run(lab):
    assert dure.train("", resume="run", steps=6).summary()["steps"] == 6


@pytest.mark.sampled(1)
@pytest.mark.parametrize("file", ["lab/job.py", "lab/method.py"])
def test_a_file_that_has_changed_needs_trust(lab, file, capsys):
    with (lab / file).open("a") as code:
        code.write("# another\n")
    said = refusal()
    assert str(lab / file) in said
    assert "it has changed since the run began: its SHA-256 was " in said
    assert main(["train", "--resume", "run", "--steps", "6"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--steps", "6", "--trust"]) == 0
    assert dure.train("", resume="run", steps=8).summary()["steps"] == 8, "what was trusted is recorded"
    assert "trust" not in json.loads((lab / "run" / "config.json").read_text())["config"]


def test_a_file_of_a_job_with_parameters_is_checked_too(lab):
    job = {"workers": 2, "steps": 4, "checkpoint_every": 2, "on": "virtual", "out": "run2"}
    dure.train("lab/job.py:make:hidden=5", **job)
    assert dure.train("./lab/job.py:make:hidden=5", resume="run2", steps=6).summary()["steps"] == 6
    with raising(UsageError, "job=lab/job.py:make:hidden"):
        dure.train("lab/job.py:make:hidden=6", resume="run2", steps=8)
    (lab / "ran").unlink()
    with (lab / "lab" / "job.py").open("a") as code:
        code.write("# another\n")
    with pytest.raises(UsageError, match="it has changed since the run began"):
        dure.train("", resume="run2", steps=8)
    assert not Path("ran").exists(), "the code was run"


def test_a_file_that_lies_elsewhere_needs_trust(lab, monkeypatch):
    shutil.copytree(lab, lab.parent / "copy")
    monkeypatch.chdir(lab.parent / "copy")
    assert f"when the run began it was {lab / 'lab' / 'job.py'}" in refusal()
    assert dure.train("", resume="run", steps=6, trust=True).summary()["steps"] == 6


def test_a_file_in_the_folder_of_the_run_needs_trust(lab):
    config = json.loads((lab / "run" / "config.json").read_text())
    shutil.copy(lab / "lab" / "job.py", lab / "run" / "job.py")
    config["config"]["job"] = "run/job.py:make"
    config["code"]["run/job.py"] = {**config["code"]["lab/job.py"], "path": str(lab / "run" / "job.py")}
    (lab / "run" / "config.json").write_text(json.dumps(config))
    assert "the file lies in the folder of the run" in refusal()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("code", [{}, [], "job", {"lab/job.py": 1}, {"lab/job.py": {}}])
def test_a_record_without_hashes_needs_trust(lab, code):
    config = json.loads((lab / "run" / "config.json").read_text())
    (lab / "run" / "config.json").write_text(json.dumps({**config, "code": code}))
    assert str(lab / "lab" / "job.py") in refusal()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("strategy", "bsp other.py:Evil"),
        ("strategy", "ps other.py:Evil:period=2"),
        ("sync", "downpour+other.py:Evil"),
        ("topology", "other.py:Evil"),
        ("codec", "other.py:Evil"),
        ("partition", "other.py:Evil"),
        ("job", "other.py:a b"),
    ],
)
def test_no_option_runs_a_file_that_is_not_recorded(lab, option, text):
    (lab / "other.py").write_text((lab / "lab" / "method.py").read_text())
    config = json.loads((lab / "run" / "config.json").read_text())
    config["config"][option] = text
    (lab / "run" / "config.json").write_text(json.dumps(config))
    refusal()


def test_the_codecs_of_a_cluster_run_no_file(lab):
    cluster = lab / "run" / "cluster.yaml"
    (lab / "other.py").write_text((lab / "lab" / "method.py").read_text().replace("lab", "x"))
    cluster.write_text(cluster.read_text() + "\ncodecs:\n  other.py:Evil: {encode_seconds: 1, decode_seconds: 1}\n")
    config = json.loads((lab / "run" / "config.json").read_text())
    config["config"]["job"], config["config"]["sync"] = "digits-mlp", "bsp"
    (lab / "run" / "config.json").write_text(json.dumps(config))
    refusal()


def test_a_run_folder_may_be_resumed_from_another_folder_where_it_names_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    dure.train("digits-mlp", on="virtual", workers=2, steps=4, checkpoint_every=2, out="run")
    (tmp_path / "elsewhere").mkdir()
    os.rename("run", "elsewhere/run")
    assert dure.train("", resume="elsewhere/run", steps=6).summary()["steps"] == 6
