"""When do replicas agree? One file per method.

| name        | class       | replicas agree                                     | runs over       |
|-------------|-------------|----------------------------------------------------|-----------------|
| `bsp`       | `BSP`       | after every step                                   | collective, ps  |
| `one-shot`  | `OneShot`   | once, at the end, on the mean of the models        | collective, ps  |
| `averaging` | `Averaging` | every `period` steps, on the mean of the models    | collective, ps  |
| `easgd`     | `EASGD`     | every `period` steps, by a spring to a center      | ps, collective  |
| `eamsgd`    | `EAMSGD`    | as `easgd`, with momentum at the workers           | ps, collective  |
| `bmuf`      | `BMUF`      | every `period` steps; the mean moves with momentum | collective, ps  |
| `diloco`    | `DiLoCo`    | as `bmuf`, with AdamW at the workers               | collective, ps  |
| `backup`    | `Backup`    | after every step, without the `backups` slowest    | ps              |
| `k-sync`    | `KSync`     | after the first `k` workers                        | ps              |
| `k-batch-sync` | `KBatchSync` | after the first `k` mini-batches                | ps              |
| `k-async`   | `KAsync`    | after any `k` workers' updates, however stale      | ps              |
| `k-batch-async` | `KBatchAsync` | after any `k` updates, however stale          | ps              |
| `downpour`  | `Downpour`  | never; the server's model is everybody's rendezvous | ps              |
| `ssp`       | `SSP`       | within `bound` clocks                              | ps              |
| `hogwild`   | `Hogwild`   | always: there is one model, in shared memory       | shared          |
| `hogbatch`  | `HogBatch`  | as `hogwild`, but for what is not yet written      | shared          |
| `asysvrg`   | `AsySVRG`   | as `hogwild`, and all at once every epoch          | shared          |
| `ad-psgd`   | `ADPSGD`    | with one neighbor at a time, beside the gradients  | gossip          |
| `lbfgs`     | `LBFGS`     | at every point: they evaluate parts of one gradient | ps             |

A method is a frozen dataclass whose fields are its parameters and whose `work` is the paper's loop
(`base.Sync`). To add one: a file here, a row in `CATALOGUE`, a page in `docs/methods`.

What makes methods wait for nobody makes their gradients stale. `REMEDIES` join them by `+` (`remedied`):

| name                    | class                  | against staleness                                         |
|-------------------------|------------------------|-----------------------------------------------------------|
| `momentum-compensation` | `MomentumCompensation` | less momentum at the servers: asynchrony brings its own   |
| `dc-asgd`               | `DCASGD`               | each gradient, corrected for how far the model has moved  |
| `staleness-lr`          | `StalenessLR`          | each gradient's rate, divided by its staleness            |
"""

from dure.core.catalogue import Entry

__all__ = ["CATALOGUE", "REMEDIES"]

CATALOGUE = {
    "bsp": Entry(
        "dure.sync.bsp",
        "BSP",
        "everybody's mean gradient, every step",
        "Valiant, A Bridging Model for Parallel Computation, CACM 1990",
        combines=("collective", "ps", "hybrid"),
    ),
    "one-shot": Entry(
        "dure.sync.one_shot",
        "OneShot",
        "everybody alone to the end, and then the mean of the models",
        "Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010",
        combines=("collective", "ps"),
    ),
    "averaging": Entry(
        "dure.sync.averaging",
        "Averaging",
        "local steps, and the mean of the models every few of them",
        "Su and Chen, Experiments on Parallel Training of Deep Neural Network using Model Averaging, 2015",
        combines=("collective", "ps"),
    ),
    "easgd": Entry(
        "dure.sync.easgd",
        "EASGD",
        "every worker its own model, on a spring to a center",
        "Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015",
        combines=("ps", "collective"),
    ),
    "eamsgd": Entry(
        "dure.sync.easgd",
        "EAMSGD",
        "elastic averaging with momentum at the workers",
        "Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015",
        combines=("ps", "collective"),
    ),
    "bmuf": Entry(
        "dure.sync.bmuf",
        "BMUF",
        "local steps, and a step of the mean model with momentum every few of them",
        "Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block "
        "Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016",
        combines=("collective", "ps"),
    ),
    "diloco": Entry(
        "dure.sync.bmuf",
        "DiLoCo",
        "AdamW at the workers, and Nesterov's momentum from mean to mean",
        "Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023",
        combines=("collective", "ps"),
    ),
    "backup": Entry(
        "dure.sync.backup",
        "Backup",
        "every step, the mean gradient of all but the slowest few",
        "Chen, Pan, Monga, Bengio and Jozefowicz, Revisiting Distributed Synchronous SGD, 2016",
        combines=("ps",),
        because="it goes on without the slowest workers",
        clash="a collective needs all of them",
    ),
    "k-sync": Entry(
        "dure.sync.k_sync",
        "KSync",
        "an update takes the first k workers; the others start over",
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018",
        combines=("ps",),
        because="it goes on without the slowest workers",
        clash="a collective needs all of them",
    ),
    "k-batch-sync": Entry(
        "dure.sync.k_sync",
        "KBatchSync",
        "an update takes the first k mini-batches; the others start over",
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018",
        combines=("ps",),
        because="a fast worker gives several gradients to an update",
        clash="a collective takes one of each",
    ),
    "k-async": Entry(
        "dure.sync.k_async",
        "KAsync",
        "an update takes any k workers' gradients, however stale",
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018",
        combines=("ps",),
        because="its workers are at different versions",
        clash="a collective needs all of them at the same one",
    ),
    "k-batch-async": Entry(
        "dure.sync.k_async",
        "KBatchAsync",
        "an update takes any k gradients, however stale, and nobody waits",
        "Dutta, Joshi, Ghosh, Dube and Nagpurkar, Slow and Stale Gradients Can Win the Race, AISTATS 2018",
        combines=("ps",),
        because="its workers push at different times",
        clash="a collective needs all of them at once",
    ),
    "downpour": Entry(
        "dure.sync.downpour",
        "Downpour",
        "push and pull on one's own schedule, wait for nobody",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        combines=("ps",),
        because="its workers push and pull at different times",
        clash="a collective needs all of them at once",
    ),
    "ssp": Entry(
        "dure.sync.ssp",
        "SSP",
        "no worker leads the slowest by more than a bound",
        "Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013",
        combines=("ps",),
        because="its workers are at different clocks",
        clash="a collective needs all of them at the same one",
    ),
    "hogwild": Entry(
        "dure.sync.hogwild",
        "Hogwild",
        "write to the model in shared memory, without locks",
        "Niu, Recht, Re and Wright, Hogwild!: A Lock-Free Approach to Parallelizing SGD, NeurIPS 2011",
        combines=("shared",),
        because="its workers write to one model, in the memory of one machine",
    ),
    "hogbatch": Entry(
        "dure.sync.hogwild",
        "HogBatch",
        "hogwild that writes once for several mini-batches",
        "Sallinen et al., High Performance Parallel Stochastic Gradient Descent in Shared Memory, IPDPS 2016",
        combines=("shared",),
        because="its workers write to one model, in the memory of one machine",
    ),
    "asysvrg": Entry(
        "dure.sync.asysvrg",
        "AsySVRG",
        "hogwild with variance reduction, at a constant rate",
        "Zhao and Li, Fast Asynchronous Parallel Stochastic Gradient Descent, AAAI 2016",
        combines=("shared",),
        because="its workers write to one model, in the memory of one machine",
    ),
    "ad-psgd": Entry(
        "dure.sync.ad_psgd",
        "ADPSGD",
        "average with one neighbor at a time, and never stop for it",
        "Lian, Zhang, Zhang and Liu, Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018",
        combines=("gossip",),
        because="its workers meet in pairs, each at its own time, and have no server between them",
    ),
    "lbfgs": Entry(
        "dure.sync.lbfgs",
        "LBFGS",
        "one coordinator, many small portions of a large batch",
        "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012",
        combines=("ps",),
        because="its vectors live on servers, where a coordinator commands them",
    ),
}

_STALE = ("downpour", "ssp", "k-async", "k-batch-async")

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
