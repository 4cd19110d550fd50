"""Python files of users, whose classes and functions are named `FILE.py:NAME` in place of a built-in name.

`explain_user_errors` turns an exception of a user's code into one sentence with its file and line, without a traceback
of this library. `shown` is that sentence and the frames of the user's files; `record` writes the whole traceback into
the folder of a run.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import chain, count
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from dure.core import text as messages
from dure.core.regular_file import is_regular
from dure.errors import DureError, UsageError

T = TypeVar("T")

_FILES: dict[str, str] = {}
"""The file, as the user wrote it, of each module that was loaded from a file."""

_TEXTS: dict[type, str] = {}
"""The text FILE.py:NAME by which a class was loaded; its own name and module may be others."""

_OURS = Path(__file__).parents[1]  # the package
_STANDARD = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}

LONGEST = 2000
"""Most characters of an exception's text in an error."""


def split(text: str) -> tuple[str, str] | None:
    """The file and the name of a text of the form FILE.py:NAME; None for any other text.

    >>> split("lab/post_local.py:PostLocal"), split("ssp")
    (('lab/post_local.py', 'PostLocal'), None)
    """
    match = re.fullmatch(r"(.+\.py):(\w+)", text)
    return (match[1], match[2]) if match else None


def as_value(name: str) -> str:
    """FILE.py:NAME as the value of a parameter in a member's text, where a colon begins the parameters.

    >>> as_value("lab/maze.py:make"), as_name("lab/maze.py@make"), as_name("CartPole-v1")
    ('lab/maze.py@make', 'lab/maze.py:make', 'CartPole-v1')
    """
    found = split(name)
    return name if found is None else "@".join(found)


def as_name(value: str) -> str:
    """The name that `as_value` wrote; other values as they are."""
    file, _, name = value.rpartition("@")
    return f"{file}:{name}" if file.endswith(".py") else value


def file_of(value: str) -> str:
    """The file that a value of `as_value` or a name has; empty without one.

    >>> file_of("lab/maze.py@make"), file_of("lab/maze.py:make"), file_of("CartPole-v1")
    ('lab/maze.py', 'lab/maze.py', '')
    """
    file = as_name(value).rpartition(":")[0]
    return file if file.endswith(".py") else ""


def run(file: str) -> ModuleType:
    """Run `file` and return it as a module. It can import modules of its folder, as a script can.

    Raises `UsageError` if the file does not exist or raises.
    """
    path = Path(file)
    if not is_regular(path):
        raise UsageError(f"there is no file {file} (looked from {Path.cwd()}). Write FILE.py:NAME.")
    name = module_of(file)
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise UsageError(f"{file} cannot be imported as Python. Write FILE.py:NAME.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _FILES[name] = file
    try:
        with imports_beside(path), explain_user_errors(f"{file} cannot be loaded:"):
            spec.loader.exec_module(module)
    except DureError:
        del sys.modules[name], _FILES[name]  # a module that failed halfway must not be found again
        raise
    return module


@contextmanager
def imports_beside(path: Path) -> Iterator[None]:
    """Within the context, modules in the folder of `path` can be imported."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def beside(file: str, function: Callable[..., T]) -> Callable[..., T]:
    """`function` of a file, which can import modules of the file's folder also when it is called later."""

    @wraps(function, updated=())
    def called(*given: Any, **named: Any) -> T:
        with imports_beside(Path(file)):
            return function(*given, **named)

    return called


def module_of(file: str) -> str:
    """The name of the module of `file`. Files of the same name in several folders have modules of their own."""
    stem = f"dure_file_{Path(file).stem}"
    names = chain([stem], (f"{stem}_{number}" for number in count(2)))
    return next(name for name in names if _FILES.get(name, file) == file)


def kind(file: str, name: str) -> type:
    """The class `name` in `file`, which is run once. Raises `UsageError`."""
    found = getattr(sys.modules.get(module_of(file)) or run(file), name, None)
    if not isinstance(found, type):
        raise UsageError(f"{file} has no class {name!r}. Write FILE.py:CLASS.")
    _TEXTS[found] = f"{file}:{name}"
    return found


def text_of(kind: type) -> str | None:
    """The text FILE.py:NAME of a class from a user's file; None for any other class."""
    file = _FILES.get(kind.__module__)
    own = None if file is None or "." in kind.__qualname__ else f"{file}:{kind.__qualname__}"
    return _TEXTS.get(kind, own)


# ---- exceptions of users' code


@contextmanager
def explain_user_errors(what: str, kind: type[DureError] = UsageError, *, only: bool = False) -> Iterator[None]:
    """Within the context, turn exceptions into `kind`: its message has `what`, then the type, text and place.

    Exceptions of dure pass. With `only`, an exception passes unless a user's file raised it or called the library that
    did.
    """
    try:
        yield
    except DureError:
        raise
    except (Exception, SystemExit) as error:
        if only and _place(error) is None:
            raise
        raise kind(f"{what} {sentence_of(error)}") from error


def sentence_of(error: BaseException) -> str:
    """The type and the text of an exception, with the file and the line of the user's code that raised it."""
    place = _place(error)
    text = messages.shortened(" ".join(messages.text_of(error).split()), LONGEST).rstrip(".")
    where = "" if place is None else f" ({_near(place[0])}, line {place[1]})"
    return f"{type(error).__name__}{': ' if text else ''}{text}{where}."


def frames_of(error: BaseException) -> str:
    """The frames of the user's files in the traceback of an exception, and where the whole one is; "" without any."""
    if _place(error) is None:
        return ""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(Path(frame.filename))]
    notes = "".join(f"  {note}\n" for note in getattr(error, "__notes__", ()))
    return messages.printable("".join(traceback.format_list(frames)) + notes)


def frames_behind(error: DureError) -> str:
    """The frames of the exception of user code that one of dure's sentences explains; "" if it explains none."""
    return "" if error.__cause__ is None else frames_of(error.__cause__)


def shown(error: BaseException) -> str:
    """The sentence of an exception, then the user's frames; the whole traceback if user code has not raised it."""
    frames = frames_of(error)
    return f"{messages.sentence(sentence_of(error))}\n{frames}" if frames else messages.traceback_of(error)


def record(folder: Path | None, name: str, error: BaseException) -> None:
    """Write the whole traceback of an exception of the node `name` into the folder of its run, if that is here.

    For an exception of user code, a note names the file. Exceptions that are dure's own sentences have none.
    """
    cause = error.__cause__ if isinstance(error, DureError) else error
    if folder is None or not folder.is_dir() or isinstance(cause, DureError) or not isinstance(cause, Exception):
        return
    file = folder / f"traceback-{name.replace(' ', '-')}.txt"
    with suppress(OSError):
        file.write_text("".join(traceback.format_exception(cause)), encoding="utf-8", errors="backslashreplace")
        cause.add_note(f"The whole traceback is in {file}.")


@contextmanager
def recorded(folder: Path | None, name: str) -> Iterator[None]:
    """Within the context, `record` an exception, which goes on."""
    try:
        yield
    except Exception as error:
        record(folder, name, error)
        raise


def _place(error: BaseException) -> tuple[Path, int] | None:
    """The user's file and line that raised, or that called the library which raised; None if dure did."""
    if isinstance(error, SyntaxError) and isinstance(error.filename, str) and isinstance(error.lineno, int):
        return Path(error.filename), error.lineno
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(_OURS):
            return None
        if _is_users(path):
            return path, frame.lineno or 0
    return None


def _is_users(path: Path) -> bool:
    """Whether a file is neither of this library nor of Python or another installed package."""
    if path.is_relative_to(_OURS) or path.is_relative_to(_STANDARD) or _INSTALLED & {*path.parts}:
        return False
    return is_regular(path)


def _near(path: Path) -> Path:
    """`path` relative to the current folder if it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
