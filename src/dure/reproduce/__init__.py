"""Tables and figures of papers, made again: what each said, beside what this library finds.

| name       | module     | from                                                                             |
|------------|------------|----------------------------------------------------------------------------------|
| `sharding` | `sharding` | a comparison of layer-based and memory-based parameter sharding on VGG-16        |

A module here has `reproduce(on)`, which returns what `dure reproduce NAME --json` prints, and `table` of that.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from dure.errors import UsageError
from dure.text import names, nearest

NAMES = {"sharding": "dure.reproduce.sharding"}


def find(name: str) -> ModuleType:
    """The module that reproduces `name`. Raises `UsageError`."""
    if name not in NAMES:
        known = names(NAMES)
        raise UsageError(f"nothing called {name!r} can be reproduced: there is {known}.{nearest(name, NAMES)}")
    return import_module(NAMES[name])
