"""Declarations of services: the permitted callers of each method, the types of its fields, the tensors that it takes.

A method is declared once, on its handler:

    class Counter(RemoteService):
        called = "the counter"

        @remote(WORKERS, worker=OWN, by=COUNT, group=maybe(nullable(COUNT)))
        @carrying(lambda counter: counter.specs)
        def _count(self, call: Call) -> Reply: ...

A node checks every call from a connection by the declaration before the service handles the call, and refuses a wrong
call, which then has no effect. Calls from the service's own node and in virtual time are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from dure.errors import Refused

if TYPE_CHECKING:
    from dure.core.node import Call, Reply, TensorSpec

LONGEST_TEXT = 10_000
"""Most characters of a text in a field."""

LARGEST = 1 << 53
"""The largest integer that every JSON parser represents exactly."""

SHOWN = 40
"""Most characters of a wrong value in a refusal."""


NODES = ("worker", "server", "actor", "replay")
WORKERS = ("worker",)
ACTORS = ("actor",)
COMPANIONS = ("actor", "replay")
DRIVER = ("driver",)
CLOCK = ("server 0",)
"""The node of the clock, which commands the shards."""


class Field(NamedTuple):
    """Type of a field: `said` describes it in words, `holds(value, caller)` tests a value. It may be optional."""

    said: str
    holds: Callable[[Any, str], bool]
    may_lack: bool = False


@dataclass(frozen=True)
class Method:
    """A method of a service: its permitted callers and the types of its fields.

    `callers` are names of nodes ("driver") or kinds of nodes ("worker" permits each "worker N"); empty permits all.
    """

    callers: tuple[str, ...] = ()
    fields: Mapping[str, Field] = field(default_factory=dict)


Handler = TypeVar("Handler", bound=Callable[..., "Reply | Awaitable[Reply]"])
Tensors = Callable[[Any], "Sequence[TensorSpec]"]
"""Returns the tensors that a service expects."""


def remote(*callers: tuple[str, ...], **fields: Field) -> Callable[[Handler], Handler]:
    """Declare a handler of a `RemoteService` as a method that `callers` may call with `fields`.

    The method has the name of the handler, without an underscore at its front. Without callers, every node may call it.
    """
    for name, each in fields.items():
        if not isinstance(each, Field):
            raise TypeError(f"the field {name} needs a type such as COUNT or maybe(TEXT), got {each!r}.")
    for group in callers:
        if isinstance(group, str):
            raise TypeError(f"callers are groups such as WORKERS or DRIVER, got {group!r}. Use ({group!r},).")
    method = Method(tuple(chain.from_iterable(callers)), fields)

    def declare(handler: Handler) -> Handler:
        handler.__remote__ = method  # type: ignore[attr-defined]
        return handler

    return declare


def carrying(tensors: Tensors) -> Callable[[Handler], Handler]:
    """Declare the tensors that a call of a `remote` method brings; `tensors` gives them for a service."""

    def declare(handler: Handler) -> Handler:
        handler.__carried__ = tensors  # type: ignore[attr-defined]
        return handler

    return declare


class _Declared(NamedTuple):
    """A method, the name of its handler, and the tensors that it takes."""

    handler: str
    method: Method
    tensors: Tensors


class RemoteService:
    """An object on a node whose methods other nodes call: the handlers that `remote` declares.

    `called` names the service in refusals. A subclass has the methods of its bases, in their order, and may override a
    handler. Of a class with `checked=False` the callers and fields are not checked.
    """

    called: ClassVar[str] = "the service"
    protocol: ClassVar[Mapping[str, Method]] = {}
    _declared: ClassVar[Mapping[str, _Declared]] = {}

    def __init_subclass__(cls, *, checked: bool = True) -> None:
        found: dict[str, _Declared] = {}
        for handler, value in chain.from_iterable(vars(base).items() for base in reversed(cls.__mro__)):
            if isinstance(method := getattr(value, "__remote__", None), Method):
                name = handler.removeprefix("_")
                if name in found and found[name].handler != handler:
                    raise TypeError(f"{cls.__name__} declares {name} twice: by {found[name].handler} and by {handler}.")
                found[name] = _Declared(handler, method, getattr(value, "__carried__", lambda service: ()))
        cls._declared = found
        cls.protocol = {name: each.method for name, each in found.items()} if checked else {}

    def handle(self, call: Call) -> Reply | Awaitable[Reply]:
        """Answer a call. Raises `Refused` for a method that is not declared."""
        declared = self._declared.get(call.method)
        if declared is None:
            raise Refused(self.unknown(call))
        self.admit(call)
        answer: Reply | Awaitable[Reply] = getattr(self, declared.handler)(call)
        return answer

    def admit(self, call: Call) -> None:
        """Raise `Refused` for a call of a declared method from a caller that has no part in this service."""

    def unknown(self, call: Call) -> str:
        """The refusal of a method that is not declared."""
        return f'{self.called} has no method "{call.method}"; it has {", ".join(self._declared)}.'

    def expects(self, method: str) -> Sequence[TensorSpec]:
        """The tensors that a call of `method` must bring."""
        declared = self._declared.get(method)
        return () if declared is None else declared.tensors(self)


def check(service: str, method: Method, call: Call) -> None:
    """Raise `Refused` for a `call` of `method` from a caller that is not permitted, or with wrong fields."""
    caller = call.caller
    if method.callers and not (_is_kind(caller, method.callers) or caller in set(method.callers).difference(NODES)):
        raise Refused(f"{caller} may not call {call.method} of {service}: it is for {' and '.join(method.callers)}.")
    given = call.fields
    for name, expected in method.fields.items():
        if name not in given:
            if not expected.may_lack:
                raise Refused(f"{call.method} of {service} lacks the field {name}, {expected.said}.")
        elif not expected.holds(given[name], caller):
            shown = repr(given[name])[:SHOWN]
            raise Refused(f"{call.method} of {service} has {name}={shown}, which must be {expected.said}.")
    if len(given) > len(method.fields) or not given.keys() <= method.fields.keys():
        unknown = ", ".join(str(name)[:SHOWN] for name in sorted(given.keys() - method.fields.keys()))
        if unknown:
            raise Refused(f"{call.method} of {service} has no field {unknown}.")


def _is_kind(caller: str, callers: tuple[str, ...]) -> bool:
    kind, _, number = caller.partition(" ")
    return kind in callers and number.isascii() and number.isdecimal()


# ---- types of fields


def maybe(expected: Field) -> Field:
    """The same type, for an optional field."""
    return expected._replace(may_lack=True)


def nullable(expected: Field) -> Field:
    """The same type, or null."""
    return Field(f"{expected.said}, or null", lambda value, caller: value is None or expected.holds(value, caller))


def listed(expected: Field) -> Field:
    """A list of values of a type."""
    return Field(
        f"a list, each {expected.said}",
        lambda value, caller: isinstance(value, list) and all(expected.holds(each, caller) for each in value),
    )


def row(*expected: Field) -> Field:
    """A list with one value of each type, in order."""
    return Field(
        f"a list of {', '.join(each.said for each in expected)}",
        lambda value, caller: (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(each.holds(one, caller) for each, one in zip(expected, value, strict=True))
        ),
    )


def record(**expected: Field) -> Field:
    """An object with these fields and no others."""

    def holds(value: Any, caller: str) -> bool:
        if not isinstance(value, dict) or not value.keys() <= expected.keys():
            return False
        return all(
            each.holds(value[name], caller) if name in value else each.may_lack for name, each in expected.items()
        )

    return Field(f"an object with {', '.join(expected)}", holds)


def mapping(expected: Field) -> Field:
    """An object with any keys and values of one type."""
    return Field(
        f"an object, each value {expected.said}",
        lambda value, caller: isinstance(value, dict) and all(expected.holds(each, caller) for each in value.values()),
    )


def one_of(*texts: str) -> Field:
    """One of these texts."""
    return Field(f"one of {', '.join(texts)}", lambda value, caller: isinstance(value, str) and value in texts)


def either(*expected: Field) -> Field:
    """A value of one of these types."""
    return Field(
        " or ".join(each.said for each in expected), lambda value, caller: any(f.holds(value, caller) for f in expected)
    )


def _is_number(value: Any) -> bool:
    """Whether a float represents the number: integers of JSON may have any length."""
    return type(value) is float or (type(value) is int and abs(value) <= LARGEST)


def _is_own(value: Any, caller: str) -> bool:
    return type(value) is int and caller.partition(" ")[2] == str(value)


COUNT = Field("a whole number from 0 to 2^53", lambda value, _: type(value) is int and 0 <= value <= LARGEST)
WHOLE = Field("a whole number to 2^53", lambda value, _: type(value) is int and abs(value) <= LARGEST)
NUMBER = Field("a number", lambda value, _: _is_number(value))
FINITE = Field("a finite number", lambda value, _: _is_number(value) and math.isfinite(value))
TRUTH = Field("true or false", lambda value, _: type(value) is bool)
TEXT = Field("a text", lambda value, _: isinstance(value, str) and len(value) <= LONGEST_TEXT)
NODE = Field("the name of a node", lambda value, _: isinstance(value, str) and _is_kind(value, NODES))
OWN = Field("the caller's own rank", _is_own)
RATE = nullable(either(FINITE, listed(FINITE)))
PORT = Field("a port from 1 to 65535", lambda value, _: type(value) is int and 0 < value < 1 << 16)
PLACE = row(TEXT, PORT)
