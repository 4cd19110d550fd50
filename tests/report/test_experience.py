"""Reports, tables and progress of runs of reinforcement learning."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console
from support.outline import Outline

from dure.core.target import Target
from dure.errors import RecordError
from dure.report import FittedComparison, Progress, RunFolder, read_run
from dure.report.comparison import entries, figure_rows
from dure.report.html import render
from dure.report.labels import NOTHING, return_text, shared_job, shared_strategy
from dure.report.metrics import frame_rates

APEX = "apex:env=CartPole-v1,actors={},min_size=500"


def row(place, *, frames=1000, mean_return=10.0):
    """The row of an evaluation, as training writes it; the first one has no return of a finished episode."""
    return {
        "seconds": 0.5 * place,
        "step": 100 * place,
        "samples": 6400 * place,
        "loss": None,
        "accuracy": None,
        "bytes": 5000 * place,
        "mean_return": mean_return * place,
        "frames": frames * place,
        "episodes": 10 * place,
        "recent_return": 8.0 * place if place > 1 else None,
        "replay_size": 900 * place,
        "inserts": 900 * place,
        "replay_samples": 6400 * place,
        "replay_ratio": 6.9 + 0.05 * place,
        "param_lag": 30.0 + place,
    }


def experience(rows, actors):
    last = rows[-1]
    return {
        "env": "CartPole-v1",
        "algorithm": "apex",
        "actors": actors,
        "frames": last["frames"],
        "frames_per_second": last["frames"] / last["seconds"],
        "episodes": last["episodes"],
        "mean_return": last["mean_return"],
        "best_return": 2 * last["mean_return"],
        "recent_return": last["recent_return"],
        "replay": {"size": 3600, "inserts": 3700, "samples": 25600, "ratio": 6.919, "bytes": 200_000},
        "param_lag": {"mean": 34.0, "max": 99.0},
    }


def played(made, actors=4, *, job=APEX, time="virtual", best=None, **of_rows):
    """A finished run of reinforcement learning: a run of `made`, but without a loss and an accuracy."""
    run = made("bsp", time=time)
    rows = [row(place, **of_rows) for place in range(1, 5)]
    rows[2]["mean_return"] = best or rows[2]["mean_return"]
    nothing = dict.fromkeys(("loss", "accuracy", "best_accuracy"))
    figures = {**run.figures, **nothing, "staleness": None, "seconds": 2.0, "experience": experience(rows, actors)}
    return replace(run, config={"job": job.format(actors), "on": "virtual"}, history=rows, figures=figures)


def names(runs):
    return [entry.label for entry in entries(runs, target=Target())]


def lines(runs, target=Target()):
    groups = dict(figure_rows(entries(runs, target=target), target=target))
    return {line.name: line for line in groups.get("Experience", ())}, groups


def page(runs, target=Target()):
    return Outline(render(runs, title="Runs", target=target))


def titles(outline):
    return [value for name, value in outline.attributes if name == "aria-label"]


# ---- labels


def test_labels_tell_jobs_of_one_strategy_apart(made):
    runs = [played(made, 4), played(made, 16)]
    assert names(runs) == ["actors=4", "actors=16"]
    assert shared_job(runs) == "apex:env=CartPole-v1,min_size=500"
    assert shared_strategy(runs) == "bsp ps:shards=2", "no label has the method, so it is among what all share"
    gorila = played(made, 2, job="gorila:env=CartPole-v1,actors={}")
    assert names([*runs, gorila]) == ["apex:actors=4", "apex:actors=16", "gorila"]
    assert shared_job([*runs, gorila]) == ""


def test_labels_of_jobs_name_the_method_where_it_differs(made):
    other = replace(made("ssp:bound=3"), config={"job": APEX.format(4)})
    assert names([played(made, 4), played(made, 16), other]) == [
        "actors=4 bsp",
        "actors=16 bsp",
        "actors=4 ssp:bound=3",
    ]


def test_a_job_is_named_by_its_name_where_it_has_the_defaults(made):
    bare = played(made, job="apex")
    assert names([bare, played(made, 16)]) == ["apex", "env=CartPole-v1,actors=16,min_size=500"]
    assert names([bare, played(made, job="my job: the second")]) == ["apex", "my job: the second"]


def test_labels_do_without_jobs_where_strategies_tell_them_apart(made):
    ssp = replace(made("ssp:bound=3"), config={"job": APEX.format(16)})
    assert names([played(made, 4), ssp]) == ["bsp", "ssp:bound=3"]
    assert names([played(made, 4), played(made, 4)]) == ["bsp #1", "bsp #2"]


# ---- the page


@pytest.mark.long
def test_the_page_has_returns_and_experience_against_each_kind_of_time(made):
    outline = page([played(made, 4), played(made, 16, time="real", best=45.0)])
    returns = ("Mean return of evaluations", "Mean return of training episodes")
    amounts = ("Frames per second", "Samples per insert", "Parameter lag", "Transitions in replays")
    assert titles(outline) == [
        *(f"{name} against {x}" for x in ("virtual time", "real time", "frames") for name in returns),
        *(f"{name} against {x}" for x in ("virtual time", "real time") for name in amounts),
    ]
    text = " ".join(outline.text.split())
    assert "frames of all actors (thousands)" in text
    assert "Run Mean return Frames Sent" in text
    assert "actors=4 40 4,000 10.0 kB" in text
    assert "actors=4 reached the highest mean return of an evaluation: 40 after 2.00 s of virtual time." in text
    assert "actors=16 reached the highest mean return of an evaluation: 45 after 1.50 s of real time." in text
    assert not re.search(r"\b[Ll]oss\b|accuracy|not reached|Speed-up|diverged", text)


def without_drawings(run):
    return replace(run, history=[], figures={**run.figures, "staleness": None})


def test_a_page_has_the_sections_of_its_jobs(made):
    apex, ssp = (without_drawings(run) for run in (played(made), made("ssp")))
    no_return, no_loss = "No run recorded a history with a return.", "No run recorded a history with a loss."
    both = page([apex, ssp]).text
    assert no_return in both
    assert no_loss in both
    assert not re.search(r"[Rr]eturn|[Ff]rames|Experience|replay", page([ssp]).text)
    alone = page([apex], Target(0.5, "loss")).text
    assert no_return in alone
    assert not re.search(r"\b[Ll]oss\b|accuracy", alone)


def test_a_curve_of_values_far_from_zero_does_not_lie_on_the_edge_of_its_figure(made):
    from dure.report.figures import curves, looks

    found = entries([played(made)], target=Target())
    svg = curves(found, looks(found), x="seconds", y="replay_ratio", target=Target())
    [path] = re.findall(r'<path d="([^"]*)"[^>]*stroke: #0072b2', svg)
    heights = {float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+)", path)}
    edge = min(float(height) for height in re.findall(r"[ML] [\d.]+ ([\d.]+) \n", svg))
    assert min(heights) > edge + 5


def test_all_runs_are_in_one_figure(made):
    from dure.report.figures import curves, looks

    found = entries([played(made, actors) for actors in (4, 16, 64)], target=Target())
    given = looks(found)
    assert len({look.color for look in given}) == 3, "a colour for each job"
    svg = curves(found, given, x="frames", y="mean_return", target=Target())
    assert all(f"stroke: {look.color.lower()}" in svg for look in given)


# ---- figures


def test_figures_of_experience_have_lines(made):
    found, groups = lines([played(made, 4), played(made, 16, frames=5000, mean_return=50.0), made("ssp")])
    assert list(groups)[:2] == ["Result", "Experience"]
    shown = {name: line.cells[:2] for name, line in found.items()}
    assert shown["Environment"] == ("CartPole-v1", "CartPole-v1")
    assert shown["Actors"] == ("4", "16")
    assert shown["Frames"] == ("4,000", "20,000")
    assert shown["Frames per second"] == ("2,000", "10,000")
    assert shown["Mean return, last evaluation"] == ("40", "200")
    assert shown["Mean return, best evaluation"] == ("80", "400")
    assert shown["Transitions in replays"] == ("3,600",) * 2
    assert shown["Transitions inserted"] == ("3,700",) * 2
    assert shown["Transitions sampled"] == ("25,600",) * 2
    assert shown["Samples per insert"] == ("6.92",) * 2
    assert shown["Parameter lag, mean"] == ("34.00",) * 2
    assert shown["Parameter lag, largest"] == ("99",) * 2
    assert {line.cells[2] for line in found.values()} == {NOTHING}
    assert [found[name].best for name in ("Mean return, last evaluation", "Frames per second")] == [{1}, {1}]
    assert lines([made("bsp")])[0] == {}
    assert "Result" not in lines([played(made)])[1], "no loss, no accuracy, no time to one"


def test_a_run_that_did_not_finish_has_the_experience_of_its_history(made):
    run = replace(played(made, 4), figures={})
    rising = [*run.history, {**row(5), "mean_return": None, "frames": 6000}]
    found, _ = lines([replace(run, history=rising)])
    assert found["Mean return, last evaluation"].cells == ("40",)
    assert found["Mean return, best evaluation"].cells == ("40",)
    assert found["Frames per second"].cells == ("2,400",)
    assert found["Samples per insert"].cells == ("7.15",)
    assert found["Parameter lag, mean"].cells == ("35.00",)
    assert found["Environment"].cells == (NOTHING,)


def test_the_terminal_shows_returns_in_place_of_losses(made):
    def shown(*runs):
        out = Console(file=io.StringIO(), width=200)
        out.print(FittedComparison(runs, Target()))
        return out.file.getvalue()

    text = shown(played(made, 4), played(made, 16))
    assert re.search(r"whole run +return +best +frames +frames/s +sent", text)
    assert re.search(r"actors=16 +2\.00 s +40 +80 +4,000 +2,000 ", text)
    assert "loss" not in text
    assert re.search(r"return +best +frames +frames/s +loss", shown(played(made), made("ssp", accuracy=False)))


def test_rates_of_frames_are_of_the_intervals_between_rows():
    rows = [
        {"seconds": 0.0, "frames": 0},
        {"seconds": 2.0, "frames": 100},
        {"seconds": 4.0, "frames": 500},
        {"seconds": 4.001, "frames": 600},
        {"seconds": 5.0},
        {"seconds": 6.0, "frames": 700},
        {"seconds": 6.0, "frames": 700},
    ]
    assert [(each["seconds"], each["frames_per_second"]) for each in frame_rates(rows)] == [(2, 50), (4, 200), (6, 100)]
    assert frame_rates([{"seconds": 1.0, "loss": 0.5}]) == []


def test_returns_as_text():
    assert [return_text(each) for each in (None, 9.7, 195.32, -21.0, 12345.6)] == [
        *(NOTHING, "9.7", "195.3", "-21", "12,346")
    ]


# ---- records and sinks


def test_a_record_is_read_as_it_was_written(tmp_path, made):
    run = played(made)
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(run.config, seed=0)
        for each in run.history:
            folder.append(each)
        folder.write_summary(run.figures)
    read = read_run(tmp_path / "run")
    assert read.history == run.history
    assert read.figures["experience"] == run.figures["experience"]


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("summary.json", "experience", [1]),
        ("summary.json", "experience.env", 7),
        ("summary.json", "experience.frames", "many"),
        ("summary.json", "experience.best_return", "high"),
        ("summary.json", "experience.replay.ratio", "none"),
        ("summary.json", "experience.param_lag.max", {}),
        ("history.jsonl", "mean_return", "high"),
        ("history.jsonl", "recent_return", [1.0]),
        ("history.jsonl", "frames", "many"),
        ("history.jsonl", "param_lag", "old"),
    ],
)
def test_damage_is_named(tmp_path, made, name, path, value):
    run = played(made)
    *outer, last = path.split(".")
    record = json.loads(json.dumps(run.history[0] if name == "history.jsonl" else run.figures))
    inner = record
    for key in outer:
        inner = inner[key]
    inner[last] = value
    with RunFolder.create(tmp_path / "run") as folder:
        folder.write_config(run.config, seed=0)
    (tmp_path / "run" / name).write_text(json.dumps(record) + "\n")
    with pytest.raises(RecordError, match=rf"{name} is not what dure wrote: {path}"):
        read_run(tmp_path / "run")


def test_tensorboard_takes_the_numbers_of_a_row(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    from dure.report import TensorBoard

    sink = TensorBoard(tmp_path)
    sink.write({**row(1), "env": "CartPole-v1"})
    sink.close()
    [events] = tmp_path.iterdir()
    written = {each.tag for event in EventFileLoader(str(events)).Load() for each in event.summary.value}
    assert {"mean_return", "frames", "replay_ratio", "param_lag"} <= written
    assert not written & {"loss", "accuracy", "recent_return", "env", "seconds", "step"}


# ---- progress


@pytest.mark.parametrize("terminal", [True, False])
def test_the_progress_line_shows_the_last_return(terminal):
    clock, seconds = (lambda: seconds[0]), [0.0]
    out = Console(file=io.StringIO(), force_terminal=terminal, width=80, color_system=None)
    with Progress("apex", clock=clock, console=out, every=1.0) as progress:
        for step, mean_return in enumerate((None, 9.7, None, 195.32), start=1):
            progress.returned(mean_return)
            seconds[0] += 2
            progress.update(step, 10, 0.5, 100 * step)
    shown = out.file.getvalue()
    assert shown.index("loss 0.5") < shown.index("return 9.7") < shown.index("return 195.3")
    assert shown.rindex("loss") < shown.index("return"), "an evaluation without a return keeps the last one"
