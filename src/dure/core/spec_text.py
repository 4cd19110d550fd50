"""The text form of members with parameters, `NAME:KEY=VALUE,KEY=VALUE`, typed by the member's dataclass.

Methods, topologies, codecs, optimizers, splits, schedules and jobs have this form. A wrong text raises `StrategyError`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from enum import Enum
from functools import cache
from inspect import get_annotations
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
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
        if not has_text(known[key].annotation):
            kind_text = type_text(known[key].annotation)
            raise StrategyError(
                f"{member.name}: {key} is of the type {kind_text}, which no text gives. Annotate it as bool, int, "
                "float, str, Path, an Enum, a Literal, a tuple of such, or one of these or None."
            )
        try:
            values[known[key].field] = parse_value(text, known[key].annotation)
        except ValueError as error:
            raise StrategyError(f'{member.name}: {key} must be {error}, got "{text}".') from error
    return values


def check_values(name: str, member: Any) -> None:
    """Check that the parameters of an object have their types. Raises `StrategyError`.

    A default may have another type, as in `period: int = None`. A parameter whose type has no text may have any value.
    """
    for parameter in parameters(type(member)):
        value = getattr(member, parameter.field)
        expected = _expected(value, parameter.annotation)
        if expected and differs(value, parameter.default):
            raise StrategyError(f"{name}: {parameter.name} must be {expected}, got {quoted(value)}.")


def _expected(value: Any, annotation: Any) -> str:
    """The annotated type in words if `value` is of another; else an empty text."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        expected = [_expected(value, member) for member in inner]
        return "" if "" in expected else " or ".join(word for word in expected if word != "none")
    if origin is Literal:
        known = isinstance(value, str | int | None) and value in inner
        return "" if known else " or ".join(map(value_text, inner))
    if origin is tuple:
        return _expected_items(value, inner)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "" if isinstance(value, annotation) else " or ".join(map(value_text, annotation))
    if annotation is int and isinstance(value, Integral) and abs(int(value)) >= WIDEST:
        return _NARROW
    fits, words = _TYPES.get(annotation, (lambda value: True, ""))
    return "" if fits(value) else words


def _expected_items(value: Any, kinds: tuple[Any, ...]) -> str:
    if not isinstance(value, tuple):
        return "a tuple"
    expected = (_expected(item, _kind_of_item(kinds, place)) for place, item in enumerate(value))
    return next((f"a tuple of which each is {words}" for words in expected if words), "")


def _kind_of_item(kinds: tuple[Any, ...], place: int) -> Any:
    """The type at a place of `tuple[kinds]`."""
    return kinds[0] if kinds[-1] is Ellipsis else kinds[min(place, len(kinds) - 1)]


def _is_float(value: Any) -> bool:
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:  # an integer that no float has
        return False
    return True


_NARROW = "an integer of at most 63 bits"

_TYPES: Mapping[Any, tuple[Callable[[Any], bool], str]] = {
    types.NoneType: (lambda value: value is None, "none"),
    bool: (
        lambda value: not isinstance(value, str) and str(value) in ("True", "False"),
        "true or false",
    ),  # numpy's too
    int: (lambda value: isinstance(value, Integral) and not isinstance(value, bool), "an integer"),
    float: (_is_float, "a number (inf is one)"),
    str: (lambda value: isinstance(value, str), "a text"),
    Path: (lambda value: isinstance(value, str | PathLike), "a path"),
}
"""Whether a value of an object has a type, and the type in words."""


def differs(value: Any, default: Any) -> bool:
    """Whether a value differs from the default of its parameter. Values without an order, as tensors, differ."""
    try:
        return value is not default and not bool(value == default)
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of a user's class
        return True


def parameters(kind: type) -> tuple[Parameter, ...]:
    """The parameters of a member: the fields of the dataclass `kind`.

    A field that is named like a Python keyword ends in `_`, the name of its parameter does not. The field of a wrapper
    for the wrapped member has `joined` in its metadata and is no parameter.
    """
    hints = _hints(kind)
    own = [each for each in fields(kind) if each.init and "joined" not in each.metadata]
    described = ("shown", "meaning", "range", "unit", "symbol")
    return tuple(
        Parameter(
            each.name.rstrip("_"),
            each.name,
            hints[each.name],
            each.default if each.default_factory is MISSING else each.default_factory(),
            **{key: each.metadata[key] for key in described if key in each.metadata},
        )
        for each in own
    )


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """The types of the fields of a dataclass. Its other annotations may have names that only a type checker knows."""
    try:
        return get_type_hints(kind)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return {each.name: _hint(kind, each) for each in fields(kind)}


def _hint(kind: type, field: Field[Any]) -> Any:
    owner = next(base for base in kind.__mro__ if field.name in get_annotations(base))
    alone = type(owner.__name__, (), {"__annotations__": {field.name: field.type}, "__module__": owner.__module__})
    try:
        return get_type_hints(alone)[field.name]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise StrategyError(
            f"{kind.__name__}: the type of {field.name} is {quoted(field.type)}, which cannot be read ({error}). "
            "Define or import it where the class is defined, and not for type checkers alone."
        ) from error


def has_text(annotation: Any) -> bool:
    """Whether `parse_value` makes values of the annotated type.

    >>> has_text(int | None), has_text(tuple[str, ...]), has_text(list[int])
    (True, True, False)
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (types.UnionType, Union):
        return any(has_text(member) for member in inner if member is not types.NoneType)
    if origin is tuple:
        return all(has_text(each) for each in inner if each is not Ellipsis)
    known = origin is Literal or annotation in (*_TYPES, Any, object)
    return known or (isinstance(annotation, type) and issubclass(annotation, Enum))


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
        kinds = get_args(annotation)
        return tuple(parse_value(item, _kind_of_item(kinds, place)) for place, item in enumerate(text.split("/")))
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _choose(text, {value_text(choice): choice for choice in annotation})
    if annotation is Path:
        return Path(text)
    if annotation is bool:
        return _choose(text.lower(), {"true": True, "false": False})
    if annotation in (int, float):
        try:
            value = annotation(text)
        except ValueError as error:
            raise ValueError(_TYPES[annotation][1]) from error
        if annotation is int and abs(value) >= WIDEST:
            raise ValueError(_NARROW)
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
    if isinstance(value, Enum):
        return value_text(value.value)
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


_LINE = re.compile(
    r"(?P<machines>[0-9]{1,6})\s*x\s*(?P<gpus>[0-9]{1,4})\s+(?P<gpu>[a-z][a-z0-9.-]*)"
    r"(?:\s+(?P<inside>[a-z][a-z-]*))?"
    r"(?:\s*@\s*(?:(?P<cards>[0-9]{1,4})\s*x\s*)?(?P<link>.+?)(?:\s+(?P<transport>rdma|tcp))?)?",
    re.IGNORECASE,
)


class MachinesLine(NamedTuple):
    """Machines with GPUs in one line; None and empty texts where the line leaves a fact open.

    `gpu` names the GPUs, `inside` the kind of links between those of a machine, which has `cards` network cards of the
    bandwidth `link` each.

    >>> str(MachinesLine(2, 8, "v100-sxm2-16gb", "mesh", 4, "100 Gbit/s", "rdma"))
    '2x8 v100-sxm2-16gb mesh @ 4x 100 Gbit/s rdma'
    """

    machines: int
    gpus: int
    gpu: str
    inside: str = ""
    cards: int | None = None
    link: str = ""
    transport: str = ""

    def __str__(self) -> str:
        cards = "" if self.cards is None else f"{self.cards}x"
        own = " ".join(filter(None, [f"{self.machines}x{self.gpus}", self.gpu, self.inside]))
        return " @ ".join(filter(None, [own, " ".join(filter(None, [cards, self.link, self.transport]))]))


def machines_in_line(text: str) -> MachinesLine | None:
    """The machines of one line; None for another text.

    >>> line = machines_in_line("4x8 v100-sxm2-16gb @ 2x100 Gbit/s")
    >>> line.gpus, line.cards, line.link, line.transport, machines_in_line("cluster.yaml")
    (8, 2, '100 Gbit/s', '', None)
    """
    found = _LINE.fullmatch(text.strip())
    if found is None:
        return None
    gpu, inside, transport = ((found[name] or "").lower() for name in ("gpu", "inside", "transport"))
    cards = None if found["cards"] is None else int(found["cards"])
    machines, gpus = int(found["machines"]), int(found["gpus"])
    return MachinesLine(machines, gpus, gpu, inside, cards, found["link"] or "", transport)
