"""Pictures of pipelines against published timetables, and their figures against those of the stage engine."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

import pytest
from support.chains import drained, play
from support.gantt_charts import picture_in
from support.purposes import soaked
from support.wording import raising

from dure.cli.drawing import PipelinePicture
from dure.errors import UsageError
from dure.partition import CATALOGUE
from dure.partition.pipeline import Pipeline
from dure.partition.programmed import Programmed
from dure.partition.schedule import Read
from dure.report.gantt import GROUND, svg, text, text_width
from dure.report.trace import ACTIONS
from dure.run.strategy import make

MORE = [
    "pipedream:sync=vertical",
    "pipedream:ahead=many",
    "pipedream:ahead=many,sync=vertical",
    "ddg:weights=current",
    "spectrain:predicts=carry",
    "zero-bubble:schedule=h2",
    "zero-bubble:schedule=v",
    "interleaved:chunks=3",
]


def drawn(name: str, batches: int | None = None, **parameters: object) -> PipelinePicture:
    given = ",".join(f"{key}={value}" for key, value in parameters.items())
    whole = f"{name}{',' if ':' in name else ':'}{given}" if given else name
    picture = PipelinePicture.of(make(whole, "partition"), whole)
    return picture if batches is None else PipelinePicture(picture.pipeline, whole, range(batches))


def ordered() -> list[str]:
    """The members that are orders of actions."""
    made = {name: make(name, "partition") for name in CATALOGUE}
    return [name for name, one in made.items() if isinstance(one, Pipeline) and not isinstance(one, Programmed)]


# ---- text


def test_the_timetable_is_in_the_notation_of_the_papers():
    assert text(drawn("pipedream", 4, stages=3).chart).splitlines() == [
        "k=1 | F1 F2 F3  .  . B1 F4 B2  . B3  . B4",
        "k=2 |  . F1 F2  . B1 F3 B2 F4 B3  . B4  .",
        "k=3 |  .  . F1 B1 F2 B2 F3 B3 F4 B4  .  .",
    ]


def test_micro_batches_count_on_and_chunks_have_primes():
    assert (
        text(drawn("zero-bubble:schedule=v", 2, stages=1, micro=1).chart)
        == "k=1 |  F1 F1' I1' W1'  I1  W1  F2 F2' I2' W2'  I2  W2"
    )


def test_a_timetable_is_folded_at_the_width():
    lines = text(drawn("gpipe", 1, stages=2, micro=3).chart, 18).splitlines()
    assert lines == ["k=1 | F1 F2 F3  .", "k=2 |  . F1 F2 F3", "", "k=1 |  . B3 B2 B1", "k=2 | B3 B2 B1  ."]


# ---- SVG


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*ordered(), *MORE])
@pytest.mark.parametrize("stages", [4, *soaked(1, 2, 8)])
def test_a_picture_shows_each_action_with_the_weights_it_reads(name, stages):
    picture = drawn(name, stages=stages)
    shown = picture_in(svg(picture.chart))
    assert (shown.unit, list(shown.rows)) == ("ticks", [f"k={rank + 1}" for rank in range(stages)])
    found = [[(round(bar.start, 2), round(bar.end, 2), *bar.texts) for bar in row] for row in shown.rows.values()]
    expected = [
        [
            (each.start, each.end, picture.label(each.action), str(read))
            for each, read in zip(row, worker.reads, strict=True)
            if read is not None
        ]
        for row, worker in zip(picture.timetable.workers, picture.weights, strict=True)
    ]
    assert found == expected
    updates = [[each.end for each in row if each.action.kind == "U"] for row in picture.timetable.workers]
    assert [[round(at, 2) for at in row] for row in shown.marks.values()] == updates
    kinds = {each.action.kind for row in picture.timetable.workers for each in row} - {"U"}
    named = {ACTIONS[kind].color: ACTIONS[kind].meaning for kind in kinds}
    assert shown.legend == named | {GROUND: "idle (bubble)"}


def test_a_picture_names_what_it_has_in_its_legend():
    shown = svg(drawn("zero-bubble", stages=2).chart)
    assert "gradient of the weights" in shown
    assert ">backward<" not in shown
    assert "a prediction of them" not in shown
    assert "a prediction of them" in svg(drawn("spectrain", stages=4).chart)


def test_a_picture_explains_chunks_and_forwards_computed_again():
    assert "F3' (darker)" in svg(drawn("zero-bubble:schedule=v", stages=2).chart).replace("&#x27;", "'")
    assert "computes its forward again" in svg(drawn("features-replay", stages=2).chart)
    plain = svg(drawn("ddg", stages=2).chart)
    assert "again" not in plain
    assert "darker" not in plain
    assert "micro-batch" not in plain
    assert "the most mini-batches between" in plain


@pytest.mark.parametrize("name", ["zero-bubble:micro=8", "zero-bubble:micro=8,schedule=v", "pipedream", "spectrain"])
def test_texts_fit_into_their_boxes(name):
    names = {"svg": "http://www.w3.org/2000/svg"}
    for each in ElementTree.fromstring(svg(drawn(name, stages=4).chart)).findall("svg:g", names):
        room = float(each.find("svg:rect", names).get("width"))
        for words in each.findall("svg:text", names):
            assert float(words.get("font-size")) * text_width(words.text) < room, words.text


def test_a_title_is_escaped():
    shown = svg(PipelinePicture(drawn("gpipe").pipeline, "<a> & b", range(1)).chart)
    assert "<a>" not in shown
    assert ElementTree.fromstring(shown)[0].text == "<a> & b"


def test_a_program_has_no_order_to_draw():
    with raising(UsageError, "stages=3"):
        drawn("dni", stages=3)


# ---- the versions of weights


def test_pipedream_goes_backward_through_the_weights_of_its_forward():
    reads = {
        picture.label(each.action): str(read)
        for picture in [drawn("pipedream", 8, stages=3)]
        for each, read in zip(picture.timetable.workers[0], picture.weights[0].reads, strict=True)
    }
    assert [reads[f"F{t}"] for t in range(1, 9)] == ["w0", "w0", "w0", "w1", "w2", "w3", "w4", "w5"]
    assert [reads[f"B{t}"] for t in range(1, 9)] == [reads[f"F{t}"] for t in range(1, 9)]


def test_petrowski_goes_backward_through_the_newest_weights():
    picture = drawn("petrowski", 8, stages=3)
    backward = [
        str(read)
        for each, read in zip(picture.timetable.workers[0], picture.weights[0].reads, strict=True)
        if each.action.kind == "B"
    ]
    assert backward == [f"w{t}" for t in range(8)]


def test_spectrain_reads_predictions():
    picture = drawn("spectrain", 20, stages=5)
    for rank, row in enumerate(picture.timetable.workers):
        for each, read in zip(row, picture.weights[rank].reads, strict=True):
            if read is not None:
                assert read == Read(each.version, rank // 2 + (4 - rank if each.action.kind == "F" else 0))


@pytest.mark.parametrize("stages", [2, 4])
def test_multi_version_reads_each_version_in_turn_after_the_updates_of_that_version(stages):
    picture = drawn("multi-version", 16, stages=stages)
    versions = 2 * stages - 1
    for rank, row in enumerate(picture.timetable.workers):
        reads = {
            (each.action.kind, each.action.batch): read
            for each, read in zip(row, picture.weights[rank].reads, strict=True)
        }
        for batch in range(16):
            expected = Read(batch // versions, own=batch % versions + 1)
            assert reads["F", batch] == reads["B", batch] == expected
    shown = svg(picture.chart)
    assert f">v{versions} w1</text>" in shown
    assert f"version 3 of the {versions} of the model" in shown


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ordered())
def test_the_staleness_of_a_member_is_that_of_its_order(name):
    for stages in range(1, 9):
        picture = drawn(name, 3 * stages, stages=stages)
        expected = [picture.pipeline.staleness(rank) for rank in range(stages)]
        assert [worker.staleness[3 * stages - 1] for worker in picture.weights] == expected
        assert [picture.staleness(rank) for rank in range(stages)] == expected


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", [name for name in (*ordered(), *MORE) if make(name, "partition").chunks == 1])
def test_the_figures_are_those_that_the_stages_count(name):
    micro = ("," if ":" in name else ":") + "micro=3" if hasattr(make(name, "partition"), "micro") else ""
    run = play(f"{name}{micro}", 3, steps=9, optimizer="momentum:lr=0.1")
    picture = PipelinePicture(run.stages[0].pipeline, name, range(9))
    for rank, stage in enumerate(run.stages):
        assert stage.counts.staleness == Counter(picture.weights[rank].staleness.values())
        assert stage.counts.most_sets == picture.timetable.most_sets(rank)
        assert stage.counts.most_versions == picture.weights[rank].most_versions


@pytest.mark.parametrize(
    "name",
    ["pipedream", "pipedream:sync=vertical", "petrowski", "gpipe:micro=3", *soaked("spectrain", "zero-bubble:micro=3")],
)
def test_a_trace_names_the_actions_and_the_weights_of_the_picture(name):
    run = play(name, 3, steps=9, checkpoint_every=5, trace=True, optimizer="momentum:lr=0.1")
    pictures = [PipelinePicture(run.stages[0].pipeline, name, batches) for batches in drained(9, 5)]
    for rank in range(3):
        spans = [each for each in run.finished.outcome.spans if each.rank_name == f"worker {rank}"]
        found = [each.detail for each in sorted(spans, key=lambda each: each.start) if " w" in each.detail]
        assert found == [
            f"{each.action} {read}"
            for picture in pictures
            for each, read in zip(picture.timetable.workers[rank], picture.weights[rank].reads, strict=True)
            if read is not None
        ]
