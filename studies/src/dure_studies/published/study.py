"""`dure reproduce published`: predictions beside what others measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from dure.core.regular_file import check_output
from dure.core.spec_text import names, nearest
from dure.errors import UsageError
from dure_studies.flags import OUT
from dure_studies.output import Columns, Row, draw, known, line, table_of

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dure.report.figures import Band
    from dure_studies.published.rows import Source
    from dure_studies.published.score import RatioPair

quick = {"row": "D1"}


def reproduce(
    *,
    row: Annotated[str | None, arg(help="Id of a row, such as H6; all if left out.")] = None,
    rows: Annotated[Path | None, arg(help="File of rows of your own, in the same form.")] = None,
    without: Annotated[
        Literal["sources", "parts"] | None,
        arg(help="Score the model without the rows that it was chosen from, or without each of its parts."),
    ] = None,
    out: Annotated[Path | None, OUT] = None,
) -> dict[str, Any]:
    """The rows with their predictions, and `scores` of the figures that are scored; draw all to `out`.

    `low` and `high` span what a source leaves open, and `decides` names the fact that changes the prediction most.
    `fitted_from` has the sources in sight of which constants of the prediction were chosen. A figure that cannot be
    predicted has the reason as `missing`. `sources` says what each source states, and what is assumed.

    With `without`, `rows` are scores instead (`variants`), and nothing is drawn.

    Raises `UsageError` for a file that cannot be read, and for a row that it does not have.
    """
    from dure_studies.published.rows import missing, published, read

    if without is not None:
        return _without(without, {"row": row, "rows": rows, "out": out})
    path = out or Path("published.svg")
    check_output(path)
    sources = published() if rows is None else [read(rows)]
    ids = [each.id for source in sources for each in source.rows]
    if row is not None and row not in ids:
        raise UsageError(f"there is no row {row!r}; there are {names(ids)}.{nearest(row, ids)}")
    found = [each for source in sources for each in _of_source(source, row)]
    drawn = [each for each in found if "predicted" in each and each["measured"] is not None]
    if drawn:
        draw(path, {("", "predicted"): _points(drawn)}, x="measured", y="predicted")
    lacking = missing() if rows is None and row is None else {}
    stated = [_statement(source) for source in sources if row is None or row in (each.id for each in source.rows)]
    given = {"rows": found, "scores": _scores(found), "sources": stated, "missing": lacking}
    return {"reproduce": "published", "time": "virtual", **given, "picture": str(path) if drawn else ""}


def _without(what: Literal["sources", "parts"], others: Mapping[str, object]) -> dict[str, Any]:
    from dure_studies.published.rows import published
    from dure_studies.published.variants import without_parts, without_sources

    given = next((name for name, value in others.items() if value is not None), None)
    if given is not None:
        raise UsageError(f"--without {what} scores all figures of figures.yaml: leave --{given} out.")
    scores = {"sources": without_sources, "parts": without_parts}[what](published())
    return {"reproduce": "published", "time": "virtual", "without": what, "rows": scores, "picture": ""}


def _statement(source: Source) -> Row:
    ids = [each.id for each in source.rows]
    return {"source": source.source, "rows": ids, "stated": source.stated, "assumed": source.assumed}


def _points(rows: Sequence[Row]) -> list[Band]:
    """A point for each figure, in the color of its source, and the line on which predictions are exact."""
    ends = [limit([each[name] for each in rows for name in ("measured", "predicted")]) for limit in (min, max)]
    points = [line(each["id"].rstrip("0123456789"), [each["measured"]], [each["predicted"]]) for each in rows]
    return [*points, line("equal", ends, ends)]


def _of_source(source: Source, wanted: str | None) -> Iterable[Row]:
    from dure_studies.published.predict import predict

    for row in source.rows:
        for figure in row.figures if wanted in (None, row.id) else ():
            kind = figure.kind_in(row)
            found: Row = {"id": row.id, "figure": figure.name, "what": row.what, "class": kind}
            found |= {"source": source.source, "measured": figure.measured}
            if kind == "C":
                found |= {"order": "faster" if figure.is_faster else "slower", "equal": figure.equal}
            try:
                prediction = predict(source, row, figure)
            except UsageError as error:
                yield found | {"missing": str(error)}
                continue
            right = {"right": (prediction.predicted > figure.equal) == figure.is_faster} if kind == "C" else {}
            off = None if figure.measured is None else prediction.predicted / figure.measured - 1
            yield found | vars(prediction) | {"error": off} | right


def _scores(rows: Sequence[Row]) -> list[Row]:
    """The scores of the listed figures, of those with a loss, of rows that divide a model, and of classes B and C.

    `predicted` counts the figures that have a prediction: others are neither near, inside nor right.
    """
    from dure_studies.published.score import DIVIDED, WITHIN, is_inside, score, scored, with_loss

    listed = scored()
    chosen = [row for row in rows if row["figure"] in listed.get(row["id"], ())]
    lossy = [row for row in chosen if with_loss([_pair(row)])]
    found = [
        {"of": name, "predicted": _predicted(some), **score([_pair(row) for row in some])._asdict()}
        for name, some in (("class A, data parallelism", chosen), ("of these, with a loss above 0.1", lossy))
        if some
    ]
    if divided := [row for row in rows if row["id"] in DIVIDED and row["class"] != "C"]:
        counts = {"of": "tensor parallelism and pipelines", "figures": len(divided), "predicted": _predicted(divided)}
        found.append({**counts, "within": sum(abs(_pair(row).error) <= WITHIN for row in divided) / len(divided)})
    of_kind = {kind: [row for row in rows if row["class"] == kind] for kind in ("B", "C")}
    inside = sum("low" in row and is_inside(row["low"], row["high"], row["measured"]) for row in of_kind["B"])
    right = sum(row.get("right", False) for row in of_kind["C"])
    for kind, name, count in (("B", "inside", inside), ("C", "right", right)):
        if some := of_kind[kind]:
            counts = {"of": f"class {kind}", "figures": len(some), "predicted": _predicted(some)}
            found.append({**counts, name: count / len(some)})
    return found


def _predicted(rows: Sequence[Row]) -> int:
    return sum("predicted" in row for row in rows)


def _pair(row: Row) -> RatioPair:
    from dure_studies.published.score import RatioPair

    return RatioPair(row.get("predicted", 0.0), row["measured"])


def table(result: dict[str, Any]) -> Group:
    """A line for each figure, and one for each score; with a single source, what it states and what is assumed."""
    from rich.console import Group

    if "without" in result:
        return Group(_variant_table(result))
    columns: Columns = [
        ("row", "{id}"),
        ("figure", "{figure}"),
        ("class", "{class}"),
        ("measured", _measured),
        ("predicted", lambda row: f"{row['predicted']:.3f}" if "predicted" in row else "not predicted"),
        ("from", known("low", "{:.3f}")),
        ("to", known("high", "{:.3f}")),
        ("error", lambda row: "" if row["class"] == "C" else known("error", "{:+.1%}")(row)),
        ("order", _order),
        ("decides", lambda row: row.get("decides", "")),
    ]
    caption = (
        "`measured` and `predicted`: samples per second of a worker, relative to one worker alone, or to the setting "
        "after `than`. Predictions are virtual time. Class A: the source states nearly all; B: a fact is missing; C: "
        "only the order counts: whether the setting is slower or faster than the other one was, and whether the "
        "prediction says so. `from` and `to` span what the source leaves open; `decides` is the open fact that changes "
        "the prediction most."
    )
    figures = table_of(result["rows"], columns, caption, texts=("row", "figure", "decides"))
    alone = result["sources"] if len(result["sources"]) == 1 else []
    return Group(
        figures,
        *_unpredicted(result["rows"]),
        *_statements(alone),
        *_score_lines(result),
        *_lacking(result),
    )


def _measured(row: Row) -> str:
    return "" if row["measured"] is None else f"{row['measured']:.3f}"


def _order(row: Row) -> str:
    """The order of a figure of class C, and whether the prediction has it."""
    if "order" not in row:
        return ""
    return f"{row['order']}: {'right' if row['right'] else 'wrong'}" if "right" in row else f"{row['order']}"


def _unpredicted(rows: Sequence[Row]) -> list[str]:
    """A line for each figure without a prediction, with the reason."""
    lines = [f"{row['id']}, {row['figure']}: {row['missing']}" for row in rows if "missing" in row]
    return ["Not predicted:", *lines, ""] if lines else []


def _statements(sources: Sequence[Row]) -> list[str]:
    """The source, what it states, and what is assumed, of each of `sources`."""
    lines = [f"{name}: {each[name]}" for each in sources for name in ("source", "stated", "assumed") if each[name]]
    return [*lines, ""] if lines else []


def _variant_table(result: Row) -> Table:
    parts = result["without"] == "parts"
    columns: Columns = [
        ("part left out" if parts else "rows", "{left_out}"),
        ("figures", "{figures}"),
        ("near", "{near:.0%}"),
        ("median error", "{median_error:.1%}"),
        ("with a loss", lambda row: "" if math.isnan(row["loss"]) else f"{row['loss']:.1%}"),
        ("tau-b", "{tau:.2f}"),
    ]
    caption = (
        "`near`: within 15 %, and the lost part within the larger of 0.03 and 30 % of it. `with a loss`: the median "
        "error of figures with a measured loss above 0.1. Virtual time. "
    )
    if parts:
        caption += "Each line is all scored figures, predicted without one part of the model."
        return table_of(result["rows"], columns, caption, texts=("part left out",))
    columns = [*columns, ("spread", known("spread", "{:g}")), ("not as chosen", "{without}")]
    caption += (
        "Each line is the scored figures of a source, predicted with `spread` fitted to the other sources, and with "
        "the constants that were chosen in sight of its rows (`not as chosen`) as they are without them."
    )
    return table_of(result["rows"], columns, caption, texts=("rows", "not as chosen"))


def _lacking(result: Row) -> list[str]:
    """The coverage of rows, and the rows without a prediction, by the piece that they lack."""
    pieces: dict[str, str] = result["missing"]
    if not pieces:
        return []
    together: dict[str, list[str]] = {}
    for row, piece in pieces.items():
        together.setdefault(piece, []).append(row)
    covered = len({row["id"] for row in result["rows"]})
    return [
        "",
        f"{covered} of {covered + len(pieces)} published rows have a prediction. Those without, and what they lack:",
        *(f"{', '.join(ids)}: {what}" for what, ids in together.items()),
    ]


def _score_lines(result: dict[str, Any]) -> list[str]:
    return [_score_line(each) for each in result["scores"]]


def _score_line(score: Row) -> str:
    figures, predicted = score["figures"], score["predicted"]
    covered = "all predicted" if predicted == figures else f"{predicted} predicted"
    start = f"{score['of']} ({figures} figure{'s' * (figures > 1)}, {covered}):"
    if "inside" in score:
        return f"{start} {score['inside']:.0%} inside an interval below a factor of 1.5"
    if "within" in score:
        return f"{start} {score['within']:.0%} within 15 %"
    if "right" in score:
        return f"{start} {score['right']:.0%} in the right order"
    return (
        f"{start} {score['near']:.0%} near (within 15 %, and the lost part within the larger of 0.03 and 30 % of it), "
        f"median error {score['median_error']:.1%}, Kendall's tau-b {score['tau']:.2f}"
    )
