"""Versions of parts of pulled models: rows of a study in virtual time."""

import json

import pytest

from dure.cli.main import main
from dure_studies import version_skew
from dure_studies.version_skew import SPEEDS, SkewSetting, settings

CASES = [
    SkewSetting("bsp", 4, "layer", "beside"),
    SkewSetting("downpour", 1, "layer", "beside"),
    SkewSetting("downpour", 4, "layer", "beside"),
]
ROUNDS = 6


def test_parts_differ_where_the_ways_to_servers_differ(monkeypatch, capsys):
    assert set(CASES) < set(settings())
    monkeypatch.setattr(version_skew, "settings", lambda: CASES)
    monkeypatch.setenv("COLUMNS", "150")  # a narrow table leaves figures out
    assert main(["reproduce", "version-skew", "--rounds", str(ROUNDS), "--seeds", "1", "--json"]) == 0
    captured = capsys.readouterr()
    found = {tuple(row[name] for name in SkewSetting._fields): row for row in json.loads(captured.out)["rows"]}
    bsp, single, beside = (found[case]["version_skew"] for case in CASES)
    assert single is None
    assert bsp["histogram"] == {"0": len(SPEEDS) * (ROUNDS + 1)}
    assert beside["mean"] > 0
    assert sum(beside["histogram"].values()) == len(SPEEDS) * ROUNDS
    share = beside["histogram"]["0"] / (len(SPEEDS) * ROUNDS)
    assert f"{share:.1%}" in captured.err


@pytest.mark.parametrize("flag", ["--rounds", "--seeds"])
def test_numbers_out_of_range_are_refused(flag, capsys):
    assert main(["reproduce", "version-skew", flag, "0"]) == 2
    assert "must be at least 1, got 0" in capsys.readouterr().err
