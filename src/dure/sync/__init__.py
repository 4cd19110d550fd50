"""Synchronization methods: a file per method or family, a line per member; the class has the rest (`core.catalogue`).

A method is a frozen dataclass whose fields are its parameters and whose `work` is the paper's loop
(`base.Sync`). `docs/how-to/add-method.md` says how to add one.

Methods that wait for no worker have stale gradients. `REMEDIES` join them by `+` (`corrected`).
"""

__all__ = ["CATALOGUE", "REMEDIES"]

CATALOGUE = {
    "bsp": "dure.sync.bsp:BSP",
    "one-shot": "dure.sync.averaging:OneShot",
    "averaging": "dure.sync.averaging:Averaging",
    "easgd": "dure.sync.easgd:EASGD",
    "eamsgd": "dure.sync.easgd:EAMSGD",
    "bmuf": "dure.sync.bmuf:BMUF",
    "diloco": "dure.sync.bmuf:DiLoCo",
    "backup": "dure.sync.quorum:Backup",
    "k-sync": "dure.sync.quorum:KSync",
    "k-batch-sync": "dure.sync.quorum:KBatchSync",
    "k-async": "dure.sync.quorum:KAsync",
    "k-batch-async": "dure.sync.quorum:KBatchAsync",
    "downpour": "dure.sync.downpour:Downpour",
    "ssp": "dure.sync.ssp:SSP",
    "hogwild": "dure.sync.hogwild:Hogwild",
    "hogbatch": "dure.sync.hogwild:HogBatch",
    "asysvrg": "dure.sync.asysvrg:AsySVRG",
    "ad-psgd": "dure.sync.ad_psgd:ADPSGD",
    "lbfgs": "dure.sync.lbfgs:LBFGS",
}

REMEDIES = {
    "momentum-compensation": "dure.sync.remedies:MomentumCompensation",
    "dc-asgd": "dure.sync.remedies:DCASGD",
    "staleness-lr": "dure.sync.remedies:StalenessLR",
}
