"""Versions that the clock has the shards keep, since a worker may still pull them."""

from __future__ import annotations

from collections.abc import Iterable


class Pins:
    """Counts of the reasons to keep each version: it is the newest, the policy's `floor`, or a worker started on it."""

    def __init__(self) -> None:
        self.newest = 0
        self.floor: int | None = None
        self._started: dict[int, int] = {}
        self._holds: dict[int, int] = {0: 1}
        self._unpinned: list[int] = []

    @property
    def held(self) -> list[int]:
        """The versions that are kept."""
        return sorted(self._holds)

    def has_started(self, worker: int) -> bool:
        """Whether a version is kept because the worker started on it."""
        return worker in self._started

    def pin(self, worker: int, version: int) -> None:
        """Keep the version that a worker starts on, in place of the one before."""
        self.unpin(worker)
        self._started[worker] = version
        self._hold(version)

    def unpin(self, worker: int) -> None:
        version = self._started.pop(worker, None)
        if version is not None:
            self._let_go(version)

    def advance(self) -> int:
        """Keep the next version as the newest; its number."""
        self.newest += 1
        self._hold(self.newest)
        self._let_go(self.newest - 1)
        return self.newest

    def move_floor(self, floor: int | None) -> None:
        if floor is not None:
            self._hold(floor)
        if self.floor is not None:
            self._let_go(self.floor)
        self.floor = floor

    def take_unpinned(self) -> list[int]:
        """The versions that shards need keep no longer; each is given once."""
        unpinned, self._unpinned = self._unpinned, []
        return unpinned

    def _hold(self, version: int) -> None:
        self._holds[version] = self._holds.get(version, 0) + 1

    def _let_go(self, version: int) -> None:
        self._holds[version] -= 1
        if not self._holds[version]:
            del self._holds[version]
            self._unpinned.append(version)

    # ---- checkpoints

    def known(self) -> list[int]:
        """All versions that shards may have."""
        return sorted({*self._holds, *self._unpinned})

    def restore(self, newest: int, floor: int | None, known: Iterable[int]) -> None:
        """Go on at `newest` and `floor`, where shards may have the versions that were `known`."""
        self.newest, self.floor = newest, floor
        self._holds = {}
        for version in (newest, floor):
            if version is not None:
                self._hold(version)
        self._unpinned = [version for version in known if version not in self._holds]
