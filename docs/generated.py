"""Parts of the documentation that are made from the code: docstrings, members, commands.

Directives: `{members} AXIS` documents all members of an axis, `{command} NAME` the options of a command,
`{shared-options} CLASS` those that several commands have, `{cluster-keys} KEY` the keys within a key of a cluster file,
and `{codec-costs}` the costs of codecs in virtual time.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BeforeValidator, PlainSerializer
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from dure.cli.commands import COMMANDS, Layered, Printed
from dure.cli.methods import members, values
from dure.codec import CATALOGUE, WRAPPERS
from dure.codec.cost import cost_of
from dure.core import units
from dure.core.catalogue import combines, load
from dure.core.validated import Validated
from dure.run.config import Checked, FlagName, Options, OptionUse, RunOptions, TrainingOptions
from dure.run.strategy import catalogue
from dure.runtime.virtual.cluster import Cluster

# ---- docstrings, which are plain text with indented blocks, as reStructuredText


def restructured(lines: list[str]) -> list[str]:
    """The docstring `lines` as reStructuredText: code in single quotes, indented blocks as they are."""
    found: list[str] = []
    for block in re.split(r"\n\s*\n", "\n".join(lines).strip("\n")):
        if block.startswith((" ", ">>>")):
            found += ["::", "", textwrap.indent(block, "    ").replace("\t", "    "), ""]
        elif block.startswith("|"):
            found += [*_list_table(block), ""]
        elif re.match(r"(Raises|Returns|Yields|Args|Examples?):", block):
            head, _, rest = block.partition("\n")
            found += [f"**{head}**", "", *_items(textwrap.dedent(rest)), ""]
        elif re.search(r"\n {2,}\S", block) or re.search(r"\S {3,}\S", block):  # a table of plain text
            found += ["::", "", textwrap.indent(block, "    "), ""]
        else:
            found += [_inline(block), ""]
    return "\n".join(found).split("\n")


def _list_table(block: str) -> Iterator[str]:
    """A table whose cells are separated by `|`, and whose second line is a rule."""
    head, _, *rest = (
        [_inline(cell.strip()) for cell in line.strip().removeprefix("|").removesuffix("|").split(" | ")]
        for line in block.splitlines()
    )
    yield from (".. list-table::", "   :header-rows: 1", "")
    for row in (head, *rest):
        yield from (f"   {'* -' if index == 0 else '  -'} {cell}" for index, cell in enumerate(row))


def _items(text: str) -> Iterator[str]:
    """Each item of a list such as that of errors, whose further lines are indented."""
    for item in re.split(r"\n(?=\S)", text):
        text = " ".join(_inline(line.strip()) for line in item.split("\n"))
        yield "- " + re.sub(r"^(\w+):", r":py:exc:`~dure.errors.\1`:", text)


def _inline(text: str) -> str:
    """`text` with code in double quotes, and without markup elsewhere."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"`{part}`" if part[:1] == "`" else re.sub(r"([*_|\\])", r"\\\1", part) for part in parts)


def _rewrite(app: Sphinx, what: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    lines[:] = restructured(lines)


# ---- members and commands, as Markdown


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """`text` with the characters of markup escaped, outside of code."""
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(part if part[:1] == "`" else re.sub(r"([*_<\[])", r"\\\1", part) for part in parts)


def member(row: dict[str, Any], depth: str = "##") -> str:
    """The section of one member: its class with types, paper, combinations and parameters."""
    name = row["name"]
    parts = [f"{depth} {name}", f"```{{eval-rst}}\n.. autoclass:: {row['class']}\n   :no-members:\n```"]
    facts = [f"- Paper: {_plain(row['paper'])}"]
    if row["combines"]:
        how = {"sync": "Runs over", "codec": "Goes with"}.get(row["axis"], "Joins")
        facts.append(f"- {how}: {', '.join(f'`{each}`' for each in row['combines'])}")
    parts.append("\n".join(facts))
    if row["parameters"]:
        head = ("parameter", "default", "values", "unit", "symbol", "meaning")
        rows = (
            (f"`{each['name']}`", each["default"], values(each), each["unit"], each["symbol"], each["meaning"])
            for each in row["parameters"]
        )
        parts.append(table(head, ([cells[0], *map(_plain, cells[1:])] for cells in rows)))
    return "\n\n".join(parts)


SHARED = (RunOptions, TrainingOptions, Options, Layered, Printed)
"""Classes of options that several commands have."""


def command(name: str) -> str:
    """The effect, an example and the options of a command; of the options that commands share, the names."""
    kind = COMMANDS[name]
    about = " ".join((kind.__doc__ or "").split())
    parts = [_plain(about), f"```shell\n{kind.example}\n```"]
    given = fields(kind)  # type: ignore[arg-type]
    own = [each for each in given if owner(kind, each.name) not in SHARED]
    if own:
        parts.append(options(kind, own))
    shared = [f"`{flag(kind, each.name)}`" for each in given if each not in own]
    parts.append(f"Also, {'as explained below' if len(shared) > 1 else 'as every command'}: {', '.join(shared)}.")
    return "\n\n".join(parts)


def options(kind: type[Checked], of: Iterable[Any]) -> str:
    """The table of the options `of` the class `kind`."""
    rows = ([f"`{flag(kind, each.name)}`", *option(kind, each.name, each.default)] for each in of)
    return table(("option", "values", "default", "meaning"), rows)


def owner(kind: type, name: str) -> type:
    """The class that declares an option or a key."""
    return next(base for base in kind.__mro__ if name in vars(base).get("__annotations__", {}))


def flag(kind: type[Checked], name: str) -> str:
    """The word of the command line for an option."""
    uses = getattr(kind.types()[name], "__metadata__", ())
    word = next((use.name for use in uses if isinstance(use, FlagName)), name).replace("_", "-")
    return name.upper() if OptionUse.POSITIONAL in uses else f"--{word}"


def option(kind: type[Checked], name: str, default: Any) -> list[str]:
    """The values, the default and the meaning of an option."""
    of = owner(kind, name)
    docs = ModuleAnalyzer.for_module(of.__module__).find_attr_docs()
    absent = default is MISSING or default is None or default in ((), "", False)
    meaning = re.sub(r"(?<![\w`-])(--[a-z-]+)", r"`\1`", " ".join(" ".join(docs[of.__qualname__, name]).split()))
    return [_values(kind.types()[name]), "" if absent else f"`{default}`", _plain(meaning)]


def _values(hint: Any) -> str:
    """The values of an option, in words."""
    kind, _ = next(_parts(hint))
    if get_origin(kind) is tuple:
        return "several"
    words = {bool: "switch", int: "whole number", float: "number", Path: "path"}
    return ", ".join(f"`{each}`" for each in _choices(hint)) or words.get(kind, "text")


# ---- keys of a cluster file, as Markdown

UNITS = {
    units.seconds: "time",
    units.rate: "bandwidth",
    units.per_byte: "time per byte",
    units.flops: "speed",
    units.size: "size",
    units.samples_per_second: "samples per second",
}
BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def models(hint: Any) -> list[type[Validated]]:
    """The models in a type: that of a mapping, or several of which a file writes one."""
    if isinstance(hint, type) and issubclass(hint, Validated):
        return [hint]
    return [model for part in get_args(hint) for model in models(part)]


def cluster_keys(path: str = "") -> str:
    """The keys within the key at `path`, such as `machines.compute`, with meanings, values and defaults."""
    kinds: list[type[Validated]] = [Cluster]
    for step in path.split(".") if path else ():
        kinds = next(models(kind.model_fields[step].annotation) for kind in kinds if step in kind.model_fields)
    rows: dict[tuple[str, type], list[str]] = {}
    for kind in kinds:
        own = {name for name in kind.model_fields if owner(kind, name) is kind}
        named = sorted(kind.model_fields, key=lambda name: (name in own, name in own and name != "distribution"))
        for name in named:
            rows[name, owner(kind, name)] = _key(name, kind.model_fields[name], owner(kind, name))
    head = f"key of `{path}`" if path else "key"
    return table((head, "meaning", "values", "default"), rows.values())


def _key(name: str, field: FieldInfo, declared: type) -> list[str]:
    """The row of a key. Of a distribution, the key with its value."""
    docs = ModuleAnalyzer.for_module(declared.__module__).find_attr_docs()
    meaning = _plain(" ".join(" ".join(docs[declared.__qualname__, name]).split()))
    shown, choices = field.alias or name, _choices(field.annotation)
    if len(choices) == 1:
        return [f"`{shown}: {choices[0]}`", meaning, "", ""]
    return [f"`{shown}`", meaning, _held(field), _default(field)]


def _choices(hint: Any) -> tuple[str, ...]:
    return next((get_args(part) for part, _ in _parts(hint) if get_origin(part) is Literal), ())


def _parts(hint: Any, notes: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The types of a union, each with its annotations, those of fields one by one."""
    if get_origin(hint) is Annotated:
        more = [note.metadata if isinstance(note, FieldInfo) else [note] for note in hint.__metadata__]
        yield from _parts(hint.__origin__, (*notes, *(note for each in more for note in each)))
    elif get_origin(hint) in (Union, UnionType):
        for part in get_args(hint):
            yield from _parts(part, notes)
    elif hint is not type(None):
        yield hint, notes


def _held(field: FieldInfo) -> str:
    """The values that a field may have, in words."""
    parts = list(_parts(field.annotation, tuple(field.metadata)))
    return "; ".join(dict.fromkeys(_word(*part) for part in parts))


def _word(kind: Any, notes: tuple[Any, ...]) -> str:
    """The values of a type, in words."""
    if get_origin(kind) is tuple:
        noun, comma, bounds = _word(*next(_parts(get_args(kind)[0]))).partition(",")
        return f"list of {noun}s{comma}{bounds}"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(kind))
    units = [UNITS[note.func] for note in notes if isinstance(note, BeforeValidator) and note.func in UNITS]
    words = {bool: "`true`, `false`", str: "name", int: "whole number", float: "number"}
    if units or kind not in (int, float):
        return units[0] if units else words.get(kind, "mapping")
    ends = {end: _number(getattr(note, end)) for end in BOUNDS for note in notes if hasattr(note, end)}
    if {"ge", "le"} <= ends.keys():
        return f"{words[kind]}, {ends['ge']} to {ends['le']}"
    return ", ".join([words[kind], *(f"{BOUNDS[end]} {bound}" for end, bound in ends.items())])


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _default(field: FieldInfo) -> str:
    """The default as a file would write it; empty where the meaning tells it."""
    if field.is_required():
        return "needed"
    value = field.default
    if value in (None, ()) or isinstance(value, (Validated, tuple)) or field.default_factory is not None:
        return ""
    written = next((note.func for note in field.metadata if isinstance(note, PlainSerializer)), None)
    if written is not None and value:
        return f"`{written(value)}`"  # type: ignore[call-arg]
    return f"`{str(value).lower()}`" if isinstance(value, (bool, str)) else f"`{value:.4g}`"


def _costed() -> list[str]:
    """The codecs that cost something, alone and with each wrapper."""
    joined = [f"{codec}+{name}" for name, place in WRAPPERS.items() for codec in combines(load(place))]
    return [name for name in (*CATALOGUE, *joined) if name != "fp32"]


def codec_costs() -> str:
    """The costs of codecs where a cluster file states none: microseconds of a call, nanoseconds of a value."""
    rows = []
    for name in _costed():
        cost = cost_of(name, {}, load(CATALOGUE[name.partition("+")[0]]).cost)
        lines = (cost.encode, cost.decode, cost.combine)
        rows.append([f"`{name}`", *(f"{line.start * 1e6:.4g} + {line.value * 1e9:.4g}" for line in lines)])
    return table(("codec", "encode", "decode", "combine"), rows)


class Members(SphinxDirective):
    """All members of one axis."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[Any]:
        """The sections of the members."""
        rows = [row for row in members() if row["axis"] == self.arguments[0]]
        for row in rows:
            self.env.note_dependency(load(catalogue(row["axis"])[row["name"]]).__module__)
        text = "\n\n".join(map(member, rows))
        return self.parse_text_to_nodes(text, allow_section_headings=True)


class SharedOptions(SphinxDirective):
    """The options of a class that several commands have."""

    required_arguments = 1

    def run(self) -> list[Any]:
        """The table."""
        kind = next(each for each in SHARED if each.__name__ == self.arguments[0])
        own = [each for each in fields(kind) if owner(kind, each.name) is kind]  # type: ignore[arg-type]
        return self.parse_text_to_nodes(options(kind, own))


class CommandOptions(SphinxDirective):
    """One command and its options."""

    required_arguments = 1

    def run(self) -> list[Any]:
        """The text of the command."""
        return self.parse_text_to_nodes(command(self.arguments[0]))


class ClusterKeys(SphinxDirective):
    """Keys of a cluster file: those within the key of the argument, else those of the file."""

    optional_arguments = 1

    def run(self) -> list[Any]:
        """The table of the keys."""
        return self.parse_text_to_nodes(cluster_keys(*self.arguments))


class CodecCosts(SphinxDirective):
    """The costs of codecs in virtual time."""

    def run(self) -> list[Any]:
        """The table of the costs."""
        return self.parse_text_to_nodes(codec_costs())


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives, and the conversion of docstrings."""
    app.connect("autodoc-process-docstring", _rewrite)
    app.add_directive("members", Members)
    app.add_directive("command", CommandOptions)
    app.add_directive("shared-options", SharedOptions)
    app.add_directive("cluster-keys", ClusterKeys)
    app.add_directive("codec-costs", CodecCosts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
