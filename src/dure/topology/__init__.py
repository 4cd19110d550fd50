"""Who talks to whom?

| name         | class             | gradients and parameters travel                                |
|--------------|-------------------|----------------------------------------------------------------|
| `collective` | `Collective`      | among the workers: all_reduce, broadcast                       |
| `ps`         | `ParameterServer` | between each worker and `shards` servers that hold the model   |

`spec` declares the choices; `sharding` cuts the flat parameters; `parameter_server` is the shard itself.
"""

from dure.catalogue import Entry

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "collective": Entry(
        "dure.topology.spec",
        "Collective",
        "the workers among themselves, all at once",
        "Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005",
    ),
    "ps": Entry(
        "dure.topology.spec",
        "ParameterServer",
        "servers hold the model in shards; each worker talks to them",
        "Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014",
    ),
}
