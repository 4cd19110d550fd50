"""The text form of members with parameters, `NAME:KEY=VALUE,KEY=VALUE`, typed by the member's dataclass.

Methods, topologies, codecs, optimizers, splits, schedules and jobs have this form. A wrong text raises `StrategyError`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from dure.core.text import quoted
from dure.errors import StrategyError

REQUIRED: Any = MISSING


class MemberSpec(NamedTuple):
    """A parsed member: its name and its parameters, whose values are still text."""

    name: str
    given: Mapping[str, str]


class Parameter(NamedTuple):
    """A parameter of a member. `default` is `REQUIRED` for a parameter without default.

    `shown`, `meaning`, `range`, `unit` and `symbol` are its description (`core.catalogue.parameter`), empty where the
    class has none.
    """

    name: str
    field: str
    annotation: Any
    default: Any
    shown: bool = True
    meaning: str = ""
    range: str = ""
    unit: str = ""
    symbol: str = ""

    def __str__(self) -> str:
        return self.name if self.default is REQUIRED else f"{self.name}={value_text(self.default)}"


WIDEST = 1 << 63
"""No integer is as large: tensors and files count in 64 bits with a sign."""

LONGEST_TEXT = 10_000
"""Most characters of the text of a member; a path has at most 4,096."""


def parse_members(text: str) -> tuple[MemberSpec, ...]:
    """Parse a member and the wrappers joined to it by `+`. Raises `StrategyError`.

    >>> parse_members("downpour:n_push=2+dc-asgd:lambda=0.04")
    (MemberSpec(name='downpour', given={'n_push': '2'}), MemberSpec(name='dc-asgd', given={'lambda': '0.04'}))
    >>> parse_members("lab/mine.py:Mine:period=8")
    (MemberSpec(name='lab/mine.py:Mine', given={'period': '8'}),)
    """
    _check_length(text)
    return tuple(parse_member(part) for part in re.split(r"\+(?=[a-z]|[^+:=]*\.py:)", text))


def parse_member(text: str) -> MemberSpec:
    """Parse one name with its parameters. Raises `StrategyError`.

    >>> parse_member("mnist-mlp:depth=7")
    MemberSpec(name='mnist-mlp', given={'depth': '7'})
    """
    _check_length(text)
    file, _, after = text.rpartition(".py:")  # a member in a user's file is FILE.py:NAME
    head, colon, rest = after.partition(":")
    name = f"{file}.py:{head}" if file else head
    given: dict[str, str] = {}
    for item in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise StrategyError(f'"{text}" has "{item}" for a parameter: write NAME:KEY=VALUE,KEY=VALUE.')
        if key in given:
            raise StrategyError(f'"{text}" gives {key} twice: write it once.')
        given[key] = value
    if not name.strip():
        raise StrategyError(f'"{text}" has no name: write NAME or NAME:KEY=VALUE,KEY=VALUE.')
    return MemberSpec(name.strip(), given)


def _check_length(text: str) -> None:
    if len(text) > LONGEST_TEXT:
        raise StrategyError(
            f"{quoted(text)} has {len(text):,} characters, and NAME:KEY=VALUE,KEY=VALUE has at most {LONGEST_TEXT:,}."
        )


def typed(member: MemberSpec, kind: type) -> dict[str, Any]:
    """Convert the parameters of `member` to values of the fields of the dataclass `kind`. Raises `StrategyError`."""
    known = {parameter.name: parameter for parameter in parameters(kind)}
    values: dict[str, Any] = {}
    for key, text in member.given.items():
        if key not in known:
            shown = f"its parameters are {names(map(str, known.values()))}" if known else "it has none"
            raise StrategyError(f'{member.name} has no parameter "{key}"; {shown}.{nearest(key, known)}')
        try:
            values[known[key].field] = parse_value(text, known[key].annotation)
        except ValueError as error:
            raise StrategyError(f'{member.name}: {key} must be {error}, got "{text}".') from error
    return values


def check_values(name: str, member: Any) -> None:
    """Check the parameters of an object as its text is checked. Raises `StrategyError`."""
    for parameter in parameters(type(member)):
        value = getattr(member, parameter.field)
        try:
            parse_value(value_text(value), parameter.annotation)
        except ValueError as error:
            raise StrategyError(f"{name}: {parameter.name} must be {error}, got {value!r}.") from error


def parameters(kind: type) -> tuple[Parameter, ...]:
    """The parameters of a member: the fields of the dataclass `kind`.

    A field that is named like a Python keyword ends in `_`, the name of its parameter does not. The field of a wrapper
    for the wrapped member has `joined` in its metadata and is no parameter.
    """
    hints = get_type_hints(kind)
    own = [each for each in fields(kind) if each.init and "joined" not in each.metadata]
    described = ("shown", "meaning", "range", "unit", "symbol")
    return tuple(
        Parameter(
            each.name.rstrip("_"),
            each.name,
            hints[each.name],
            each.default,
            **{key: each.metadata[key] for key in described if key in each.metadata},
        )
        for each in own
    )


def parse_value(text: str, annotation: Any) -> Any:
    """Parse `text` as a value of the annotated type. Raises `ValueError` with the expected type in words.

    >>> parse_value("inf", float), parse_value("true", bool), parse_value("none", int | None)
    (inf, True, None)
    """
    origin = get_origin(annotation)
    if origin in (types.UnionType, Union):
        return _parse_union(text, get_args(annotation))
    if origin is Literal:
        return _choose(text, {value_text(choice): choice for choice in get_args(annotation)})
    if origin is tuple:
        return tuple(parse_value(item, get_args(annotation)[0]) for item in text.split("/"))
    if annotation is bool:
        return _choose(text.lower(), {"true": True, "false": False})
    if annotation in (int, float):
        try:
            value = annotation(text)
        except ValueError as error:
            raise ValueError("an integer" if annotation is int else "a number (inf is one)") from error
        if annotation is int and abs(value) >= WIDEST:
            raise ValueError("an integer of at most 63 bits")
        return value
    return text


def _parse_union(text: str, members: tuple[Any, ...]) -> Any:
    if types.NoneType in members and text.lower() == "none":
        return None
    expected = []
    for member in members:
        if member is not types.NoneType:
            try:
                return parse_value(text, member)
            except ValueError as error:
                expected.append(str(error))
    raise ValueError(" or ".join(expected))


def _choose(text: str, choices: Mapping[str, Any]) -> Any:
    if text not in choices:
        raise ValueError(" or ".join(choices))
    return choices[text]


def value_text(value: Any) -> str:
    """Write a parameter's value as text, which `parse_value` reads.

    >>> value_text(3.0), value_text(True), value_text(0.1)
    ('3', 'true', '0.1')
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return "/".join(value_text(item) for item in value) if isinstance(value, tuple) else str(value)


def type_text(annotation: Any) -> str:
    """Write an annotated type for a table.

    >>> type_text(Literal["memory", "layer"]), type_text(float)
    ('memory|layer', 'float')
    """
    if get_origin(annotation) in (types.UnionType, Union, Literal):
        members = get_args(annotation)
        return "|".join(type_text(member) if isinstance(member, type) else value_text(member) for member in members)
    return "none" if annotation is types.NoneType else str(getattr(annotation, "__name__", annotation))


def names(words: Iterable[str]) -> str:
    """Join words by commas."""
    return ", ".join(words)


def nearest(name: str, known: Iterable[str]) -> str:
    """A question for the end of an error if `known` has a name similar to `name`; else an empty text."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f' Did you mean "{close[0]}"?' if close else ""
