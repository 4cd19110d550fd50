"""Parameters of tests that `make soak` runs and `make test` leaves out."""

from typing import Any

import pytest


def soaked(*values: Any) -> list[Any]:
    """Each of `values`, as a parameter for `make soak` alone."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.soak) for value in values
    ]
