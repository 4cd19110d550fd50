"""Topologies: the connections of workers and servers. A line per member; the class has the rest (`core.catalogue`).

Each is a package: `choice` declares its parameters, the other modules are its part of a run.
"""

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "collective": "dure.topology.collective.choice:Collective",
    "ps": "dure.topology.parameter_server.choice:ParameterServer",
    "hybrid": "dure.topology.hybrid.choice:Hybrid",
    "shared": "dure.topology.shared_memory.choice:SharedMemory",
    "gossip": "dure.topology.gossip.choice:Gossip",
}
