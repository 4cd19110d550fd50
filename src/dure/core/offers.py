"""Entry points: what other distributions offer to dure, as jobs and studies, in groups as `dure.jobs`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, distributions, entry_points
from typing import Any

from dure.core.spec_text import names
from dure.core.user_code import explain_user_errors
from dure.errors import UsageError


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
