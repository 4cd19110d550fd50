"""All commands of the papers, run one after the other into one report."""

import os
import shlex
import sys
import time

import pytest

from dure.cli.main import main
from dure.errors import DataError
from dure_studies import every
from dure_studies.papers import Paper, PaperRow, papers

SHORT = 'dure methods "pipedream:stages=2" --draw drawing.svg'


def paper_of(*commands):
    rows = tuple(PaperRow(part=str(place), claim="c", command=each) for place, each in enumerate(commands))
    return (Paper(name="p", title="A paper", rows=rows),)


def test_a_reduced_form_has_no_flag_of_the_whole():
    assert every._reduced("dure reproduce pipelines --rounds 4000 --stages 2") == "dure reproduce pipelines --quick"
    assert every._reduced("sudo dure reproduce sharding --on namespaces") == (
        "sudo dure reproduce sharding --on namespaces --quick"
    )
    assert every._reduced("dure reproduce sharding --accuracy --rounds 9") == (
        "dure reproduce sharding --accuracy --quick"
    )
    assert every._reduced("dure train digits-mlp --steps 4000 --workers 2") == (
        "dure train digits-mlp --workers 2 --steps 100"
    )
    assert every._reduced("dure compare digits-mlp --on virtual") == "dure compare digits-mlp --on virtual --steps 100"
    assert every._reduced("dure plan digits-mlp --learn 4 --workers 4 --steps 200") == (
        "dure plan digits-mlp --learn 1 --workers 4 --steps 40"
    )
    for unchanged in (SHORT, "dure train digits-mlp --emit slurm"):
        assert every._reduced(unchanged) == unchanged


def test_each_command_appears_once_and_each_row_has_one():
    for quick in (False, True):
        found = every.commands(quick)
        assert len(found) == len(set(found))
        rows = [row.command for paper in papers() for row in paper.rows if row.command]
        assert {every._reduced(row) if quick else row for row in rows} == set(found)


def test_output_and_drawings_are_in_the_report(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(every, "papers", lambda: paper_of(SHORT, "dure methods nothing-like-it", "python bench/no.py"))
    result = every.reproduce(os.environ, out=tmp_path / "all.html")
    assert {shlex.split(row["command"])[-1]: row["state"] for row in result["rows"]} == {
        "drawing.svg": "done",
        "nothing-like-it": "failed",
        "bench/no.py": "skipped",
    }
    assert result["failed"] == ["dure methods nothing-like-it"]
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1
    assert "nothing-like-it" in page
    assert "needs bench/no.py of a checkout" in page


def test_a_name_beside_all_is_refused(capsys):
    assert main(["reproduce", "table1", "--all"]) == 2
    assert "it has no use for table1" in capsys.readouterr().err


def test_a_command_without_an_end_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(every, "LIMIT_SECONDS", 1)
    output, status = every._output([sys.executable, "-c", "import time; time.sleep(60)"], str(tmp_path), {})
    assert (output, status) == ("no end within 1 s", 124)
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    began = time.monotonic()
    assert every._output([sys.executable, "-c", child], str(tmp_path), {})[1] == 124
    assert time.monotonic() - began < 30  # the child of the command holds its pipes open


def test_a_folder_of_data_that_is_missing_is_refused(tmp_path):
    with pytest.raises(DataError, match="--data names"):
        every.reproduce({}, data=tmp_path / "none", out=tmp_path / "all.html")
