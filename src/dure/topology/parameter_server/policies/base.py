"""A policy, and its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from dure.topology.parameter_server.policies.roster import Clocks


@dataclass(slots=True)
class Accept:
    """The offered update may be sent; it will belong to `group`."""

    worker: int
    group: int


@dataclass(slots=True)
class Refuse:
    """The offered update will not count; `reason` says why."""

    worker: int
    reason: str


@dataclass(slots=True)
class Start:
    """The worker may start its next step, on exactly `version`."""

    worker: int
    version: int


@dataclass(slots=True)
class Close:
    """The group is complete: apply `members`, pairs of worker and sequence number in rank order."""

    group: int
    members: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Abort:
    """Whatever the worker computes on `version` is wasted: it should stop and ask again."""

    worker: int
    version: int


@dataclass(slots=True)
class End:
    """The work of this worker is over, since too few are left to go on."""

    worker: int


Verdict = Accept | Refuse | Start | Close | Abort | End


class Policy(Protocol):
    """A rule of admission.

    `may_refuse` is False where every offer is accepted: then workers do not offer, and `group` is None in `staged`.
    Where updates are not `ordered` they apply on arrival, and the policy rules only which worker may start.
    `version` counts closed groups. `floor` is an older version that a Start may still name, or None.
    """

    may_refuse: bool
    ordered: bool
    clocks: Clocks
    version: int

    @property
    def floor(self) -> int | None: ...

    def join(self, worker: int) -> list[Verdict]: ...

    def finish(self, worker: int) -> list[Verdict]: ...

    def leave(self, worker: int) -> list[Verdict]: ...

    def ask(self, worker: int) -> list[Verdict]: ...

    def offer(self, worker: int, base: int) -> list[Verdict]: ...

    def staged(self, worker: int, group: int | None, seq: int) -> list[Verdict]: ...

    def state(self) -> dict[str, Any]:
        """What survives a restart, as plain values: not which workers wait, as they ask again."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...
