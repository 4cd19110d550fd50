"""Who talks to whom? One line per member; the class describes the rest (`core.catalogue`).

Each is a package: `choice` declares its parameters, the other modules what it is made of.
"""

__all__ = ["CATALOGUE"]

CATALOGUE = {
    "collective": "dure.topology.collective.choice:Collective",
    "ps": "dure.topology.parameter_server.choice:ParameterServer",
    "hybrid": "dure.topology.hybrid.choice:Hybrid",
    "shared": "dure.topology.shared_memory.choice:SharedMemory",
    "gossip": "dure.topology.gossip.choice:Gossip",
}
