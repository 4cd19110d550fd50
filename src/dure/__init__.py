"""Train one PyTorch model on many machines: every way of doing it, in virtual and in real time.

    import dure
    run = dure.train("digits-mlp", sync="ssp:bound=3", topology="ps:shards=2", on="virtual", workers=8)
    run.summary()

Importing this imports no torch: a name is loaded when it is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.attach import attach
    from dure.compare import compare
    from dure.data.dataset import Data
    from dure.data.samples import Samples
    from dure.data.stream import Stream
    from dure.ddp_hook import hook
    from dure.errors import DureError
    from dure.job import Job
    from dure.optim import OptimizerSpec
    from dure.runtime.cluster import Cluster
    from dure.strategy import Strategy
    from dure.sync.averaging import Averaging
    from dure.sync.bsp import BSP
    from dure.sync.dc_asgd import DCASGD
    from dure.sync.downpour import Downpour
    from dure.sync.easgd import EAMSGD, EASGD
    from dure.sync.momentum_compensation import MomentumCompensation
    from dure.sync.ssp import SSP
    from dure.sync.staleness_lr import StalenessLR
    from dure.topology.spec import Collective, Gossip, Hybrid, ParameterServer
    from dure.train import train

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
    "Cluster": "dure.runtime.cluster",
    "Collective": "dure.topology.spec",
    "Data": "dure.data.dataset",
    "Downpour": "dure.sync.downpour",
    "DureError": "dure.errors",
    "Gossip": "dure.topology.spec",
    "Hybrid": "dure.topology.spec",
    "Job": "dure.job",
    "MomentumCompensation": "dure.sync.momentum_compensation",
    "OptimizerSpec": "dure.optim",
    "ParameterServer": "dure.topology.spec",
    "Samples": "dure.data.samples",
    "StalenessLR": "dure.sync.staleness_lr",
    "Strategy": "dure.strategy",
    "Stream": "dure.data.stream",
    "attach": "dure.attach",
    "compare": "dure.compare",
    "hook": "dure.ddp_hook",
    "train": "dure.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"dure has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """`dure.train` is the function, whoever imported the module of that name: importing it would bind the module."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
