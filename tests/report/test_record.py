import json
import math
import os
import sys
import threading
from contextlib import suppress

import pytest
from support.wording import raising

from dure.errors import RecordError, UsageError
from dure.report import RunFolder, read_run
from dure.report.files import from_json, replacing, to_json


def row(step, loss=0.5):
    return {"seconds": step / 10, "step": step, "samples": step * 8, "loss": loss, "accuracy": None, "bytes": step}


def write_run(path, steps=(0, 10, 20)):
    with RunFolder.create(path) as folder:
        folder.write_config({"job": "digits-mlp", "lr": 0.1}, seed=3)
        for step in steps:
            folder.append(row(step))
        folder.write_summary({"loss": 0.5, "workers": 4})
    return path


def test_what_was_written_is_read(tmp_path):
    run = read_run(write_run(tmp_path / "run"))
    assert run.config == {"job": "digits-mlp", "lr": 0.1}
    assert run.seed == 3
    assert {"python", "torch", "numpy", "dure"} <= run.versions.keys()
    assert run.history == [row(0), row(10), row(20)]
    assert run.summary() == {"loss": 0.5, "workers": 4}


def enter_and_raise(folder, error, *, rows=0):
    with suppress(UsageError, RuntimeError), folder:
        folder.write_config({"job": "digits-mlp"}, seed=3)
        for step in range(rows):
            folder.append(row(step))
        raise error


def test_a_new_run_that_is_refused_before_its_first_row_leaves_no_folder(tmp_path):
    enter_and_raise(RunFolder.create(tmp_path / "run"), UsageError("no tokens"))
    enter_and_raise(RunFolder.numbered(tmp_path, "run"), UsageError("no tokens"))
    assert not any(tmp_path.iterdir())


def test_a_folder_with_more_than_the_start_of_a_run_stays(tmp_path):
    enter_and_raise(RunFolder.create(tmp_path / "ended"), UsageError("a mistake in the job"), rows=1)
    enter_and_raise(RunFolder.create(tmp_path / "failed"), RuntimeError("a fault"))
    other = RunFolder.create(tmp_path / "other")
    (other.path / "notes.txt").touch()
    enter_and_raise(other, UsageError("no tokens"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ended", "failed", "other"]
    assert (tmp_path / "other" / "notes.txt").exists()
    with pytest.raises(UsageError, match="not empty"):
        RunFolder.create(tmp_path / "ended")


def test_numbers_that_are_not_finite_survive_as_strict_json(tmp_path):
    values = {"nan": math.nan, "up": math.inf, "list": [-math.inf, 1.5]}
    strict = json.loads(to_json(values), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert strict == {"nan": "NaN", "up": "Infinity", "list": ["-Infinity", 1.5]}
    back = from_json(to_json(values))
    assert math.isnan(back["nan"])
    assert back["up"] == math.inf
    assert back["list"] == [-math.inf, 1.5]


def test_a_row_is_on_file_before_the_run_ends(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.write_config({}, seed=None)
    folder.append(row(0))
    run = read_run(tmp_path / "run")
    assert run.history == [row(0)]
    assert run.summary()["steps"] == 0
    folder.close()


def test_a_torn_last_line_is_ignored_and_then_replaced(tmp_path):
    path = write_run(tmp_path / "run")
    with (path / "history.jsonl").open("a") as file:
        file.write('{"seconds": 3.0, "st')
    assert read_run(path).history == [row(0), row(10), row(20)]
    with RunFolder.resume(path, rows=3) as folder:
        folder.append(row(30))
    assert read_run(path).history == [row(0), row(10), row(20), row(30)]


def test_appending_to_a_torn_file_starts_a_new_line(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "history.jsonl").write_text(to_json(row(0)) + '\n{"step": 1')
    folder.append(row(2))
    folder.close()
    assert (folder.path / "history.jsonl").read_text() == f"{to_json(row(0))}\n{to_json(row(2))}\n"


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    """Rows count, not their steps: a run's last row may have the step of the row before."""
    path = write_run(tmp_path / "run", steps=(0, 10, 10))
    with RunFolder.resume(path, rows=2) as folder:
        folder.append(row(20, loss=0.25))
    run = read_run(path)
    assert run.history == [row(0), row(10), row(20, loss=0.25)]
    assert run.figures == {}


def test_a_folder_in_use_is_refused_with_what_to_do(tmp_path):
    write_run(tmp_path / "run")
    with raising(UsageError, "--out"):
        RunFolder.create(tmp_path / "run")
    with raising(UsageError, "run"):
        RunFolder.resume(tmp_path, rows=0)


def test_an_empty_folder_is_taken_and_a_file_is_not(tmp_path):
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty").checkpoints.is_dir()
    (tmp_path / "file").write_text("")
    with raising(UsageError, "folder"):
        RunFolder.create(tmp_path / "file")


@pytest.fixture
def hasty_threads():
    """Threads that change turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_of_many_runs_that_want_one_folder_one_gets_it(tmp_path):
    winners, start = [], threading.Barrier(4)

    def take():
        for number in range(150):
            start.wait()
            with suppress(UsageError):
                winners.append(RunFolder.create(tmp_path / f"{number}").path.name)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(winners) == sorted(str(number) for number in range(150))


def test_numbered_folders_never_meet(tmp_path):
    names = [RunFolder.numbered(tmp_path, "ssp:bound=3 ps:shards=2").path.name for _ in range(3)]
    assert names == [f"ssp-bound=3-ps-shards=2-00{number}" for number in (1, 2, 3)]
    (tmp_path / names[0] / "checkpoints").rmdir()
    (tmp_path / names[0]).rmdir()
    assert RunFolder.numbered(tmp_path, "ssp:bound=3 ps:shards=2").path.name not in names[1:]
    assert RunFolder.numbered(tmp_path, "../../etc").path.parent == tmp_path


def test_a_failed_write_leaves_the_old_file_and_no_draft(tmp_path):
    path = write_run(tmp_path / "run")
    before = (path / "summary.json").read_bytes()

    def write_until_the_disk_is_full():
        with replacing(path / "summary.json") as file:
            file.write('{"loss"')
            raise OSError("disk full")

    with raising(OSError, "full"):
        write_until_the_disk_is_full()
    assert (path / "summary.json").read_bytes() == before
    assert not list(path.glob(".*"))


def test_a_pipe_or_a_device_is_never_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with raising(OSError, "pipe"), replacing(tmp_path / "pipe") as file:
        file.write("{}")
    assert [(path.name, path.is_fifo()) for path in tmp_path.iterdir()] == [("pipe", True)]


def test_no_run_is_told_apart_from_a_wrong_place(tmp_path):
    with raising(UsageError, "exist"):
        read_run(tmp_path / "nowhere")
    write_run(tmp_path / "runs" / "a")
    with raising(UsageError, "runs/a"):
        read_run(tmp_path / "runs")
    with raising(UsageError, "file"):
        read_run(tmp_path / "runs" / "a" / "config.json")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("config.json", "{", "damaged"),
        ("config.json", "[1]", "object"),
        ("config.json", "{}", "required"),
        ("summary.json", "\x00\x00", "damaged"),
        ("history.jsonl", '{"seconds": 0}\n{"st\n{"seconds": 2}\n', "line 2"),
        ("history.jsonl", '{"seconds": 0}\n7\n', "line 2"),
        ("history.jsonl", b"\xff\xfe\n", "line 1"),
    ],
)
def test_damage_is_named(tmp_path, name, content, says):
    path = write_run(tmp_path / "run")
    (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with raising(RecordError, says):
        read_run(path)
