"""Finds the studies of papers: modules that other distributions name in the entry point group `dure.studies`.

A study has `reproduce`, which returns the object of `dure reproduce NAME --json`, and `table`, which shows it. The
parameters of `reproduce` are the flags that apply to it, all with defaults. `QUICK` are the flags of a reduced form.

The group `dure.papers` has two more modules with `reproduce` and `table`: `rows`, the list of what the papers show, and
`all`, which runs the commands of these rows.
"""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from dure.core.spec_text import names, nearest
from dure.errors import UsageError

STUDIES, PAPERS = "dure.studies", "dure.papers"


def find(name: str) -> ModuleType:
    """The module that reproduces `name`. Raises `UsageError`."""
    return _module(STUDIES, name)


def papers(name: str) -> ModuleType:
    """The module of the papers with this name, `rows` or `all`. Raises `UsageError`."""
    return _module(PAPERS, name)


def _module(group: str, name: str) -> ModuleType:
    found = entry_points(group=group)
    if not found:
        raise UsageError("the studies of papers are a distribution of their own: pip install dure-studies.")
    if name not in found.names:
        known = sorted(found.names)
        raise UsageError(f"nothing called {name!r} can be reproduced: there is {names(known)}.{nearest(name, known)}")
    module: ModuleType = found[name].load()
    return module


def check(name: str, module: ModuleType, flags: dict[str, Any]) -> None:
    """Raise `UsageError` if one of `flags` does not apply to `module`."""
    takes = list(inspect.signature(module.reproduce).parameters)
    for flag in flags:
        if flag not in takes:
            raise UsageError(f"{name} has no use for --{flag}; it takes {names(f'--{each}' for each in takes)}.")
