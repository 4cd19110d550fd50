"""Train one PyTorch model on many machines: every way of doing it, in virtual and in real time.

    import dure
    run = dure.train("digits-mlp", sync="ssp:bound=3", topology="ps:shards=2", on="virtual", workers=8)
    run.summary()

Importing this imports no torch: a name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.errors import DureError
    from dure.job.data.dataset import Data
    from dure.job.data.samples import Samples
    from dure.job.data.stream import Stream
    from dure.job.job import Job
    from dure.job.optimizer import OptimizerSpec
    from dure.run.compare import compare
    from dure.run.strategy import Strategy
    from dure.run.train import train
    from dure.runtime.virtual.cluster import Cluster
    from dure.sync.averaging import Averaging
    from dure.sync.bsp import BSP
    from dure.sync.dc_asgd import DCASGD
    from dure.sync.downpour import Downpour
    from dure.sync.easgd import EAMSGD, EASGD
    from dure.sync.momentum_compensation import MomentumCompensation
    from dure.sync.ssp import SSP
    from dure.sync.staleness_lr import StalenessLR
    from dure.topology.collective.choice import Collective
    from dure.topology.gossip.choice import Gossip
    from dure.topology.hybrid.choice import Hybrid
    from dure.topology.parameter_server.choice import ParameterServer
    from dure.user_loop.attached import attach
    from dure.user_loop.ddp_hook import hook

__version__ = "0.1.0"

__all__ = [
    "BSP",
    "DCASGD",
    "EAMSGD",
    "EASGD",
    "SSP",
    "Averaging",
    "Cluster",
    "Collective",
    "Data",
    "Downpour",
    "DureError",
    "Gossip",
    "Hybrid",
    "Job",
    "MomentumCompensation",
    "OptimizerSpec",
    "ParameterServer",
    "Samples",
    "StalenessLR",
    "Strategy",
    "Stream",
    "attach",
    "compare",
    "hook",
    "train",
]

_HOMES = {
    "BSP": "dure.sync.bsp",
    "DCASGD": "dure.sync.dc_asgd",
    "EAMSGD": "dure.sync.easgd",
    "EASGD": "dure.sync.easgd",
    "SSP": "dure.sync.ssp",
    "Averaging": "dure.sync.averaging",
    "Cluster": "dure.runtime.virtual.cluster",
    "Collective": "dure.topology.collective.choice",
    "Data": "dure.job.data.dataset",
    "Downpour": "dure.sync.downpour",
    "DureError": "dure.errors",
    "Gossip": "dure.topology.gossip.choice",
    "Hybrid": "dure.topology.hybrid.choice",
    "Job": "dure.job.job",
    "MomentumCompensation": "dure.sync.momentum_compensation",
    "OptimizerSpec": "dure.job.optimizer",
    "ParameterServer": "dure.topology.parameter_server.choice",
    "Samples": "dure.job.data.samples",
    "StalenessLR": "dure.sync.staleness_lr",
    "Strategy": "dure.run.strategy",
    "Stream": "dure.job.data.stream",
    "attach": "dure.user_loop.attached",
    "compare": "dure.run.compare",
    "hook": "dure.user_loop.ddp_hook",
    "train": "dure.run.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"dure has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
