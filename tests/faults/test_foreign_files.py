"""Files of a run that hold something else than dure wrote: one sentence names the file, and nothing waits for ever."""

import json
import os
import shutil

import pytest
import xxhash
from safetensors.torch import load_file, save_file
from support.real_runs import Trial, configured
from support.wording import raising

import dure
from dure.cli.main import main
from dure.core.state import State
from dure.errors import DureError, RecordError
from dure.report import read_run
from dure.report.trace import timeline
from dure.run import checkpoint

DEEP = b"[" * 100_000
CONTENTS = {
    "nothing": b"",
    "invalid UTF-8": b"\xff\xfe",
    "a list": b"[1]",
    "null": b"null",
    "nested too deep": DEEP,
    "objects nested too deep": b'{"a":' * 100_000,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run in virtual time over servers, and one on processes over collectives, with checkpoints 2 and 4."""
    place = tmp_path_factory.mktemp("made")
    options = {"workers": 2, "steps": 4, "checkpoint_every": 2}
    dure.train("digits-mlp", strategy="ssp ps", on="virtual", out=place / "virtual", **options)
    dure.train("digits-mlp", strategy="bsp", on="local", out=place / "local", **options)
    return place


@pytest.fixture
def runs(made, tmp_path):
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs"


def said(error, command, capsys):
    """What the command says on standard error, where it ends with status `error` and without a traceback."""
    capsys.readouterr()
    assert main([str(word) for word in command]) == error
    errors = capsys.readouterr().err
    assert "Traceback" not in errors
    return errors.splitlines()[-1]


# ---- records


@pytest.mark.long
@pytest.mark.parametrize("name", ["config.json", "summary.json"])
@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_record_that_is_none_is_named(runs, name, content, capsys):
    (runs / "virtual" / name).write_bytes(content)
    assert str(runs / "virtual" / name) in said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["summary.json", "history.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_refused(runs, name, kind, capsys):
    path = runs / "virtual" / name
    path.unlink()
    os.mkfifo(path) if kind == "pipe" else path.mkdir()
    line = said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)
    assert f"{path} cannot be read" in line


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("config.json", {"seed": "x"}, "seed should be a valid integer, and holds 'x'"),
        ("config.json", {"versions": [1]}, "versions should be a valid dictionary, and holds '[1]'"),
        ("config.json", {"config": 3}, "config should be a valid dictionary, and holds '3'"),
        ("summary.json", {"staleness": {"histogram": [1]}}, "staleness.histogram should be a valid dictionary"),
        ("summary.json", {"loss": "low"}, "loss should be a valid number, and holds 'low'"),
        ("summary.json", {"workers": [2]}, "workers should be a valid integer"),
        ("summary.json", {"strategy": 7}, "strategy"),
        ("summary.json", {"graph": {"edges": "all"}}, "graph."),
        ("summary.json", {"payoff": {"steps": [{"bandwidth": "fast"}]}}, "payoff.steps.0.bandwidth"),
    ],
)
def test_a_wrong_type_is_named(runs, name, change, says, capsys):
    path = runs / "virtual" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    line = said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)
    assert f"{path} is not what dure wrote: {says}" in line


@pytest.mark.parametrize("row", ['{"seconds": "soon"}', '{"step": 3}', '{"seconds": 1, "accuracy": [0.5]}', "[" * 9999])
def test_a_row_of_wrong_types_is_named(runs, row, capsys):
    path = runs / "virtual" / "history.jsonl"
    path.write_text(f"{path.read_text()}{row}\n")
    number = len(path.read_text().splitlines())
    line = said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)
    assert f"line {number} of {path}" in line


def test_numbers_that_json_cannot_hold_are_read(runs):
    path = runs / "virtual" / "history.jsonl"
    path.write_text(f'{path.read_text()}{{"seconds": 1e400, "step": 9, "loss": NaN}}\n')
    assert read_run(runs / "virtual").history[-1]["seconds"] == float("inf")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["config.json", "history.jsonl"])
def test_a_record_larger_than_any_run_writes_is_not_read(runs, name, capsys):
    with (runs / "virtual" / name).open("r+b") as file:
        file.truncate(1 << 40)
    line = said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)
    assert f"{runs / 'virtual' / name} cannot be read: it has more than 268,435,456 bytes" in line


@pytest.mark.timeout(60)
def test_a_trace_that_is_none_is_named(tmp_path):
    path = tmp_path / "trace.json"
    for content in (None, b'{"ph": 1}\n', b'{"ph"' * 9, b'{"ph": "X", "cat": "compute", "name": 3}\n', b"\xff"):
        path.unlink(missing_ok=True)
        os.mkfifo(path) if content is None else path.write_bytes(content)
        with raising(RecordError, "wrote"):
            timeline(path)


CONTROLS = "\x1b[31m\x1b]0;title\x07\r\u202e\x9b2J"


@pytest.mark.long
def test_control_characters_of_a_record_do_not_reach_the_terminal(runs, capsys):
    for name in ("config.json", "summary.json"):
        path = runs / "virtual" / name
        path.write_text(
            json.dumps(json.loads(path.read_text(), parse_int=int), ensure_ascii=True).replace(
                "ssp", f"ssp{json.dumps(CONTROLS)[1:-1]}"
            )
        )
    assert main(["report", str(runs / "virtual"), "--out", str(runs / "r.html")]) == 0
    shown = capsys.readouterr()
    page = (runs / "r.html").read_text(encoding="utf-8")
    assert "ssp\\x1b[31m" in page
    for text in (shown.out, shown.err, page):
        assert not set(CONTROLS) & set(text) - set("[31m]0;title2J")
    (runs / "virtual" / "config.json").write_text(json.dumps({"config": CONTROLS}))
    line = said(1, ["report", runs / "virtual", "--out", runs / "r.html"], capsys)
    assert "\\x1b[31m" in line
    assert not {"\x1b", "\x07", "\r", "\u202e", "\x9b"} & set(line)


# ---- checkpoints


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
def test_a_manifest_that_is_none_leaves_the_older_checkpoint(tmp_path, content):
    for step in (1, 2):
        draft = checkpoint.begin(tmp_path, step)
        checkpoint.write_part(draft, "run", State({}, {"history": []}))
        checkpoint.commit(tmp_path, step)
    (tmp_path / "step-2" / "manifest.json").write_bytes(content)
    read = checkpoint.load(tmp_path)
    assert read.step == 1
    assert read.passed_over[0].startswith("step-2: ")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", "run.json", "run.safetensors"])
def test_a_pipe_in_a_checkpoint_leaves_the_older_one(tmp_path, name):
    for step in (1, 2):
        draft = checkpoint.begin(tmp_path, step)
        checkpoint.write_part(draft, "run", State({}, {"history": []}))
        checkpoint.commit(tmp_path, step)
    (tmp_path / "step-2" / name).unlink()
    os.mkfifo(tmp_path / "step-2" / name)
    assert checkpoint.load(tmp_path).step == 1


def two_checkpoints(folder):
    for step in (1, 2):
        draft = checkpoint.begin(folder, step)
        checkpoint.write_part(draft, "run", State({}, {"history": []}))
        checkpoint.commit(folder, step)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.json", "run.safetensors"])
def test_a_file_of_another_size_than_in_the_manifest_is_not_read(tmp_path, name):
    two_checkpoints(tmp_path)
    with (tmp_path / "step-2" / name).open("r+b") as file:
        file.truncate(1 << 40)  # a terabyte without data on the disk: minutes to read
    read = checkpoint.load(tmp_path)
    assert read.step == 1
    assert read.passed_over == [f"step-2: {name} is damaged: it does not match the manifest"]


@pytest.mark.parametrize(
    "files",
    [
        {"../step-1/run.json": "run.json"},
        {"/etc/passwd": "run.json"},
        {"run.json": "run.json"},
        {"run.json": {"size": -1, "xxh3": ""}},
        {"run.json": {"size": "1"}},
        {"run.json": 3},
        ["run.json"],
    ],
)
def test_a_manifest_whose_names_or_sizes_are_wrong_leaves_the_older_checkpoint(tmp_path, files):
    two_checkpoints(tmp_path)
    path = tmp_path / "step-2" / "manifest.json"
    manifest = json.loads(path.read_text())
    if isinstance(files, dict):
        files = {
            name: manifest["files"].get(as_in, as_in) if isinstance(as_in, str) else as_in
            for name, as_in in files.items()
        }
    manifest["files"] = files
    del manifest["xxh3"]
    manifest["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())
    path.write_text(json.dumps(manifest))
    read = checkpoint.load(tmp_path)
    assert read.step == 1
    assert read.passed_over[0].startswith("step-2: ")


def rewrite(folder, part, *, plain=None, tensors=None):
    """Replace a part of every checkpoint in `folder`, and make the manifests match it."""
    for path in folder.glob("step-*"):
        if plain is not None:
            (path / f"{part}.json").write_text(json.dumps(plain))
        if tensors is not None:
            save_file(tensors, path / f"{part}.safetensors")
        manifest = json.loads((path / "manifest.json").read_text())
        for name in (f"{part}.json", f"{part}.safetensors"):
            content = (path / name).read_bytes()
            manifest["files"][name] = {"size": len(content), "xxh3": xxhash.xxh3_64_hexdigest(content)}
        del manifest["xxh3"]
        manifest["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(manifest, sort_keys=True).encode())
        (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("place", "part"),
    [
        ("virtual", "run"),
        ("virtual", "shard-0"),
        ("virtual", "clock"),
        ("virtual", "worker-1"),
        ("local", "run"),
        ("local", "worker-1"),
    ],
)
@pytest.mark.parametrize("empty", ["plain", "tensors"])
def test_an_empty_part_whose_checksum_is_right_is_named(runs, place, part, empty, capsys):
    if empty == "tensors" and part in ("run", "clock"):
        pytest.skip("it has none")
    rewrite(runs / place / "checkpoints", part, **{empty: {}})
    line = said(1, ["train", "--resume", runs / place, "--steps", "6"], capsys)
    assert f'the part "{part}" of the checkpoint does not fit this run' in line


@pytest.mark.parametrize("place", ["virtual", "local"])
def test_the_checkpoint_of_another_job_is_refused_before_anything_starts(runs, place, capsys):
    other = "virtual" if place == "local" else "local"
    shutil.rmtree(runs / place / "checkpoints")
    shutil.copytree(runs / other / "checkpoints", runs / place / "checkpoints")
    rows = (runs / place / "history.jsonl").read_bytes()
    line = said(1, ["train", "--resume", runs / place, "--steps", "6"], capsys)
    assert "the checkpoint of step 4 is of another run: sync " in line
    assert (runs / place / "history.jsonl").read_bytes() == rows


@pytest.mark.long
def test_a_model_of_another_size_is_named_where_an_older_version_wrote_no_origin(runs, capsys):
    folder = runs / "local" / "checkpoints"
    tensors = load_file(folder / "step-2" / "worker-0.safetensors")
    plain = json.loads((folder / "step-2" / "run.json").read_text())
    del plain["origin"]
    rewrite(folder, "run", plain=plain)
    rewrite(folder, "worker-0", tensors={name: tensor[:-1].contiguous() for name, tensor in tensors.items()})
    line = said(1, ["train", "--resume", runs / "local", "--steps", "6"], capsys)
    assert 'the part "worker-0" of the checkpoint does not fit this run' in line


# ---- a worker that the launcher lets go


@pytest.mark.long
def test_a_worker_whose_connection_is_closed_says_why_it_ended():
    def act(trial):
        if trial.driver.steps("worker 1") > 5:
            trial.driver.node.wire.evict("worker 1", 0, "a test has closed its connection")

    trial = Trial(configured("waits_now_and_then", "bsp", workers=2, steps=4000))
    with raising(DureError, "connection"):
        trial.run(act)
