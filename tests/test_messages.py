"""Names that messages and pages advise exist: those behind `replica.`, `dure.` and `hook.` in the package's strings."""

import ast
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest

import dure
from dure.cli import reproduce
from dure.job.names import GROUP
from dure.user_loop.attached import Attached
from dure.user_loop.ddp_hook import Hook

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dure"
STUDIES = ROOT / "studies" / "src"
pytestmark = pytest.mark.xdist_group("messages")  # one process reads the pages
NAMED = re.compile(r"(?<![\w./-])(replica|dure|hook)\.([A-Za-z_]\w*)")


def of_attached(name):
    return hasattr(Attached, name) or f"self.{name} = " in inspect.getsource(Attached.__init__)


def of_package(name):
    """A public name, a group of entry points, or a module that can be imported."""
    if hasattr(dure, name) or f"dure.{name}" in (reproduce.STUDIES, reproduce.PAPERS, GROUP):
        return True
    try:
        importlib.import_module(f"dure.{name}")
    except ModuleNotFoundError:
        return False
    return True


def of_hook(name):
    return hasattr(Hook, name) or f"self.{name} = " in inspect.getsource(Hook.__init__)


KNOWN = {"replica": of_attached, "dure": of_package, "hook": of_hook}


PUBLIC = (SOURCE / "user_loop" / "attached.py", SOURCE / "user_loop" / "ddp_hook.py")
"""Files whose docstrings are about a user's own loop; elsewhere in the package, `replica` is another object."""


LOOPS = (
    "own-loop", "own-loop-errors", "own-loop-save", "own-loop-shards", "two-models", "fsdp-groups", "from-ddp",
    "ddp-hook", "lightning", "trainer", "accelerate", "ray-train",
)  # fmt: skip
"""Pages about a user's own loop."""


def strings(path):
    """String constants of a Python file; docstrings only of a public one."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if path not in PUBLIC
        and isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs)
    return [node.value for node in constants if isinstance(node.value, str)]


@functools.cache
def pages():
    """Text by file: messages of the package, and the pages and docstrings that are about a user's own loop."""
    found = {path: "\n".join(strings(path)) for path in sorted([*SOURCE.rglob("*.py"), *STUDIES.rglob("*.py")])}
    about = (ROOT / "README.md", *(ROOT / "docs" / "how-to" / f"{name}.md" for name in LOOPS))
    return found | {path: path.read_text(encoding="utf-8") for path in about}


def missing(text):
    """Names that the text advises and that do not exist.

    >>> missing("call replica.load(values) or replica.close()")
    ['replica.load']
    """
    return [f"{thing}.{name}" for thing, name in NAMED.findall(text) if not KNOWN[thing](name)]


def test_every_name_that_a_message_or_page_advises_exists():
    found = {str(path.relative_to(ROOT)): missing(text) for path, text in pages().items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_search_sees_names():
    seen = [match for text in pages().values() for match in NAMED.findall(text)]
    assert {("replica", "step"), ("replica", "close"), ("dure", "attach"), ("dure", "hook")} <= set(seen)


@pytest.mark.parametrize("name", ["replica.load", "dure.nothing", "hook.nothing"])
def test_a_name_that_does_not_exist_is_found(name):
    assert missing(f"Write {name}() in its place.") == [name]
