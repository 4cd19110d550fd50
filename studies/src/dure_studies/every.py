"""Runs the commands of all rows of the papers, two at a time, and writes their output and drawings into one report."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from dure.core.regular_file import check_output
from dure.job.data.loaders import data_root
from dure_studies.flags import DATA
from dure_studies.output import Columns, Row, table_of
from dure_studies.papers import papers

if TYPE_CHECKING:
    from rich.table import Table

AT_ONCE = 2
LIMIT_SECONDS = 3600
"""A command that takes longer counts as failed."""

QUICK_STEPS = 100
"""Steps of the reduced form of a training."""

QUICK_PLAN = {"--learn": "1", "--steps": "40"}
"""Strategies that the reduced form of a plan trains with real gradients, and their steps."""

OTHER_TABLES = ("--accuracy", "--sweep")
"""Flags with which a command shows another table, so that they stay in its reduced form."""

FOLDERS = ("examples", "bench")
"""Folders of a checkout that commands name."""

DONE, SKIPPED, FAILED = "done", "skipped", "failed"


def commands(quick: bool) -> list[str]:
    """The commands of the rows, each once and those of most minutes first. `quick`: in their reduced forms."""
    minutes: dict[str, float] = {}
    for paper in papers():
        for row in paper.rows:
            text = _reduced(row.command) if quick else row.command
            if text:
                minutes[text] = max(minutes.get(text, 0.0), row.minutes or 0.0)
    return sorted(minutes, key=lambda text: -minutes[text])


def reproduce(
    environ: Mapping[str, str],
    *,
    quick: bool = False,
    data: Annotated[Path | None, DATA] = None,
    out: Annotated[Path, arg(help="Where to write the report, as HTML.")] = Path("papers.html"),
) -> dict[str, Any]:
    """Run the commands and write the report to `out`; return the commands with their seconds and states.

    A command that needs root, or a file of a checkout, is skipped where it is missing; the row says so.

    Raises `UsageError` if the report cannot be written, `DataError` if there is no folder `data`.
    """
    check_output(out)
    environ = {**environ, "OMP_NUM_THREADS": "1", "COLUMNS": "150"}
    if data is not None or environ.get("DURE_DATA"):
        environ["DURE_DATA"] = str(data_root(data, environ).absolute())
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda command: _run(command, environ), commands(quick)))
    _write(out, rows, quick)
    for row in rows:
        row.pop("drawings")
    failed = [row["command"] for row in rows if row["state"] == FAILED]
    return {"reproduce": "all", "quick": quick, "report": str(out), "failed": failed, "rows": rows}


def table(result: dict[str, Any]) -> Table:
    """A line for each command."""
    columns: Columns = [
        ("command", "{command}"),
        ("seconds", "{seconds:.0f}"),
        ("state", lambda row: f"{row['state']} {row['why']}".strip()),
    ]
    caption = f"Output and drawings: {result['report']}. Two commands at a time, so seconds are more than of one alone."
    return table_of(result["rows"], columns, caption, texts=("command", "state"), fold=True)


def _reduced(command: str) -> str:
    """The reduced form: `dure reproduce NAME --quick`, fewer steps of `dure train` and `compare`, else the command."""
    words = shlex.split(command.removeprefix("sudo "))
    if words[:2] in (["dure", "train"], ["dure", "compare"]) and "--emit" not in words:
        place = words.index("--steps") if "--steps" in words else len(words)
        return shlex.join([*words[:place], *words[place + 2 :], "--steps", str(QUICK_STEPS)])
    if words[:2] == ["dure", "plan"]:
        return shlex.join(_with(words, QUICK_PLAN))
    if words[:2] != ["dure", "reproduce"]:
        return command
    on = ["--on", "namespaces"] if "namespaces" in words else []
    kept = [word for word in words if word in OTHER_TABLES]
    return shlex.join(["sudo"] * bool(on) + [*words[:3], *on, *kept, "--quick"])


def _with(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The words of a command with other `values` of those flags that it has."""
    return [values.get(before, word) for before, word in pairwise(["", *words])]


def _run(command: str, environ: Mapping[str, str]) -> Row:
    row = {"command": command, "seconds": 0.0, "state": SKIPPED, "why": "", "output": "", "drawings": []}
    words = shlex.split(command.removeprefix("sudo "))
    if command.startswith("sudo ") and os.geteuid() != 0:
        return row | {"why": "needs root"}
    absent = next(
        (word for word in words if word.startswith(tuple(f"{f}/" for f in FOLDERS)) and not Path(word).exists()), ""
    )
    if absent:
        return row | {"why": f"needs {absent} of a checkout"}
    program = [sys.executable, *(("-m", "dure") if words[0] == "dure" else ())]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        for name in FOLDERS:
            if Path(name).is_dir():
                (Path(place) / name).symlink_to(Path(name).absolute())
        output, status = _output([*program, *words[1:]], place, environ)
        drawings = [_inline(path) for path in sorted(Path(place).glob("*.svg"))]
    why = "" if status == 0 else f"with status {status}"
    return row | {
        "seconds": time.perf_counter() - began,
        "state": FAILED if status else DONE,
        "why": why,
        "output": output,
        "drawings": drawings,
    }


def _output(arguments: Sequence[str], place: str, environ: Mapping[str, str]) -> tuple[str, int]:
    """The standard output of a command, with its errors if it fails, and its status."""
    with subprocess.Popen(
        arguments,
        cwd=place,
        env=environ,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its own processes too, which hold the pipes open
            return f"no end within {LIMIT_SECONDS} s", 124
    return output + (errors if process.returncode else ""), process.returncode


def _inline(path: Path) -> str:
    """The drawing without the head of an SVG file."""
    return re.sub(r"^.*?(?=<svg)", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def _write(out: Path, rows: Sequence[Row], quick: bool) -> None:
    from importlib.resources import files

    from jinja2 import Environment, StrictUndefined

    from dure.report.files import replacing

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files(__package__).joinpath("every.html.j2").read_text(encoding="utf-8"))
    places = {row["command"]: number for number, row in enumerate(rows)}
    names = {row.command: _reduced(row.command) if quick else row.command for each in papers() for row in each.rows}
    with replacing(out) as file:
        file.write(template.render(papers=papers(), rows=rows, places=places, names=names, quick=quick))
