"""The runtime of virtual time: a kernel of events, machines, links, and a node for each process."""
