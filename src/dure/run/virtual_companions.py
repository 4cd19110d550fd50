"""The companions of a job in one segment of a virtual run."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from dure.core.deployment import NodeId
from dure.errors import RemoteError
from dure.run.checkpoint import fitting
from dure.run.setup import companions_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from dure.core.deployment import NodeSpec
    from dure.core.node import Operation
    from dure.job.companions import Companion, Figures
    from dure.run.checkpoint import Parts
    from dure.run.setup import Setup
    from dure.runtime.virtual.cluster import Cluster
    from dure.runtime.virtual.compute import Durations
    from dure.runtime.virtual.runtime import VirtualRuntime

BESIDE = 1 << 32
"""Separates the durations of a companion from those of the worker on the same machine."""


class VirtualCompanions:
    """Builds the companions of a run, starts and stops them. A job without companions has an empty one.

    Nodes called `absent` join later. `kept` is the `plain` of the checkpoint at step `start`, from which the segment
    starts; None at the beginning.
    """

    def __init__(
        self,
        setup: Setup,
        runtime: VirtualRuntime,
        cluster: Cluster,
        *,
        absent: Collection[str],
        start: int,
        kept: Mapping[str, Any] | None,
    ) -> None:
        self._setup, self._runtime, self._cluster = setup, runtime, cluster
        self._absent, self.start = absent, start
        self._specs = companions_of(setup.deployment)
        self._companions: dict[str, Companion] = {}
        self._tasks: dict[str, Operation[Any]] = {}
        self._last: dict[str, Figures] = {} if kept is None else dict(kept["last"])
        self._gone = set(absent if kept is None else kept["gone"])

    def build(self, parts: Parts | None) -> None:
        """Build all nodes, from the `parts` of a checkpoint if there are some."""
        for spec in self._specs:
            name = str(spec.id)
            node = self._runtime.node(name, spec.id.rank)
            self._runtime.durations[name] = self._stream(spec)
            late = spec.joins_after > self._runtime.kernel.now
            if name in self._gone or late:
                node.alive = False
                self._gone.add(name)
            else:
                self._begin(name, parts)
            if late and name not in self._absent:
                self._runtime.kernel.external_event(spec.joins_after, partial(self.join, name))
        for spec in self._specs:
            self._go_on_without(spec)

    def _stream(self, spec: NodeSpec) -> Durations:
        seed, names = self._setup.config.seeded, self._setup.machine_nodes
        if spec.beside is None:
            return self._cluster.durations(names.index(str(spec.id)), seed)
        return self._cluster.durations(spec.beside.rank, seed + BESIDE + hash_of(spec.id))

    def _begin(self, name: str, parts: Parts | None) -> None:
        assert self._setup.job.companions is not None
        node = self._runtime.nodes[name]
        companion = self._setup.job.companions.companion(self._setup.shape(self.start), node)
        part = (parts or {}).get(part_of(name))
        if companion.saves and part is not None:
            with fitting(part_of(name)):
                companion.restore(part)
        self._companions[name] = companion
        self._tasks[name] = node.spawn(_work(companion), name)

    def stop(self) -> None:
        """End the work of all companions: the workers have ended theirs."""
        for name, task in self._tasks.items():
            self._last[name] = self._companions[name].figures()
            task.kill()  # type: ignore[attr-defined]
        self._tasks.clear()

    # ---- events of the cluster

    def is_there(self, name: str) -> bool:
        return name in self._companions and name not in self._gone

    def crash(self, name: str) -> None:
        """Crash a companion: what it had not sent is lost."""
        self._gone.add(name)
        self._last[name] = self._companions[name].figures()
        self._tasks.pop(name, None)
        self._runtime.lose(self._runtime.nodes[name])
        self._go_on_without(next(spec for spec in self._specs if str(spec.id) == name))

    def _go_on_without(self, spec: NodeSpec) -> None:
        """Tell the other companions that one has crashed and never joins again."""
        name, now = str(spec.id), self._runtime.kernel.now
        if name not in self._gone or spec.joins_after > now:
            return
        if not self._cluster.joins_after(self._setup.machine_nodes.index(name), now):
            for each in self._companions.values():
                each.go_on_without(name)

    def join(self, name: str) -> None:
        """Start a companion that was absent, or has crashed."""
        node = self._runtime.nodes[name]
        self._runtime.network.restore(name)
        node.revive()
        self._gone.discard(name)
        self._begin(name, None)
        self._companions[name].count_on(self._last.get(name, {}))

    # ---- the record

    def figures(self) -> dict[str, Figures]:
        """The figures of each companion."""
        running = {name: self._companions[name].figures() for name in self._tasks}
        return {**self._last, **running}

    def row(self, seconds: float) -> dict[str, Any]:
        """The companions' part of a row of the history."""
        companions = self._setup.job.companions
        return {} if companions is None else companions.row(self.figures(), seconds)

    def plain(self) -> dict[str, Any]:
        """The common state of all companions in a checkpoint: the absent and crashed nodes, and their last figures."""
        last = {name: figures for name, figures in self._last.items() if name in self._gone}
        return {"gone": sorted(self._gone), "last": last}

    def parts(self) -> Parts:
        """The parts of a checkpoint."""
        saving = {name: each for name, each in self._companions.items() if each.saves and name not in self._gone}
        return {part_of(name): each.state().cloned() for name, each in saving.items()}


async def _work(companion: Companion) -> None:
    with suppress(RemoteError):  # of a crash of the node that it works with
        await companion.work()


def part_of(name: str) -> str:
    """The name of a node's part in a checkpoint.

    >>> part_of("replay 0")
    'replay-0'
    """
    return name.replace(" ", "-")


def hash_of(node: NodeId) -> int:
    """A number of a node's kind, the same in every process."""
    return sum(node.kind.encode()) << 33
