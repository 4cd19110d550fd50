"""The nodes of a run, with their machines and the effect of their loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import count
from typing import NamedTuple

from dure.core.text import quoted


class NodeId(NamedTuple):
    """The kind and rank of a node. Its text is the node's name.

    >>> str(NodeId("worker", 3)), NodeId.of("server 0")
    ('worker 3', NodeId(kind='server', rank=0))
    """

    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}"

    @classmethod
    def of(cls, name: str) -> NodeId:
        """Parse a name. Raises `ValueError` for a text that is no name of a node."""
        kind, rank = name.split()
        return cls(kind, int(rank))


WORKER = "worker"
SERVER = "server"
ACTOR = "actor"
REPLAY = "replay"


def rank_of_worker(name: str) -> int | None:
    """Return the rank of the worker whose node is called `name`; None if the node is no worker's.

    >>> rank_of_worker("worker 3"), rank_of_worker("server 0"), rank_of_worker("driver")
    (3, None, None)
    """
    return NodeId.of(name).rank if name.startswith(f"{WORKER} ") else None


class WhenLost(Enum):
    """Effect of the loss of a node on the run."""

    END = "the run ends"
    GO_ON = "the others go on without it"
    RE_FORM = "the others form their group again without it"
    RESTART_ALONE = "it is started again from the last checkpoint, and the others wait for it"
    ROLL_BACK = "all nodes are started again from the last checkpoint"

    @property
    def others_go_on(self) -> bool:
        """Whether the run goes on without the node."""
        return self in (WhenLost.GO_ON, WhenLost.RE_FORM)


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node to start: on the machine of the node `beside`, or on one of its own; and the effect of its loss.

    A node that the run can lose may join `joins_after` seconds after the start of the run.
    """

    id: NodeId
    beside: NodeId | None = None
    when_lost: WhenLost = WhenLost.END
    joins_after: float = 0.0


@dataclass(frozen=True)
class Deployment:
    """The nodes of a run, in the order of their start."""

    nodes: tuple[NodeSpec, ...]

    @cached_property
    def _by_name(self) -> dict[str, NodeSpec]:
        return {str(node.id): node for node in self.nodes}

    def __getitem__(self, name: str) -> NodeSpec:
        return self._by_name[name]

    def names(self, kind: str) -> list[str]:
        """The names of all nodes of a kind, in the order of ranks."""
        return [str(node.id) for node in self.nodes if node.id.kind == kind]

    def places(self) -> dict[str, int]:
        """The number of each node's place, from 0. Nodes beside each other share a place, and so a machine.

        Places are machines, unless a cluster has several workers on one machine (`Cluster.machine_of`).
        """
        found: dict[str, int] = {}
        free = count()
        for node in self.nodes:
            beside = node.beside is not None and str(node.beside) != str(node.id)
            found[str(node.id)] = found[str(node.beside)] if beside else next(free)
        return found


MOST_WORKERS = 100_000
"""Most workers of a run. One process holds the state of all, some 10 kB each even without values of the model."""


def check_workers(workers: int) -> int:
    """Return `workers`. Raises `ValueError` for more than a run can have."""
    if workers > MOST_WORKERS:
        shown = f"{workers:,}" if workers < 10**18 else quoted(workers)
        raise ValueError(
            f"{shown} workers are too many: one process holds the state of all, so a run has at most {MOST_WORKERS:,}"
        )
    return workers


def by_rank(names: Iterable[str]) -> list[str]:
    """Sort names of nodes of one kind by rank."""
    return sorted(names, key=lambda name: NodeId.of(name).rank)
