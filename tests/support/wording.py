"""Errors in tests: the test names the type and the value at fault, `tests/wording.json` has the whole text.

    with raising(UsageError, "bound=-1"):
        ...

`pytest --write-wording` writes the texts of the tests that ran. A changed wording is a change of that file alone.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "wording.json"

PLACES = (
    (re.compile(rf"{re.escape(tempfile.gettempdir())}/pytest-of-[^/\s]+/pytest-\d+/(popen-gw\d+/)?[\w.-]+"), "TMP"),
    (re.compile(re.escape(str(ROOT))), "ROOT"),
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"(?<=more than this machine has, )[\d,]*\d"), "MEMORY"),
    (re.compile("Name or service not known|Temporary failure in name resolution"), "NO SUCH NAME"),
)
"""Parts of a text that differ between machines and runs, and their names."""

writes = False
"""Whether the texts of this run are written, rather than compared."""

written: dict[str, list[str]] = {}
"""Texts by test, of a run with `--write-wording`."""

_errors: Counter[str] = Counter()


@cache
def _known() -> dict[str, list[str]]:
    return dict(json.loads(TABLE.read_text(encoding="utf-8")))


def _same_everywhere(text: str) -> str:
    for pattern, name in PLACES:
        text = pattern.sub(name, text)
    return text


def save() -> None:
    """Write the table: the texts of this run, and those of tests that did not run."""
    merged = _known() | written
    TABLE.write_text(json.dumps(dict(sorted(merged.items())), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def check(text: str) -> None:
    """Compare the text of an error with that of the table, by the test and the number of the error in it."""
    name = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
    test = _same_everywhere(re.sub(r"@\w+$", "", name))  # pytest-xdist appends the group of a test
    number = _errors[test]
    _errors[test] += 1
    text = _same_everywhere(text)
    if writes:
        written.setdefault(test, []).append(text)
        return
    told = _known().get(test, [])
    assert number < len(told), f"no wording is known of error {number + 1} of {test}: run pytest --write-wording"
    assert text == told[number], "the wording has changed: if it is meant, run pytest --write-wording"


@contextmanager
def raising(
    kind: type[BaseException] | tuple[type[BaseException], ...], *values: str
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """`pytest.raises`, of an error that names `values` and has the wording of the table."""
    with pytest.raises(kind) as caught:
        yield caught
    text = str(caught.value)
    for value in values:
        assert value in text
    check(text)
