"""Train one PyTorch model on many machines: every way of doing it, in virtual and in real time.

    import dure
    run = dure.train("digits-mlp", sync="ssp:bound=3", topology="ps:shards=2", on="virtual", workers=8)
    run.summary()

Every member of a catalogue (`dure methods`) has a public name, that of its class: `dure.BMUF`, `dure.OneBit`.

Importing this imports no torch: a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dure import codec, partition, sync, topology

if TYPE_CHECKING:  # the same names for type checkers, which read no table
    from dure.codec.feedback import ErrorFeedback as ErrorFeedback
    from dure.codec.feedback import Momentum as Momentum
    from dure.codec.floats import BFloat16 as BFloat16
    from dure.codec.floats import Float16 as Float16
    from dure.codec.floats import Int8 as Int8
    from dure.codec.fp32 import Float32 as Float32
    from dure.codec.it_sign import ITSign as ITSign
    from dure.codec.one_bit import OneBit as OneBit
    from dure.codec.sign import Sign as Sign
    from dure.codec.strom import Strom as Strom
    from dure.codec.ternary import Ternary as Ternary
    from dure.codec.top_k import TopK as TopK
    from dure.core.node import EndOfWork as EndOfWork
    from dure.errors import DureError as DureError
    from dure.job.data.dataset import Data as Data
    from dure.job.data.samples import Samples as Samples
    from dure.job.data.stream import Stream as Stream
    from dure.job.job import Job as Job
    from dure.job.optimizer import OptimizerSpec as OptimizerSpec
    from dure.partition.whole import Whole as Whole
    from dure.run.compare import compare as compare
    from dure.run.strategy import Strategy as Strategy
    from dure.run.train import train as train
    from dure.runtime.virtual.cluster import Cluster as Cluster
    from dure.sync.ad_psgd import ADPSGD as ADPSGD
    from dure.sync.asysvrg import AsySVRG as AsySVRG
    from dure.sync.averaging import Averaging as Averaging
    from dure.sync.backup import Backup as Backup
    from dure.sync.base import ServerRule as ServerRule
    from dure.sync.base import Traits as Traits
    from dure.sync.bmuf import BMUF as BMUF
    from dure.sync.bsp import BSP as BSP
    from dure.sync.dc_asgd import DCASGD as DCASGD
    from dure.sync.diloco import DiLoCo as DiLoCo
    from dure.sync.downpour import Downpour as Downpour
    from dure.sync.easgd import EAMSGD as EAMSGD
    from dure.sync.easgd import EASGD as EASGD
    from dure.sync.hogwild import HogBatch as HogBatch
    from dure.sync.hogwild import Hogwild as Hogwild
    from dure.sync.k_async import KAsync as KAsync
    from dure.sync.k_async import KBatchAsync as KBatchAsync
    from dure.sync.k_sync import KBatchSync as KBatchSync
    from dure.sync.k_sync import KSync as KSync
    from dure.sync.lbfgs import LBFGS as LBFGS
    from dure.sync.momentum_compensation import MomentumCompensation as MomentumCompensation
    from dure.sync.one_shot import OneShot as OneShot
    from dure.sync.ssp import SSP as SSP
    from dure.sync.staleness_lr import StalenessLR as StalenessLR
    from dure.topology.collective.choice import Collective as Collective
    from dure.topology.gossip.choice import Gossip as Gossip
    from dure.topology.hybrid.choice import Hybrid as Hybrid
    from dure.topology.parameter_server.choice import ParameterServer as ParameterServer
    from dure.topology.shared_memory.choice import SharedMemory as SharedMemory
    from dure.user_loop.attached import attach as attach
    from dure.user_loop.ddp_hook import hook as hook

__version__ = "0.1.0"

_MEMBERS = (sync.CATALOGUE, sync.REMEDIES, topology.CATALOGUE, codec.CATALOGUE, codec.WRAPPERS, partition.CATALOGUE)

_OTHERS = (
    "dure.core.node:EndOfWork",
    "dure.errors:DureError",
    "dure.job.data.dataset:Data",
    "dure.job.data.samples:Samples",
    "dure.job.data.stream:Stream",
    "dure.job.job:Job",
    "dure.job.optimizer:OptimizerSpec",
    "dure.run.compare:compare",
    "dure.run.strategy:Strategy",
    "dure.run.train:train",
    "dure.runtime.virtual.cluster:Cluster",
    "dure.sync.base:ServerRule",
    "dure.sync.base:Traits",
    "dure.user_loop.attached:attach",
    "dure.user_loop.ddp_hook:hook",
)

_HOMES = {
    name: module
    for place in (*(place for members in _MEMBERS for place in members.values()), *_OTHERS)
    for module, _, name in [place.partition(":")]
}
"""The module of each public name."""

__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # to a type checker a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"dure has no {name!r}; it has {', '.join(__all__)}")
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
