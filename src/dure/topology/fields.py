"""Fields of the calls between workers, shards and the clock, for the `@remote` handlers of each service."""

from __future__ import annotations

from dure.core.protocol import (
    COUNT,
    NUMBER,
    OWN,
    RATE,
    TEXT,
    TRUTH,
    WHOLE,
    Field,
    either,
    listed,
    mapping,
    maybe,
    nullable,
    one_of,
    record,
    row,
)

LIFE = {"worker": OWN, "incarnation": COUNT}
"""The calling worker and its incarnation."""

WORD = {"group": maybe(nullable(COUNT)), "note": maybe(mapping(NUMBER))}
"""Fields of an update, besides its number, that a clock gets."""

STAGED = {**WORD, "seq": COUNT}

HAS = {"has": maybe(nullable(COUNT))}
"""The version that a worker has, where shards answer with the results of votes."""

PUSHED = {
    **LIFE,
    "seq": COUNT,
    "base": nullable(COUNT),
    "weight": NUMBER,
    "ordered": TRUTH,
    "lr": maybe(RATE),
    "exponent": maybe(NUMBER),
    "gradients": maybe(COUNT),
    "void": maybe(TRUTH),
    "pull": maybe(TRUTH),
    **HAS,
}
"""An update."""

CLOSED = {
    "version": COUNT,
    "group": COUNT,
    "members": listed(row(COUNT, COUNT)),
    "drop": listed(COUNT),
    "reduce": one_of("mean", "sum"),
}
"""A group that the clock has closed."""

LEFT = {"worker": COUNT, "incarnation": WHOLE, "keep": listed(COUNT)}
"""A worker that is off the clock. The incarnation before its first is -1."""

REPORT = record(evaluation=COUNT, run=row(COUNT, COUNT), seq=nullable(COUNT), losses=listed(NUMBER))
"""Portions that a worker has done (`coordinator`)."""


def _is_command(value: object, caller: str) -> bool:
    return isinstance(value, list) and bool(value) and all(_ARGUMENT.holds(each, caller) for each in value)


_ARGUMENT = either(NUMBER, TEXT)

COMMAND = Field("a command with its arguments", _is_command)
"""One of those of `vectors`."""
