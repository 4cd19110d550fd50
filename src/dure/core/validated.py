"""Files of users: a YAML reader that refuses repeated keys, and descriptions whose errors are one sentence.

PyYAML silently takes the last of repeated keys. Aliases let a short text describe any number of values; the bound holds
for the values once aliases are replaced. The largest files are traces and profiles, of some 100,000 values.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from dure.core.regular_file import read_regular
from dure.core.text import quoted
from dure.errors import ClusterError

T = TypeVar("T")

LARGEST = 1 << 24
"""Most bytes of a file."""

MOST_VALUES = 1_000_000
"""Most values of a text, with those that aliases stand for."""


class _Bounded(yaml.SafeLoader):
    """A safe loader that refuses repeated keys of a mapping, too many values, and values that no type can hold."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias, mark = self.check_event(yaml.AliasEvent), self.peek_event().start_mark  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if not alias:
            self._sizes[node] = 1 + sum(self._sizes[each] for each in _children(node))
        elif node not in self._sizes:
            raise yaml.MarkedYAMLError(problem="the alias stands for a value that contains it", problem_mark=mark)
        if self._sizes[node] > MOST_VALUES:
            problem = f"aliases make more than {MOST_VALUES:,} values" if alias or self.anchors else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            problem = f"{quoted(node.value)} is no value of the type {kind}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # PyYAML refuses others
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.MarkedYAMLError(problem=f'the key "{key.value}" is there twice', problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_TOO_MANY = f"it has more than {MOST_VALUES:,} values"


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def read_yaml(text: str) -> Any:
    """Parse `text`. Raises `yaml.YAMLError` for text that is no YAML, repeats a key, or has too many values."""
    loader = _Bounded(text)
    try:
        return loader.get_single_data()
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deep") from error
    finally:
        loader.dispose()


def read_yaml_file(path: str | Path) -> Any:
    """Parse the file `path`. Raises `ValueError` with the reason in words if that is not possible."""
    try:
        return read_yaml(read_regular(Path(path), LARGEST).decode("utf-8"))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError("it is not text in UTF-8") from error
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise ValueError(f"it is no YAML ({place}{problem})") from error


def read_described(path: str | Path, what: str, keys: Iterable[str], make: Callable[[dict[str, Any]], T]) -> T:
    """The object that `make` creates from the mapping in a user's file; `what` names it, such as "a cluster file".

    `keys` are those that it may have. Raises `ClusterError` with the file, and the key if one is wrong.
    """
    try:
        given = read_yaml_file(path)
    except ValueError as error:
        raise ClusterError(f"{path}: {error}: give {what} in YAML.") from None
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ClusterError(f"{path}: {what} is a mapping: write keys out of {', '.join(keys)}.")
    try:
        return make(given)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


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
            # An unknown key may be a required one with a typing error, which is then missing, too.
            faults = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
            raise _fault(type(self), faults[0]) from None

    def changed(self, **values: Any) -> Self:
        """This description with other values: made anew, as a copy would keep properties that depend on the values."""
        made = type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | values)
        return made.stating(self.model_fields_set | values.keys())

    def stating(self, given: Iterable[str]) -> Self:
        """This description, of whose values the `given` ones are stated (`model_fields_set`): the others follow."""
        self.model_fields_set.intersection_update(given)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As `changed`; pydantic's own copies those properties. Parts are frozen, so a `deep` copy shares them too."""
        return self.changed(**update or {})


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
        "bool": "must be true or false",
        "string": "must be text, in quotes where it looks like a number",
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
