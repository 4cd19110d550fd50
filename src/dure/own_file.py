"""A user's own Python files: what they define goes by `FILE.py:NAME`, wherever a built-in name would stand."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from dure.errors import UsageError

_FILES: dict[str, str] = {}
"""Of the modules that came from files: what the file was called."""


def split(text: str) -> tuple[str, str] | None:
    """The file and the name in it, if `text` is of the form FILE.py:NAME.

    >>> split("lab/post_local.py:PostLocal"), split("ssp")
    (('lab/post_local.py', 'PostLocal'), None)
    """
    match = re.fullmatch(r"(.+\.py):(\w+)", text)
    return (match[1], match[2]) if match else None


def run(file: str) -> ModuleType:
    """The module that `file` is, run anew; modules beside it can be imported, as when it is run as a script.

    Raises `UsageError` where there is no such file.
    """
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file} (looked from {Path.cwd()}). Write FILE.py:NAME.")
    name = f"dure_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be imported as Python. Write FILE.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _FILES[name] = file
    with imports_beside(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def imports_beside(path: Path) -> Iterator[None]:
    """While open, modules in the folder of `path` can be imported."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def kind(file: str, name: str) -> type:
    """The class `name` in `file`, the same one each time. Raises `UsageError`."""
    module = sys.modules.get(f"dure_file_{Path(file).stem}")
    if module is None or _FILES[module.__name__] != file:
        module = run(file)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        raise UsageError(f"{file} has no class {name!r}.")
    return found


def text_of(kind: type) -> str | None:
    """What a class from a file goes by; None for any other."""
    file = _FILES.get(kind.__module__)
    return None if file is None else f"{file}:{kind.__qualname__}"
