"""Studies: figures of settings by seed, statements counted over seeds, and their picture."""

import math

import pytest

from dure.errors import UsageError
from dure.runtime.virtual.cluster import Cluster
from dure_studies.study import FigureColumn, Setting, Statement, Study


def settings():
    return {
        "bsp": Setting("bsp ps", Cluster.uniform(2), options={"lr": 0.1}),
        "half": Setting("bsp ps", Cluster.uniform(2), options={"lr": 0.1}, share=0.5),
        "wild": Setting("bsp ps", Cluster.uniform(2), options={"lr": 1e9}),
    }


STUDY = Study(
    name="example",
    about="digits-mlp.",
    job="digits-mlp",
    settings=settings,
    rounds=20,
    target=0.3,
    statements=(
        Statement("more steps take longer", lambda rows: rows["bsp"]["seconds"] > rows["half"]["seconds"]),
        Statement("seed 1 alone", lambda rows: rows["bsp"]["seed"] == 1),
        Statement("a run that diverged wins", lambda rows: rows["wild"]["accuracy"] > rows["bsp"]["accuracy"]),
        Statement("a run that diverged is faster", lambda rows: rows["wild"]["seconds"] < rows["bsp"]["seconds"]),
    ),
)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return STUDY.reproduce(seeds=2, out=tmp_path_factory.mktemp("study") / "example.svg")


def test_each_setting_is_measured_with_each_seed(result):
    assert [(row["setting"], row["seed"]) for row in result["rows"]] == [
        (name, seed) for name in settings() for seed in range(2)
    ]


def test_steps_are_a_share_of_the_rounds(result):
    whole, half = (next(row for row in result["rows"] if row["setting"] == name) for name in ("bsp", "half"))
    assert whole["seconds"] == pytest.approx(2 * half["seconds"], rel=0.2)


def test_statements_are_counted_over_seeds(result):
    assert [(each["holds"], each["of"]) for each in result["statements"]] == [(2, 2), (1, 2), (0, 2), (0, 2)]
    assert result["statements"][1]["by_seed"] == [False, True]


def test_a_run_that_diverged_says_so(result):
    wild = next(row for row in result["rows"] if row["setting"] == "wild")
    assert wild["why"] == "diverged"
    assert wild["accuracy"] == 0.0
    assert math.isinf(wild["seconds_to_target"])


def test_the_table_has_settings_and_statements(result, capsys):
    from rich.console import Console

    Console(width=150).print(STUDY.table(result))
    shown = capsys.readouterr().out
    assert "diverged: 2 of 2" in shown
    assert "more steps take longer" in shown
    assert "2 of 2" in shown


def test_the_picture_has_a_line_for_each_setting(result):
    from pathlib import Path

    assert Path(result["picture"]).read_text(encoding="utf-8").count("half") == 1


def test_a_mean_without_all_seeds_is_not_shown():
    rows = [{"x": 1.0}, {"x": math.inf}]
    assert FigureColumn("x", "x", "{:.1f}").cell(rows) == "not reached: 1 of 2"


def test_a_folder_in_place_of_a_picture_is_refused_before_the_training(tmp_path):
    with pytest.raises(UsageError, match="it is a folder"):
        STUDY.reproduce(out=tmp_path)


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"seeds": 0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(UsageError, match="must be at least 1, got 0"):
        STUDY.reproduce(**wrong)
