"""Packages beside dure: those that its extras need, and what other distributions offer by entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints, distributions, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from dure.core.spec_text import names
from dure.core.user_code import explain_user_errors
from dure.errors import UsageError

EXTRAS: Mapping[str, tuple[str, ...]] = {
    "report": ("matplotlib", "jinja2"),
    "rl": ("gymnasium",),
    "atari": ("ale_py", "cv2"),
    "text": ("tokenizers", "transformers"),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "ray": ("ray",),
    "integrations": ("accelerate", "lightning", "transformers"),
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


def offers(group: str) -> EntryPoints:
    """All entry points of `group`. Raises `UsageError` if a distribution has a file of them that cannot be read."""
    try:
        return entry_points(group=group)
    except (TypeError, ValueError) as error:
        for each in distributions():
            try:
                each.entry_points  # noqa: B018
            except (TypeError, ValueError):
                name, folder = each.metadata["Name"], each.locate_file("")
                raise UsageError(
                    f"the file entry_points.txt of the installed package {name}, in {folder}, cannot be read: {error}. "
                    "Install that package again, or remove it."
                ) from error
        raise


def offer(group: str, what: str, name: str) -> EntryPoint | None:
    """The entry point `name` of `group`, `what` in words. None without one; raises `UsageError` if several differ."""
    found = {each.value: each for each in offers(group).select(name=name)}
    if len(found) > 1:
        origins = names(sorted(map(origin, found.values())))
        raise UsageError(f"several installed packages offer {what} {name}: {origins}. Uninstall all but one of them.")
    return next(iter(found.values()), None)


def origin(entry: EntryPoint) -> str:
    """The name of the distribution that has `entry`, else the value of `entry`."""
    return (entry.dist and entry.dist.metadata["Name"]) or entry.value


def loaded(entry: EntryPoint, what: str, form: str) -> Any:
    """Import the object that `entry` names. Raises `UsageError`; `form` is the right value of `entry`, `what` it is."""
    if entry.pattern.match(entry.value) is None:
        raise UsageError(
            f"{what} {entry.name} of {origin(entry)} is {entry.value!r} in its entry points: write {form}."
        )
    with explain_user_errors(f"{what} {entry.name} of {origin(entry)} is {entry.value}, and its import raised"):
        return entry.load()
