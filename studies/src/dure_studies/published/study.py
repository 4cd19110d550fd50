"""`dure reproduce published`: predictions beside what others measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dure.core.regular_file import check_output
from dure.core.spec_text import names, nearest
from dure.errors import UsageError
from dure_studies.flags import OUT
from dure_studies.output import Columns, Row, draw, line, table_of

if TYPE_CHECKING:
    from rich.console import Group

    from dure.report.figures import Band
    from dure_studies.published.rows import Source
    from dure_studies.published.score import RatioPair

quick = {"row": "D1"}


def reproduce(
    *,
    row: Annotated[str | None, arg(help="Id of a row, such as H6; all if left out.")] = None,
    rows: Annotated[Path | None, arg(help="File of rows of your own, in the same form.")] = None,
    out: Annotated[Path | None, OUT] = None,
) -> dict[str, Any]:
    """The rows with their predictions, and `scores` of the figures that are scored; draw all to `out`.

    `low` and `high` span what a source leaves open, and `decides` names the fact that changes the prediction most.
    `fitted_from` has the sources in sight of which constants of the prediction were chosen. A figure that cannot be
    predicted has the reason as `missing`.

    Raises `UsageError` for a file that cannot be read, and for a row that it does not have.
    """
    from dure_studies.published.rows import missing, published, read

    path = out or Path("published.svg")
    check_output(path)
    sources = published() if rows is None else [read(rows)]
    known = [each.id for source in sources for each in source.rows]
    if row is not None and row not in known:
        raise UsageError(f"there is no row {row!r}; there are {names(known)}.{nearest(row, known)}")
    found = [each for source in sources for each in _of_source(source, row)]
    drawn = [each for each in found if "predicted" in each]
    if drawn:
        draw(path, {("", "predicted"): _points(drawn)}, x="measured", y="predicted")
    lacking = missing() if rows is None and row is None else {}
    given = {"rows": found, "scores": _scores(found), "missing": lacking, "picture": str(path) if drawn else ""}
    return {"reproduce": "published", "time": "virtual", **given}


def _points(rows: Sequence[Row]) -> list[Band]:
    """A point for each figure, in the color of its source, and the line on which predictions are exact."""
    ends = [limit([each[name] for each in rows for name in ("measured", "predicted")]) for limit in (min, max)]
    points = [line(each["id"].rstrip("0123456789"), [each["measured"]], [each["predicted"]]) for each in rows]
    return [*points, line("equal", ends, ends)]


def _of_source(source: Source, wanted: str | None) -> Iterable[Row]:
    from dure_studies.published.predict import predict

    for row in source.rows:
        for figure in row.figures if wanted in (None, row.id) else ():
            found: Row = {"id": row.id, "figure": figure.name, "what": row.what, "class": figure.kind or row.kind}
            found |= {"source": source.source, "measured": figure.measured}
            try:
                prediction = predict(source, row, figure)
            except UsageError as error:
                yield found | {"missing": str(error)}
                continue
            yield found | vars(prediction) | {"error": prediction.predicted / figure.measured - 1}


def _scores(rows: Sequence[Row]) -> list[Row]:
    """The scores of the figures that are scored, of those with a loss, and of class B; nothing where there are none."""
    from dure_studies.published.score import is_inside, score, scored, with_loss

    listed = scored()
    pairs = [_pair(row) for row in rows if row["figure"] in listed.get(row["id"], ())]
    found = [
        {"of": name, **score(some)._asdict()}
        for name, some in (("class A, data parallelism", pairs), ("of these, with a loss above 0.1", with_loss(pairs)))
        if some
    ]
    second = [row for row in rows if row["class"] == "B"]
    inside = sum("low" in row and is_inside(row["low"], row["high"], row["measured"]) for row in second)
    return found + ([{"of": "class B", "figures": len(second), "inside": inside / len(second)}] if second else [])


def _pair(row: Row) -> RatioPair:
    from dure_studies.published.score import RatioPair

    return RatioPair(row.get("predicted", 0.0), row["measured"])


def table(result: dict[str, Any]) -> Group:
    """A line for each figure, and one for each score."""
    from rich.console import Group

    columns: Columns = [
        ("row", "{id}"),
        ("figure", "{figure}"),
        ("", "{class}"),
        ("measured", "{measured:.3f}"),
        ("predicted", lambda row: f"{row['predicted']:.3f}" if "predicted" in row else "not predicted"),
        ("from", lambda row: f"{row['low']:.3f}" if "low" in row else ""),
        ("to", lambda row: f"{row['high']:.3f}" if "high" in row else ""),
        ("error", lambda row: f"{row['error']:+.1%}" if "error" in row else ""),
        ("decides", lambda row: row.get("decides", "")),
    ]
    caption = (
        "Samples per second of a worker, relative to one worker alone. Virtual seconds. The interval spans what the "
        "source leaves open; the fact that decides changes it most."
    )
    figures = table_of(result["rows"], columns, caption, texts=("row", "figure", "decides"))
    return Group(figures, *_score_lines(result), *_lacking(result["missing"]))


def _lacking(pieces: dict[str, str]) -> list[str]:
    """The rows without a prediction, by the piece that they lack."""
    if not pieces:
        return []
    together: dict[str, list[str]] = {}
    for row, piece in pieces.items():
        together.setdefault(piece, []).append(row)
    return [
        "",
        f"{len(pieces)} rows have no prediction:",
        *(f"{', '.join(ids)}: {what}" for what, ids in together.items()),
    ]


def _score_lines(result: dict[str, Any]) -> list[str]:
    return [
        f"{each['of']}: {each['figures']} figures, {each['inside']:.0%} inside an interval below a factor of 1.5"
        if "inside" in each
        else f"{each['of']}: {each['figures']} figures, {each['near']:.0%} near, median error "
        f"{each['median_error']:.1%}, tau-b {each['tau']:.2f}"
        for each in result["scores"]
    ]
