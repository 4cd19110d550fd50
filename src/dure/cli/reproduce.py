"""Finds the studies of papers, which other distributions name in the entry point group `dure.studies`.

An entry point names a module, or an object in it. A module is a study, or has one as its `STUDY`.

A study has `reproduce`, which returns the object of `dure reproduce NAME --json`, and `table`, which shows it. The
parameters of `reproduce` are its flags, all with defaults; the help of a flag is in its type, `Annotated[int,
tyro.conf.arg(help="Number of seeds.")]`. `quick` are the flags of a reduced form.

The group `dure.papers` has two more modules with `reproduce` and `table`: `rows`, the list of what the papers show, and
`all`, which runs the commands of these rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, make_dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from dure.core.packages import loaded, offer, offers, origin
from dure.core.spec_text import names, nearest
from dure.core.user_code import explain_user_errors
from dure.errors import UsageError

C = TypeVar("C")

STUDIES, PAPERS = "dure.studies", "dure.papers"

INSTALL = "pip install dure-studies"

ALL = "--all"
"""Stands for the name of a study where the command runs all rows."""


class PaperStudy(Protocol):
    """A study, or a module of the group `dure.papers`."""

    reproduce: Callable[..., dict[str, Any]]
    table: Callable[[dict[str, Any]], Any]


def find(name: str) -> PaperStudy:
    """The study that reproduces `name`. Raises `UsageError`."""
    return _loaded(STUDIES, name)


def papers(name: str) -> PaperStudy:
    """The module of the papers with this name, `rows` or `all`. Raises `UsageError`."""
    return _loaded(PAPERS, name)


def _loaded(group: str, name: str) -> PaperStudy:
    entry = offer(group, "a study", name)
    if entry is None:
        raise UsageError(_unknown(name, sorted(offers(group).names)))
    found = loaded(entry, "the study", "MODULE or MODULE:OBJECT")
    study: PaperStudy = getattr(found, "STUDY", found)
    missing = [each for each in ("reproduce", "table") if not callable(getattr(study, each, None))]
    if missing:
        raise UsageError(f"the study {name} of {origin(entry)} is {entry.value}, which has no function {missing[0]}.")
    return study


def _unknown(name: str, known: Sequence[str]) -> str:
    if not known:
        return f"the studies of papers are a distribution of their own: {INSTALL}."
    more = "" if offers(PAPERS) else f" Studies of papers come with {INSTALL}."
    return f"nothing called {name!r} can be reproduced: there is {names(known)}.{nearest(name, known)}{more}"


def with_flags(command: type[C], arguments: Sequence[str]) -> type[C]:
    """`command` with the flags of the study that `arguments` name, and its defaults.

    With `--quick` among `arguments`, the defaults are those of the reduced form. Raises `UsageError` for a flag that
    neither `command` nor the study takes.
    """
    own = {option.name for option in fields(command)}  # type: ignore[arg-type]
    name, study = _named(arguments)
    takes = {} if study is None else {each: hint for each, hint in _flags(name, study).items() if each not in own}
    given = (each.removeprefix("--").partition("=")[0] for each in arguments if each.startswith("--") and each != "--")
    wrong = next((each for each in given if each.replace("-", "_") not in {*own, *takes, "help"}), None)
    if wrong is not None:
        raise UsageError(_refusal(name, wrong, takes))
    defaults = {each: takes[each].default for each in takes}
    with explain_user_errors(f"the flags of the study {name} cannot be read:"):
        defaults |= _quick(name, study, takes) if "--quick" in arguments else {}
        options = [(each, flag.hint, field(default=defaults[each])) for each, flag in takes.items()]
        return make_dataclass(
            command.__name__,
            options,
            bases=(command,),
            frozen=True,
            kw_only=True,
            namespace={"__doc__": command.__doc__},
        )


def _named(arguments: Sequence[str]) -> tuple[str, PaperStudy | None]:
    """The study that `arguments` name and its name, or those of `--all`, or nothing."""
    if "--all" in arguments:
        return ALL, papers("all")
    known = offers(STUDIES).names
    first = "".join(each for each in arguments[:1] if not each.startswith("-"))
    name = first or next((each for each in arguments if each in known), "")
    return (name, find(name)) if name else ("", None)


class Flag(NamedTuple):
    """A parameter of a study: its type, with its help as `tyro.conf.arg`, and its default."""

    hint: Any
    default: Any


def _flags(name: str, study: PaperStudy) -> dict[str, Flag]:
    with explain_user_errors(f"the flags of the study {name} cannot be read:"):
        hints = get_type_hints(study.reproduce, include_extras=True)
        parameters = inspect.signature(study.reproduce).parameters.values()
    for each in parameters:
        if name != ALL and (each.default is each.empty or each.name not in hints):
            raise UsageError(f"the parameter {each.name} of reproduce in the study {name} needs a type and a default.")
    return {each.name: Flag(hints[each.name], each.default) for each in parameters if each.default is not each.empty}


def _quick(name: str, study: PaperStudy | None, takes: Iterable[str]) -> Mapping[str, Any]:
    quick: Mapping[str, Any] = getattr(study, "quick", {})
    for each in quick:
        if each not in takes:
            raise UsageError(f"quick of the study {name} has {each!r}, and its flags are {names(takes) or 'none'}.")
    return quick


def _refusal(name: str, flag: str, takes: Iterable[str]) -> str:
    if not name:
        return f"--{flag} belongs to one result: name it, as in dure reproduce pipelines."
    if name == ALL:
        return f"--all runs every row; it has no use for --{flag}."
    known = names(f"--{each}".replace("_", "-") for each in takes)
    return f"{name} has no use for --{flag}; it takes {known or 'none'}."
