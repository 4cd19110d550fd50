"""Packages that only some parts of dure need: its extras, as in `pip install "dure[report]"`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from dure.errors import UsageError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "report": ("matplotlib", "jinja2"),
    "rl": ("gymnasium",),
    "atari": ("ale_py", "cv2"),
    "text": ("tokenizers", "transformers"),
    "tensorboard": ("tensorboard",),
}
"""The modules of each extra. `pyproject.toml` has their distributions."""


def extra_is_there(extra: str) -> bool:
    """Whether all modules of `extra` are installed."""
    return all(find_spec(module) is not None for module in EXTRAS[extra])


def import_extra(extra: str, what: str, *modules: str) -> list[ModuleType]:
    """Import `modules` of `extra`, or all of them. Raises `UsageError` if one is missing; `what` needs it.

    Called before a run starts, so that a missing package does not cost its result.
    """
    found = []
    for module in modules or EXTRAS[extra]:
        try:
            found.append(import_module(module))
        except ImportError as error:
            raise UsageError(f'{what} needs {module} ({error}): pip install "dure[{extra}]"') from error
    return found
