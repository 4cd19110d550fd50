"""A row of a folder's catalogue: what a name means, without importing what it names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

from dure.core import user_code


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of an axis.

    `module` and `member` say where its class is. `combines` names members of the other axis that it runs
    with, its default first (empty: all of them), and `because` completes "X does not run over Y: ", as does `clash`
    where Y is a collective.
    """

    module: str
    member: str
    summary: str
    paper: str
    combines: tuple[str, ...] = ()
    because: str = ""
    clash: str = ""

    def load(self) -> type:
        """The class itself."""
        kind = getattr(import_module(self.module), self.member)
        assert isinstance(kind, type)
        return kind


def name_of(kind: type, members: Mapping[str, Entry]) -> str:
    """The name of a class in a catalogue; of any other its file and its name, or its name alone."""
    for name, entry in members.items():
        if (entry.module, entry.member) == (kind.__module__, kind.__qualname__):
            return name
    return user_code.text_of(kind) or kind.__name__
