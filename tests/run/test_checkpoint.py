"""Checkpoints on the disk: whole or not there, whatever happens while one is written or kept."""

from __future__ import annotations

import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from support.disks import largest_file, small_disk
from support.wording import raising

import dure
from dure.core.state import State
from dure.errors import CheckpointError, UsageError
from dure.job.job import load_job
from dure.run import checkpoint


def save(folder: Path, step: int) -> Path:
    draft = checkpoint.begin(folder, step)
    checkpoint.write_part(draft, "worker-0", State({"params": torch.full((500,), float(step))}, {"clock": step}))
    checkpoint.write_part(draft, "run", State({}, {"history": [], "text": "두레", "number": 0.1}))
    return checkpoint.commit(folder, step)


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", dedent(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(dure.__file__).parents[1])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


# ---- there and back


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_what_is_written_is_read(tmp_path, dtype):
    whole = torch.arange(24).reshape(4, 6).to(dtype)
    plain = {"lists": [[1, 2], []], "half": 0.1 + 0.2, "none": None, "large": 2**60, "text": "두레"}
    draft = checkpoint.begin(tmp_path, 7)
    checkpoint.write_part(draft, "shard-0", State({"slice": whole[1:3, ::2], "nothing": whole[:0]}, plain))
    checkpoint.commit(tmp_path, 7, {"a": 1})
    read = checkpoint.load(tmp_path)
    assert (read.step, read.passed_over) == (7, [])
    assert torch.equal(read.parts["shard-0"].tensors["slice"], whole[1:3, ::2])
    assert read.parts["shard-0"].tensors["nothing"].shape == (0, 6)
    assert read.parts["shard-0"].plain == plain


def test_the_tensors_of_a_part_are_read_once_they_are_asked_for(tmp_path):
    draft = checkpoint.begin(tmp_path, 7)
    for number in (0, 1):
        checkpoint.write_part(draft, f"worker-{number}", State({"params": torch.arange(10.0) + number}, {"clock": 7}))
    folder = checkpoint.commit(tmp_path, 7)
    parts = checkpoint.load(tmp_path).parts
    (folder / "worker-0.safetensors").unlink()
    assert parts.plain["worker-0"] == {"clock": 7}
    assert parts.read("worker-1", "params", 2, 4).tolist() == [3.0, 4.0]
    assert parts["worker-1"].tensors["params"].tolist() == [each + 1.0 for each in range(10)]
    assert parts.get("worker-2") is None
    with pytest.raises(FileNotFoundError):
        _ = parts["worker-0"]


def test_the_newest_is_read_and_the_oldest_are_removed(tmp_path):
    for step in (5, 20, 100):
        save(tmp_path, step)
    assert checkpoint.load(tmp_path).step == 100
    assert (tmp_path / "LATEST").read_text() == "step-100"
    checkpoint.prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-100", "step-20"]


def test_there_is_none(tmp_path):
    with raising(CheckpointError, "--resume"):
        checkpoint.load(tmp_path)


def test_a_draft_does_not_count(tmp_path):
    save(tmp_path, 5)
    draft = checkpoint.begin(tmp_path, 10)
    checkpoint.write_part(draft, "run", State({}, {}))
    read = checkpoint.load(tmp_path)
    assert (read.step, read.passed_over) == (5, ["step-10.tmp: not finished"])


# ---- damage


def test_a_flipped_byte_in_any_file_is_seen(tmp_path):
    """In every file, at many places: the checkpoint is passed over, and the one before is read."""
    save(tmp_path, 5)
    newest = save(tmp_path, 10)
    rng = random.Random(0)
    files = sorted(path for path in newest.iterdir())
    assert len(files) == 5
    for path in files:
        content = path.read_bytes()
        for place in {0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(30))}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << rng.randrange(7)
            path.write_bytes(damaged)
            read = checkpoint.load(tmp_path)
            assert read.step == 5, f"{path.name}, byte {place}"
            assert read.passed_over[0].startswith("step-10: ")
        path.write_bytes(content)
    assert checkpoint.load(tmp_path).step == 10


@pytest.mark.parametrize("harm", ["cut short", "emptied", "removed"])
def test_a_file_cut_short_emptied_or_removed_is_seen(tmp_path, harm):
    save(tmp_path, 5)
    for path in sorted(save(tmp_path, 10).iterdir()):
        content = path.read_bytes()
        if harm == "removed":
            path.unlink()
        else:
            path.write_bytes(content[: -1 if harm == "cut short" else 0])
        assert checkpoint.load(tmp_path).step == 5, path.name
        path.write_bytes(content)
    assert checkpoint.load(tmp_path).step == 10


def test_a_checkpoint_under_another_name_is_not_taken_for_it(tmp_path):
    save(tmp_path, 5)
    shutil.copytree(tmp_path / "step-5", tmp_path / "step-9")
    assert checkpoint.load(tmp_path).step == 5


def test_nothing_but_damage_says_what_was_found(tmp_path):
    (save(tmp_path, 5) / "run.json").write_text("{}")
    with raising(CheckpointError, "step-5"):
        checkpoint.load(tmp_path)


@pytest.mark.long
def test_nothing_is_unpickled(tmp_path):
    """A run that saves and resumes, and a checkpoint whose tensors are a pickle, where unpickling ends the process."""
    result = python(
        """
        import json, os, pickle, sys
        from pathlib import Path
        import dure
        from dure.run import checkpoint
        from dure.errors import CheckpointError
        from dure.job.job import load_job

        def hook(event, arguments):
            if event == "pickle.find_class":
                os._exit(9)

        folder = Path(sys.argv[1])
        job = load_job("digits-mlp")
        job.flops_per_sample
        sys.addaudithook(hook)
        options = {"on": "virtual", "workers": 2, "steps": 5, "checkpoint_every": 3}
        dure.train(job, strategy="ssp ps", out=folder / "run", **options)
        dure.train(job, resume=folder / "run")
        place = folder / "run" / "checkpoints"
        newest = place / "step-3"
        (newest / "worker-0.safetensors").write_bytes(pickle.dumps(Path("x")))
        manifest = json.loads((newest / "manifest.json").read_text())
        manifest.pop("xxh3")
        manifest["files"]["worker-0.safetensors"] = checkpoint._fingerprint(newest / "worker-0.safetensors")
        manifest["xxh3"] = checkpoint._own_digest(manifest)
        (newest / "manifest.json").write_text(json.dumps(manifest))
        try:
            checkpoint.load(place)
        except CheckpointError as error:
            print("refused:", error)
        """,
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert "refused: no complete checkpoint" in result.stdout
    assert "header" in result.stdout.lower()


# ---- a kill while saving


def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    result = python(
        """
        import os, random, signal, sys, time
        from pathlib import Path
        import torch
        from dure.run import checkpoint
        from dure.core.state import State

        torch.set_num_threads(1)

        def save_for_ever(folder):
            step = 0
            while True:
                step += 1
                draft = checkpoint.begin(folder, step)
                for name in ("worker-0", "worker-1", "shard-0"):
                    values = {"params": torch.full((40_000,), float(step))}
                    checkpoint.write_part(draft, name, State(values, {"clock": step}))
                checkpoint.commit(folder, step)
                checkpoint.prune(folder, 2)

        rng = random.Random(1)
        unfinished = 0
        for trial in range(200):
            if trial >= 20 and unfinished >= 5:
                break
            folder = Path(sys.argv[1]) / str(trial)
            child = os.fork()
            if not child:
                try:
                    save_for_ever(folder)
                finally:
                    os._exit(1)
            while not (folder / "LATEST").exists():
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.05))
            os.kill(child, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
            read = checkpoint.load(folder)
            assert sorted(read.parts) == ["shard-0", "worker-0", "worker-1"]
            for part in read.parts.values():
                assert part.plain == {"clock": read.step}
                assert bool((part.tensors["params"] == read.step).all())
            unfinished += any(folder.glob("*.tmp"))
        print("in the middle:", unfinished)
        """,
        str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout.rpartition(":")[2]) >= 5


# ---- a full disk


def check_previous(folder: Path, step: int) -> None:
    assert checkpoint.load(folder).step == step
    assert sorted(path.name for path in folder.iterdir()) == ["LATEST", f"step-{step}"]
    assert (folder / "LATEST").read_text() == f"step-{step}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["bsp collective", "ssp ps"])
def test_a_file_that_may_not_grow_costs_a_checkpoint_and_not_the_run(tmp_path, caplog, strategy):
    """Model files are above the limit, everything else is below it."""
    job = load_job("digits-mlp", hidden=256)
    options: dict[str, Any] = {"strategy": strategy, "on": "virtual", "workers": 2, "checkpoint_every": 5}
    dure.train(job, out=tmp_path / "run", steps=7, **options)
    with largest_file(70_000), caplog.at_level(logging.WARNING, "dure"):
        run = dure.train(job, resume=tmp_path / "run", steps=18)
    assert run.summary()["samples"] == 2 * 18 * 32
    assert [record.args[0] for record in caplog.records] == [10, 15]
    assert "File too large" in caplog.text
    check_previous(tmp_path / "run" / "checkpoints", 5)
    assert (tmp_path / "run" / "summary.json").exists()
    whole = dure.train(job, out=tmp_path / "whole", steps=18, **options)
    again = dure.train(job, resume=tmp_path / "run", steps=18)
    assert again.summary()["params_sha256"] == whole.summary()["params_sha256"]


@pytest.mark.long
def test_one_process_that_cannot_write_costs_a_real_run_a_checkpoint(tmp_path, caplog):
    """The workers' parts are above the limit, those of the servers below it."""
    with largest_file(16_000), caplog.at_level(logging.WARNING, "dure"):
        options: dict[str, Any] = {"workers": 2, "steps": 12, "checkpoint_every": 5}
        run = dure.train("digits-mlp", strategy="bsp ps:shards=4", on="local", out=tmp_path / "run", **options)
    assert run.summary()["samples"] == 2 * 12 * 32
    assert [record.args[0] for record in caplog.records] == [5, 10]
    assert "File too large" in caplog.text
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on", ["virtual", "local"])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, caplog, on):
    with small_disk(tmp_path / "disk", 160) as disk, caplog.at_level(logging.WARNING, "dure"):
        options: dict[str, Any] = {"workers": 2, "steps": 18, "checkpoint_every": 5, "eval_every": 6}
        run = dure.train("digits-mlp", strategy="ssp ps", on=on, out=disk / "run", **options)
        assert run.summary()["samples"] == 2 * 18 * 32
        assert [record.args[0] for record in caplog.records] == [10, 15]
        assert "No space left" in caplog.text
        check_previous(disk / "run" / "checkpoints", 5)
        assert len(run.history) >= 2
        shutil.copytree(disk / "run", tmp_path / "moved")
    resumed = dure.train("digits-mlp", resume=tmp_path / "moved")
    assert resumed.summary()["samples"] == 2 * 18 * 32
    if on == "virtual":
        assert resumed.summary()["params_sha256"] == run.summary()["params_sha256"]


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    job = load_job("digits-mlp")
    with raising(UsageError, "handed"):
        dure.train(job, on="local", workers=2, steps=2, out=tmp_path / "run", checkpoint_every=1)
    assert not (tmp_path / "run").exists()


def test_damaged_checkpoints_that_are_passed_over_are_named(tmp_path, caplog):
    options = {"on": "virtual", "workers": 2, "checkpoint_every": 4}
    dure.train("digits-mlp", steps=13, out=tmp_path / "run", **options)
    (newest,) = (tmp_path / "run" / "checkpoints" / "step-12").glob("worker-0.safetensors")
    newest.write_bytes(newest.read_bytes()[:100])
    dure.train("digits-mlp", resume=tmp_path / "run", steps=16)
    assert "goes on from step 8; damaged checkpoints: step-12: " in caplog.text
