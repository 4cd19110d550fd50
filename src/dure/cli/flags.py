"""Options of a command from the words of the command line, the environment and a file.

    defaults  <  file (--config)  <  environment (DURE_WORKERS=8)  <  flags

tyro separates the words into texts, one or several for each option. The command, a dataclass of `run.config.Checked`
options, checks them, as it does texts of the environment and values of the file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.conf import arg

from dure.cli.commands import COMMANDS, Command, Layered, Reproduce
from dure.cli.reproduce import with_flags
from dure.core.text import quoted
from dure.errors import UsageError
from dure.run.config import Checked, FlagName, Options, OptionUse

conf: Any = tyro.conf
"""tyro.conf without its static types: its markers are applied here to types that are made at run time."""

PREFIX = "DURE_"

STYLE = (tyro.conf.DisallowNone, tyro.conf.PositionalMetavarFromFieldName)

ABOUT = (
    "Train one PyTorch model on many machines: every way of doing it, in virtual and in real time. dure --version says "
    "which version this is."
)


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Parse the command in `arguments`, over file and environment. Wrong flags end the process with status 2."""
    name = arguments[0] if arguments else ""
    if name in COMMANDS:  # the parser of one command is made sooner than that of all
        kind = with_flags(Reproduce, arguments[1:]) if name == "reproduce" else COMMANDS[name]
        _check_switches(kind, arguments[1:])
        found = tyro.cli(_texts_of(kind), prog=f"dure {name}", args=list(arguments[1:]), config=STYLE)
    else:  # help, completion or a mistake; only completion needs the options
        completes = any(word.startswith("--tyro") for word in arguments)
        kinds = {name: _texts_of(each) if completes else _named(each) for name, each in COMMANDS.items()}
        every: Any = [Annotated[each, conf.subcommand(name)] for name, each in kinds.items()]
        union: Any = reduce(or_, every)
        found = tyro.cli(union, prog="dure", description=ABOUT, args=list(arguments), config=STYLE)
        kind = COMMANDS[type(found).__name__.lower()]
    texts = {name: getattr(found, name, None) for name in kind.types()}
    repeated = kind.used(OptionUse.REPEATED)
    given = {name: text for name, text in texts.items() if text is not None and (text or name not in repeated)}
    below = _layers(kind.layers, given.get("config"), environ) if issubclass(kind, Layered) else {}
    return kind.of({**below, **given})


# ---- words to texts


def _check_switches(kind: type[Checked], arguments: Sequence[str]) -> None:
    """Raise `UsageError` for a switch with a value: tyro would take that of --trace=no for the job."""
    switches = {name.replace("_", "-") for name, of in kind.types().items() if _plain(of) is bool}
    for word in arguments:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").removeprefix("no-").replace("_", "-")
        if equals and flag.startswith("--") and name in switches:
            raise UsageError(
                f"--{name} is a switch and has no value, got {quoted(value)}. Write --{name}, or leave it out."
            )


def _named(kind: type[Checked]) -> type:
    """A class with the name and the first lines of `kind`, and no option."""
    return make_dataclass(kind.__name__, [], namespace={"__doc__": kind.__doc__})


def _texts_of(kind: type[Checked]) -> type[Checked]:
    """`kind` as tyro reads it: each option is a text, texts or a switch, and None where it is not given."""
    layered = kind.layers.types() if issubclass(kind, Layered) else ()
    repeated, options = kind.used(OptionUse.REPEATED), []
    for option in fields(kind):  # type: ignore[arg-type]  # each subclass is a dataclass
        text = _text(kind.types()[option.name], option.default)
        if option.name not in layered:  # else the flag --no-NAME overrides a file
            text = conf.FlagCreatePairsOff[text]
        default = () if option.name in repeated else None
        options.append((option.name, text, field() if option.default is MISSING else field(default=default)))
    unchecked = {"__post_init__": lambda self: None, "__doc__": kind.__doc__}
    return make_dataclass(kind.__name__, options, bases=(kind,), frozen=True, kw_only=True, namespace=unchecked)


def _text(hint: Any, default: Any) -> Any:
    """The type of an option of the type `hint`, for tyro, with its flag and what the help says of it."""
    uses = hint.__metadata__ if get_origin(hint) is Annotated else ()
    kind = _plain(hint)
    item = _plain(get_args(kind)[0]) if get_origin(kind) is tuple else kind
    several: Any = tuple
    text: Any = item if item is bool or get_origin(item) is Literal else str
    metavar = item.__name__.upper() if text is str and OptionUse.POSITIONAL not in uses else None
    if kind is not item:
        text = several[text, ...]
        metavar = metavar and (metavar if OptionUse.REPEATED in uses else f"[{metavar} [{metavar} ...]]")
    shown = shlex.join(map(str, default)) if isinstance(default, tuple) else shlex.quote(str(default))
    hint_of_default = "(repeatable)" if OptionUse.REPEATED in uses else f"(default: {shown})"
    about = arg(
        name=next((use.name for use in uses if isinstance(use, FlagName)), None),
        metavar=metavar,
        help_behavior_hint=None if default is MISSING else hint_of_default,
    )
    annotated: Any = Annotated
    optional: Any = Union  # of this form, and None first: tyro would import typeguard for str | None
    text = annotated[(text if OptionUse.REPEATED in uses or default is MISSING else optional[None, text], *uses, about)]
    if OptionUse.POSITIONAL in uses:
        text = conf.Positional[text]
    return conf.UseAppendAction[text] if OptionUse.REPEATED in uses else text


def _plain(hint: Any) -> Any:
    """A type without its range, its uses, and None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _plain(next(each for each in get_args(hint) if each is not NoneType))
    return hint


# ---- a file and the environment


def _layers(kind: type[Options], path: str | None, environ: Mapping[str, str]) -> dict[str, Any]:
    """The options of `kind` that the file at `path` and the environment have; a list is not in the environment."""
    values = {} if path is None else _read(Path(path), kind)
    for name, of in kind.types().items():
        text = environ.get(f"{PREFIX}{name.upper()}")
        if text and get_origin(_plain(of)) is not tuple:
            values[name] = _checked(kind, name, text)
    return values


def _checked(kind: type[Options], name: str, text: str) -> Any:
    try:
        return kind.checked(name, text)
    except UsageError as error:
        raise UsageError(f"{PREFIX}{name.upper()}: {error}") from error


def _read(path: Path, kind: type[Options]) -> dict[str, Any]:
    from dure.core.validated import read_yaml_file

    try:
        values = read_yaml_file(path)
    except ValueError as error:
        raise UsageError(f"{path}: {error}. Give a YAML file of options as KEY: VALUE lines.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} must hold options as KEY: VALUE lines, it holds {type(values).__name__}.")
    values = {"on" if key is True else key: value for key, value in values.items()}  # YAML 1.1 reads the word as true
    try:
        kind.check_names(values)
        return {name: kind.checked(name, value) for name, value in values.items()}
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error
