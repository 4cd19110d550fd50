"""Several strategies in one call, however they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.wording import raising

import dure
from dure.errors import UsageError


def compared(folder: Path, *strategies: str, **options: Any) -> list[str]:
    given = {"on": "virtual", "workers": 2, "steps": 2, "report": folder / "report.html"}
    found = dure.compare("digits-mlp", *strategies, **given, **options)
    return [run.summary()["strategy"]["sync"] for run in found.runs]


@pytest.mark.long
def test_strategies_are_given_one_by_one_or_by_name(tmp_path: Path) -> None:
    both = ["bsp", "ssp:bound=3"]
    assert compared(tmp_path, *both) == compared(tmp_path, strategies=both) == both
    assert compared(tmp_path, strategies="bsp") == ["bsp"]


def test_not_both(tmp_path: Path) -> None:
    with raising(UsageError, "bsp"):
        compared(tmp_path, "bsp", strategies=["ssp"])
