"""Train one PyTorch model on many machines: every way of doing it, in virtual and in real time.

    import dure
    run = dure.train("digits-mlp", sync="ssp:bound=3", topology="ps:shards=2", on="virtual", workers=8)
    run.summary()

Every member of a catalogue (`dure methods`) has a public name, that of its class: `dure.BMUF`, `dure.OneBit`.

Importing this imports no torch: a name is loaded when it is first used. Type checkers read `__init__.pyi`, which
`make format` writes.
"""

from __future__ import annotations

from importlib import import_module

from dure import codec, partition, sync, topology

__version__ = "0.1.0"

_MEMBERS = (sync.CATALOGUE, sync.REMEDIES, topology.CATALOGUE, codec.CATALOGUE, codec.WRAPPERS, partition.CATALOGUE)

_OTHERS = (
    "dure.codec.base:Codec",
    "dure.codec.coder:Coder",
    "dure.core.node:EndOfWork",
    "dure.errors:DureError",
    "dure.job.data.dataset:Data",
    "dure.job.data.dataset:Samples",
    "dure.job.data.stream:Stream",
    "dure.job.job:Job",
    "dure.job.optimizer:OptimizerSpec",
    "dure.partition.orders:Action",
    "dure.partition.mesh:Mesh",
    "dure.partition.pipeline:MicroBatched",
    "dure.partition.shared_layers:SharedLayers",
    "dure.planner.answer:Ranking",
    "dure.planner.auto:train",
    "dure.planner.plan:plan",
    "dure.run.compare:compare",
    "dure.run.strategy:Strategy",
    "dure.runtime.virtual.cluster:Cluster",
    "dure.sync.base:Messages",
    "dure.sync.base:Reasons",
    "dure.sync.base:ServerRule",
    "dure.sync.base:Traits",
    "dure.sync.worker:Worker",
    "dure.topology.base:RunPlan",
    "dure.topology.base:Session",
    "dure.topology.base:Topology",
    "dure.topology.collective.message_group:SentGroup",
    "dure.user_loop.attach:attach",
    "dure.user_loop.ddp_hook:hook",
)

_HOMES = {
    name: module
    for place in (*(place for members in _MEMBERS for place in members.values()), *_OTHERS)
    for module, _, name in [place.partition(":")]
}
"""The module of each public name."""

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"dure has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
