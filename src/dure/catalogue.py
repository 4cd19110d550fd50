"""A row of a folder's catalogue: what a name means, without importing what it names."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module


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
