"""The runtime of virtual time: an event loop, a model of machines and network, and a node for each process."""
