"""Catalogues: the members of an axis by name, each with the place of its class, "MODULE:CLASS"; and their parameters.

A lookup of a name does not import the class. The class states everything else:

    docstring                 the summary, in its first line
    paper                     the source, with the first author in front
    fields                    the parameters, described by `parameter`
    traits                    of a method: its properties, such as the topologies that it supports
    joins                     of a remedy or a codec wrapper: the members that it joins
    more_rows                 of a member with more to list than parameters: the place of a function that lists it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from importlib import import_module
from inspect import cleandoc
from typing import Any

from dure.core import user_code

Catalogue = Mapping[str, str]

MoreRows = Callable[[Any, int | None], dict[str, Any]]
"""Given a member, or None for all of its kind, and a number of workers or None: entries of a JSON object."""


def load(place: str) -> type:
    """Import the class at `place`.

    >>> load("fractions:Fraction")
    <class 'fractions.Fraction'>
    """
    module, _, name = place.partition(":")
    kind = getattr(import_module(module), name)
    assert isinstance(kind, type)
    return kind


def place_of(kind: type) -> str:
    """The place of the class `kind`, "MODULE:CLASS"."""
    return f"{kind.__module__}:{kind.__qualname__}"


def name_of(kind: type, members: Catalogue) -> str:
    """The name of a class in a catalogue. For a class of a user's file FILE.py:NAME, for any other its own name."""
    place = place_of(kind)
    for name, each in members.items():
        if each == place:
            return name
    return user_code.text_of(kind) or kind.__name__


def summary(kind: type) -> str:
    """The first line of a member's docstring, without its period."""
    return cleandoc(kind.__doc__ or "").partition("\n")[0].removesuffix(".")


def paper(kind: type) -> str:
    """The source of a member; empty for a user's class that names none."""
    return str(getattr(kind, "paper", ""))


def combines(kind: type) -> tuple[str, ...]:
    """The topologies of a method, its default first, or the members that a remedy or a wrapper joins; else empty."""
    found: tuple[str, ...] = getattr(kind, "joins", ()) or getattr(getattr(kind, "traits", None), "topologies", ())
    return found


def more_rows(kind: type) -> MoreRows | None:
    """The function that lists what a member has beside its parameters, as gossip has graphs; None for most members."""
    place = getattr(kind, "more_rows", None)
    if place is None:
        return None
    module, _, name = place.partition(":")
    found: MoreRows = getattr(import_module(module), name)
    return found


def parameter(
    default: Any,
    meaning: str,
    *,
    range: str = "",  # noqa: A002 - the word that readers of a parameter look for
    unit: str = "",
    symbol: str = "",
    shown: bool = True,
) -> Any:
    """A dataclass field with a description, which `dure methods NAME` shows.

    `range` has the bounds of a number as comparisons, such as ">= 0, < 1"; the right side may be another parameter.
    The class itself must check it. `symbol` is the paper's symbol, or empty. A member's text shows its first parameter
    even if it has its default, unless `shown=False`.

    >>> from dataclasses import dataclass, fields
    >>> @dataclass(frozen=True, slots=True)
    ... class Leap:
    ...     period: int = parameter(10, "local steps between two averages", range=">= 1", unit="steps", symbol="τ")
    >>> Leap().period, fields(Leap)[0].metadata["symbol"]
    (10, 'τ')
    """
    described = {"meaning": meaning, "range": range, "unit": unit, "symbol": symbol, "shown": shown}
    return field(default=default, metadata=described)
