"""The nodes of a run: which there are, beside which other each stands, and what its loss means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple


class NodeId(NamedTuple):
    """The name of a node.

    >>> str(NodeId("worker", 3)), NodeId.of("server 0")
    ('worker 3', NodeId(kind='server', rank=0))
    """

    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}"

    @classmethod
    def of(cls, name: str) -> NodeId:
        """The id that `name` is the text of. Raises `ValueError` for any other text."""
        kind, rank = name.split()
        return cls(kind, int(rank))


WORKER = "worker"
SERVER = "server"


class WhenLost(Enum):
    """What the loss of a node means for the run."""

    END = "the run ends"
    GO_ON = "the others go on without it"
    RESTART_ALONE = "it is started again from the last checkpoint, and the others wait for it"
    ROLL_BACK = "all nodes are started again from the last checkpoint"


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node: beside which other it stands (on the same machine), and what its loss means."""

    id: NodeId
    beside: NodeId | None = None
    when_lost: WhenLost = WhenLost.END


@dataclass(frozen=True)
class Deployment:
    """The nodes of a run, in the order in which they are started."""

    nodes: tuple[NodeSpec, ...]

    @cached_property
    def _by_name(self) -> dict[str, NodeSpec]:
        return {str(node.id): node for node in self.nodes}

    def __getitem__(self, name: str) -> NodeSpec:
        return self._by_name[name]

    def names(self, kind: str) -> list[str]:
        """The names of all nodes of a kind, by rank."""
        return [str(node.id) for node in self.nodes if node.id.kind == kind]

    def machines(self) -> dict[str, int]:
        """A machine for each node, numbered from 0: its own, or that of the node that it stands beside."""
        found: dict[str, int] = {}
        for node in self.nodes:
            beside = node.beside is not None and str(node.beside) != str(node.id)
            found[str(node.id)] = found[str(node.beside)] if beside else max(found.values(), default=-1) + 1
        return found


def by_rank(names: Iterable[str]) -> list[str]:
    """Names of nodes of one kind, by rank."""
    return sorted(names, key=lambda name: NodeId.of(name).rank)
