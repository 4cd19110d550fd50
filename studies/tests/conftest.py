"""Tests of studies train for minutes: all but `test_smoke.py` are long."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.name != "test_smoke.py":
            item.add_marker(pytest.mark.long)
