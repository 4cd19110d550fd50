"""When a test runs: marks for parameters of tests, by purpose (`make test`, `make all`, `make soak`)."""

from typing import Any

import pytest


def _marked(mark: pytest.MarkDecorator, values: tuple[Any, ...]) -> list[Any]:
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark) for value in values]


def long(*values: Any) -> list[Any]:
    """Each of `values`, as a parameter for `make all`: the rest of a product, of which `make test` has a part."""
    return _marked(pytest.mark.long, values)


def soaked(*values: Any) -> list[Any]:
    """Each of `values`, as a parameter for `make soak` alone."""
    return _marked(pytest.mark.soak, values)
