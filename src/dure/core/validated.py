"""Validated descriptions, such as cluster files: pydantic models whose errors are one sentence."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from dure.core.text import quoted
from dure.errors import ClusterError


class FieldError(ClusterError):
    """An error with the path of the wrong field, which the enclosing model extends."""

    def __init__(self, place: tuple[str | int, ...], problem: str) -> None:
        self.place = place
        self.problem = problem
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
        super().__init__(f"{path}: {problem}." if path else f"{problem}.")


class Validated(BaseModel):
    """A frozen pydantic model that refuses unknown keys, and whose errors are a `ClusterError` of one sentence."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _fault(type(self), error.errors(include_url=False)[0]) from None

    def changed(self, **values: Any) -> Self:
        """This description with other values: made anew, as a copy would keep properties that depend on the values."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | values)


def _fault(model: type[BaseModel], detail: ErrorDetails) -> FieldError:
    kind, given, context = detail["type"], detail["input"], detail.get("ctx", {})
    inner = context.get("error")
    # Nested models raise a FieldError with a place of their own. So after the field's name, `loc` has only indices,
    # which belong to the place, and tags of unions, which do not.
    place = tuple(step for i, step in enumerate(detail["loc"]) if i == 0 or isinstance(step, int))
    if isinstance(inner, FieldError):
        return FieldError(place + inner.place, inner.problem)
    if kind == "value_error":
        return FieldError(place, str(inner).rstrip("."))
    if kind == "extra_forbidden":
        return FieldError((), _unknown(model, str(place[-1])))
    if kind == "missing":
        return FieldError(place, "is required and not there")
    if kind == "union_tag_invalid":
        return FieldError((*place, "distribution"), _choice(context["tag"], context["expected_tags"].replace("'", "")))
    if kind == "literal_error":
        return FieldError(place, _choice(given, context["expected"].replace("'", "").replace(" or ", ", ")))
    return FieldError(place, f"{quoted(given)} {_must(kind, context) or 'is not right: ' + detail['msg']}")


def _must(kind: str, context: dict[str, Any]) -> str | None:
    """The condition that a value violates, in our words; None for an unknown kind of error."""
    bounds = {
        "greater_than": "above",
        "greater_than_equal": "at least",
        "less_than": "below",
        "less_than_equal": "at most",
    }
    for name, words in bounds.items():
        if kind == name:
            return f"must be {words} {_bound(next(iter(context.values())))}"
    shapes = {
        "int": "must be a whole number",
        "float": "must be a number",
        "tuple": "must be a list",
        "finite": "must be finite",
        "model": "must be a mapping of keys to values",
        "too": "has too few entries: write at least one",
    }
    return shapes.get(kind.partition("_")[0])


def _bound(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def _choice(given: object, expected: str) -> str:
    near = get_close_matches(str(given), expected.split(", "), n=1)
    hint = f"did you mean {near[0]!r}, out of {expected}?" if near else f"write one of {expected}"
    return f"{quoted(given)} is unknown: {hint}".rstrip("?")


def _unknown(model: type[BaseModel], key: str) -> str:
    names = sorted(field.alias or name for name, field in model.model_fields.items())
    near = get_close_matches(key, names, n=1)
    hint = f"did you mean {near[0]!r}, out of" if near else "write one of"
    return f"unknown key {quoted(key)}: {hint} {', '.join(names)}"
