"""Parts of the documentation that are made from the code: docstrings, members, commands.

Directives: `{members} AXIS` documents all members of an axis, `{command} NAME` the options of a command, and
`{shared-options} CLASS` those that several commands have.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from typing import Any, get_origin

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

from dure.cli.commands import COMMANDS, Layered, Printed
from dure.cli.methods import members, values
from dure.core.catalogue import load
from dure.run.config import Checked, FlagName, Options, OptionUse, RunOptions, TrainingOptions
from dure.run.strategy import catalogue

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


def owner(kind: type[Checked], name: str) -> type:
    """The class that declares an option."""
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
    from dure.cli.flags import _plain as bare

    kind = bare(hint)
    choices = getattr(kind, "__args__", ()) if "Literal" in str(kind) else ()
    if choices and get_origin(kind) is not tuple:
        return ", ".join(f"`{each}`" for each in choices)
    if get_origin(kind) is tuple:
        return "several"
    words = {bool: "switch", str: "text", int: "whole number", float: "number"}
    return words.get(kind, "path" if "Path" in str(kind) else "text")


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Add the directives, and the conversion of docstrings."""
    app.connect("autodoc-process-docstring", _rewrite)
    app.add_directive("members", Members)
    app.add_directive("command", CommandOptions)
    app.add_directive("shared-options", SharedOptions)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
