"""Who talks to whom?

| name         | class             | gradients and parameters travel                                |
|--------------|-------------------|----------------------------------------------------------------|
| `collective` | `Collective`      | among the workers: all_reduce, broadcast                       |
| `ps`         | `ParameterServer` | between each worker and `shards` servers that hold the model   |
| `hybrid`     | `Hybrid`          | dense ones among the workers, rows to and from `shards` servers |
| `shared`     | `SharedMemory`    | nowhere: every worker reads and writes one machine's memory    |
| `gossip`     | `Gossip`          | between neighbors in a graph: pairs average their models        |

Each is a package: `choice` declares its parameters, the other modules what it is made of.
"""

from dure.core.catalogue import Entry

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "collective": Entry(
        "dure.topology.collective.choice",
        "Collective",
        "the workers among themselves, all at once",
        "Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005",
    ),
    "ps": Entry(
        "dure.topology.parameter_server.choice",
        "ParameterServer",
        "servers hold the model in shards; each worker talks to them",
        "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
    ),
    "hybrid": Entry(
        "dure.topology.hybrid.choice",
        "Hybrid",
        "dense gradients by all_reduce, rows of embeddings through servers",
        "Kim et al., Parallax: Sparsity-aware Data Parallel Training of Deep Neural Networks, EuroSys 2019",
    ),
    "shared": Entry(
        "dure.topology.shared_memory.choice",
        "SharedMemory",
        "one machine's memory holds the model; workers write to it without asking",
        "Niu, Recht, Re and Wright, Hogwild!: A Lock-Free Approach to Parallelizing SGD, NeurIPS 2011",
    ),
    "gossip": Entry(
        "dure.topology.gossip.choice",
        "Gossip",
        "every worker has its own model and averages it with one neighbor at a time",
        "Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018",
    ),
}
