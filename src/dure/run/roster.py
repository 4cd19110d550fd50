"""The processes of a real run and the state of each.

| state     | meaning                                                        | left by                          |
|-----------|----------------------------------------------------------------|----------------------------------|
| present   | the process has registered                                     | its failure                      |
| ready     | the process has built its part of the run                      | the start of a new incarnation   |
| evicted   | a worker that others go on without; its process still runs     | the worker's next report         |
| failed    | the process ended before its work was done                     | the start of a new incarnation   |
| finished  | a worker that has delivered its result                         |                                  |
| dismissed | the process was told to exit, or killed, at the end of the run |                                  |

A worker is living if it is neither failed, nor evicted, nor finished.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from dure.core.deployment import SERVER, WORKER, NodeId, WhenLost, by_rank
from dure.run.companion_nodes import companions_of

if TYPE_CHECKING:
    from dure.core.deployment import Deployment


class ProcessRoster:
    """The names of a run's processes by state. Workers of the ranks `absent` are not waited for at the start.

    `evicted` and `failed` hold a reason for each name, `finished` a worker's last report, `places` host and port,
    `incarnations` the number of the incarnation that runs.
    """

    def __init__(self, deployment: Deployment, absent: Collection[int] = ()) -> None:
        self.servers = deployment.names(SERVER)
        self.workers = [name for name in deployment.names(WORKER) if NodeId.of(name).rank not in absent]
        self._deployment = deployment
        self.companions = [str(node.id) for node in companions_of(deployment)]
        late = {str(node.id) for node in companions_of(deployment) if node.joins_after}
        self.expected = {*self.servers, *self.workers, *self.companions} - late
        self.present, self.ready, self.dismissed = set[str](), set[str](), set[str]()
        self.evicted: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        self.finished: dict[str, Mapping[str, Any]] = {}
        self.places: dict[str, tuple[str, int]] = {}
        self.incarnations: dict[str, int] = {}

    @property
    def saving(self) -> list[str]:
        """The companions whose state a checkpoint has: those that the run cannot lose."""
        return [name for name in self.companions if self._deployment[name].when_lost is not WhenLost.GO_ON]

    def admit(self, name: str) -> int:
        """Expect a new incarnation of a process, which may be new to the run; returns its number."""
        self.incarnations[name] = self.incarnations.get(name, -1) + 1
        self.ready.discard(name)
        self.expected.add(name)
        if name not in (*self.workers, *self.servers, *self.companions):
            self.workers.append(name)
        return self.incarnations[name]

    def restore(self, finished: Mapping[str, Mapping[str, Any]]) -> None:
        """Take over the workers that had finished before a checkpoint: none of them is started."""
        self.finished = dict(finished)
        self.expected -= finished.keys()

    @property
    def all_present(self) -> bool:
        """Whether every expected process has registered, failed ones apart."""
        return self.expected - self.failed.keys() <= self.present

    @property
    def missing(self) -> set[str]:
        """The expected processes that are not ready, failed ones apart."""
        return self.expected - self.ready - self.failed.keys()

    @property
    def all_finished(self) -> bool:
        """Whether some worker has finished and none is living."""
        return bool(self.finished) and not self.living()

    def living(self) -> set[str]:
        gone = self.failed.keys() | self.finished.keys() | self.evicted.keys()
        return {name for name in self.workers if name not in gone}

    @property
    def first_living(self) -> str | None:
        """The living worker of the lowest rank."""
        return next(iter(by_rank(self.living())), None)

    def watched(self) -> list[str]:
        """The processes that must send heartbeats."""
        return [name for name in (*self.servers, *self.workers, *self.companions) if not self.is_over(name)]

    def is_over(self, name: str) -> bool:
        """Whether the end of a process is known already, or of no interest."""
        known = name in self.failed or name in self.finished or name in self.dismissed
        return known or name not in self.expected

    def is_current(self, name: str, incarnation: int) -> bool:
        """Whether `incarnation` is the one that runs, or a later one."""
        return incarnation >= self.incarnations.get(name, incarnation)
