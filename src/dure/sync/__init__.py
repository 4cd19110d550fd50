"""When do replicas agree? One file per method.

| name        | class       | replicas agree                                     | runs over       |
|-------------|-------------|----------------------------------------------------|-----------------|
| `bsp`       | `BSP`       | after every step                                   | collective, ps  |
| `averaging` | `Averaging` | every `period` steps, on the mean of the models    | collective, ps  |
| `downpour`  | `Downpour`  | never; the server's model is everybody's rendezvous | ps              |
| `ssp`       | `SSP`       | within `bound` clocks                              | ps              |

A method is a frozen dataclass whose fields are its parameters and whose `work` is the paper's loop
(`base.Sync`). To add one: a file here, a row in `CATALOGUE`, a page in `docs/methods`.

What makes methods wait for nobody makes their gradients stale. `REMEDIES` join them by `+` (`remedied`):

| name                    | class                  | against staleness                                         |
|-------------------------|------------------------|-----------------------------------------------------------|
| `momentum-compensation` | `MomentumCompensation` | less momentum at the servers: asynchrony brings its own   |
| `dc-asgd`               | `DCASGD`               | each gradient, corrected for how far the model has moved  |
| `staleness-lr`          | `StalenessLR`          | each gradient's rate, divided by its staleness            |
"""

from dure.catalogue import Entry

__all__ = ["CATALOGUE", "REMEDIES"]

CATALOGUE = {
    "bsp": Entry(
        "dure.sync.bsp",
        "BSP",
        "everybody's mean gradient, every step",
        "Valiant, A Bridging Model for Parallel Computation, CACM 1990",
        combines=("collective", "ps"),
    ),
    "averaging": Entry(
        "dure.sync.averaging",
        "Averaging",
        "local steps, and the mean of the models every few of them",
        "Su and Chen, Experiments on Parallel Training of Deep Neural Network using Model Averaging, 2015",
        combines=("collective", "ps"),
    ),
    "downpour": Entry(
        "dure.sync.downpour",
        "Downpour",
        "push and pull on one's own schedule, wait for nobody",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        combines=("ps",),
        because="its workers push and pull at different times, and a collective needs all of them at once",
    ),
    "ssp": Entry(
        "dure.sync.ssp",
        "SSP",
        "no worker leads the slowest by more than a bound",
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013",
        combines=("ps",),
        because="its workers are at different clocks, and a collective needs all of them at the same one",
    ),
}

_STALE = ("downpour", "ssp")

REMEDIES = {
    "momentum-compensation": Entry(
        "dure.sync.momentum_compensation",
        "MomentumCompensation",
        "take off the servers' momentum what asynchrony brings",
        "Mitliagkas, Zhang, Hadjis and Re, Asynchrony Begets Momentum, Allerton 2016",
        combines=_STALE,
    ),
    "dc-asgd": Entry(
        "dure.sync.dc_asgd",
        "DCASGD",
        "correct each gradient for how far the model has moved since",
        "Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017",
        combines=_STALE,
    ),
    "staleness-lr": Entry(
        "dure.sync.staleness_lr",
        "StalenessLR",
        "divide each gradient's rate by its staleness",
        "Zhang, Gupta, Lian and Liu, Staleness-Aware Async-SGD for Distributed Deep Learning, IJCAI 2016",
        combines=_STALE,
    ),
}
